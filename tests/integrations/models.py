"""Tiny models of the supported classes, and the comparison with the eager model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from tests.reference import assert_within

VOCABULARY = 64
_DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_cache": False,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a tiny model."""
    if name == "qwen3":
        own = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
        return Qwen3MoeConfig(**{**_DENSE, **own, **changes})
    if name == "glm4":
        own = {
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
        }
        return Glm4MoeConfig(**{**_DENSE, **own, "first_k_dense_replace": 1, "n_group": 1, **changes})
    if name == "mixtral":
        own = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return MixtralConfig(**{**_DENSE, **own, **changes})
    if name == "deepseek3":
        own = {
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
        }
        dense = {key: value for key, value in _DENSE.items() if key != "head_dim"}
        return DeepseekV3Config(**{**dense, **_LATENT, **own, "first_k_dense_replace": 1, **changes})
    if name == "gpt_oss":
        return GptOssConfig(**{**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, **changes})
    raise ValueError(name)


SUPPORTED = ("qwen3", "glm4", "mixtral", "deepseek3")


def make_model(
    name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A tiny model in train mode with eager attention and eager experts; weights large enough to matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config_of(name, **changes), attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)  # the default 0.02 leaves an expert's output near zero
    return model.to(dtype).train()


def make_tokens(batch: int = 2, length: int = 12, *, seed: int = 1) -> Tensor:
    """(batch, length) int64 token ids, never the padding id 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


class Tokens(Dataset[dict[str, Any]]):
    """`count` sequences of 8 tokens, for a Trainer."""

    def __init__(self, count: int) -> None:
        self.ids = make_tokens(count, 8)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def run(model: PreTrainedModel, ids_BS: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """One forward and backward: loss, logits and every parameter's gradient by name."""
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids_BS, **{"labels": ids_BS, **inputs})
    out.loss.backward()
    found = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found


def assert_same(actual: dict[str, Tensor], model: PreTrainedModel, ids_BS: Tensor, **inputs: Any) -> None:
    """Check loss, logits and gradients against the eager `model`: tolerance from its run in its own dtype."""
    plain = run(copy.deepcopy(model), ids_BS, **inputs)
    exact = run(copy.deepcopy(model).double(), ids_BS, **inputs)
    assert actual.keys() == plain.keys()
    for name, value in actual.items():
        assert_within(value, exact[name], plain[name], name)
