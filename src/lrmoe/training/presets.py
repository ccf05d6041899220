"""Model shapes that ship with the package, as arguments of transformers' own configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lrmoe.errors import ConfigError, did_you_mean

SEPARATOR_ID = 256  # between two files of the corpus
PAD_ID = 257
BYTE_VOCABULARY = 258


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model shape.

    Attributes:
        model_type: transformers' name of the architecture.
        about: one line for tables.
        fields: arguments of its configuration class.
    """

    model_type: str
    about: str
    fields: Mapping[str, Any]


_BYTE_LEVEL = {
    "vocab_size": BYTE_VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": SEPARATOR_ID,
    "pad_token_id": PAD_ID,
    "use_cache": False,
}

# Sized for one CPU core: 2048 tokens a step in well under a second, and expert GEMMs most of the MoE layer's work.
_TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}

_GLM = {"n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "num_mtp_layers": 0}

# For many runs of a few hundred steps: 1024 tokens a step in less than a tenth of a second, 4 experts for each of 8
# ranks, and routing that is as uneven as without an auxiliary loss in models of any size.
_MICRO = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}

PRESETS: dict[str, Preset] = {
    "qwen3-moe-tiny": Preset(
        model_type="qwen3_moe",
        about="Qwen3-MoE, 3 layers, 16 experts, top-4, byte level",
        fields={**_BYTE_LEVEL, **_TINY, "num_hidden_layers": 3, "num_experts": 16, "norm_topk_prob": True},
    ),
    "glm4-moe-tiny": Preset(
        model_type="glm4_moe",
        about="GLM-4.5 (one dense layer, 3 MoE layers, a shared expert), 16 experts, top-4, byte level",
        fields={
            **_BYTE_LEVEL,
            **_TINY,
            "num_hidden_layers": 4,
            "n_routed_experts": 16,
            **_GLM,
        },
    ),
    "qwen3-moe-micro": Preset(
        model_type="qwen3_moe",
        about="Qwen3-MoE, 2 layers, 32 experts, top-4, 1.7 M parameters, byte level",
        fields={**_BYTE_LEVEL, **_MICRO, "num_hidden_layers": 2, "num_experts": 32, "norm_topk_prob": True},
    ),
    "glm4-moe-micro": Preset(
        model_type="glm4_moe",
        about="GLM-4.5 (1 dense layer, 2 MoE layers, a shared expert), 32 experts, top-4, 1.9 M parameters, byte level",
        fields={**_BYTE_LEVEL, **_MICRO, "num_hidden_layers": 3, "n_routed_experts": 32, **_GLM},
    ),
}
DEFAULT_PRESET = "qwen3-moe-tiny"


def get_preset(name: str) -> Preset:
    """Look a preset up.

    Raises:
        ConfigError: no such preset; names the nearest and all valid ones.
    """
    if name in PRESETS:
        return PRESETS[name]
    hint = did_you_mean(name, PRESETS, cutoff=0.4)
    raise ConfigError(f"model.preset={name!r}: no such preset{hint}; valid: {', '.join(PRESETS)}")
