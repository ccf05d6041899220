"""A model and a corpus small enough to train in milliseconds, and a float64 twin of the model."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lrmoe.training.config import TrainConfig
from lrmoe.training.model import build_model

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GLM_SHAPE = {**{k: v for k, v in SHAPE.items() if k != "num_experts"}, "n_routed_experts": 4}
CPU = torch.device("cpu")


def tiny_config(folder: Path | str, **tables: dict[str, Any]) -> TrainConfig:
    """A run in `folder` on a small text file that lies there."""
    corpus = Path(folder) / "corpus.txt"
    if not corpus.exists():
        corpus.write_text("".join(f"line {i}: {i * i} squared, {i % 7} left over\n" for i in range(400)))
    base: dict[str, dict[str, Any]] = {
        "model": {"overrides": SHAPE},
        "data": {"path": str(corpus), "seq_len": 16, "held_out": 0.05},
        "optim": {"warmup_steps": 2, "lr": 3e-3},
        "train": {"runs": str(folder), "name": "run", "steps": 8, "batch_size": 2, "device": "cpu"},
        "lrmoe": {"max_drop": 0.3, "warmup_steps": 1},
    }
    for name, changes in tables.items():
        base[name] = {**base[name], **changes}
    return TrainConfig.from_dict(base)


def float64_model(config: TrainConfig, group: Any = None) -> nn.Module:
    """The run's model in float64 throughout: transformers computes norms and routing weights in float32."""
    storage = config.lrmoe.storage
    model = build_model(
        config.model, seed=config.train.seed, device=CPU, group=group, storage=storage
    ).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_norm, module)
        elif type(module).__name__.endswith("TopKRouter"):
            module.forward = types.MethodType(_route, module)
    return model


def _norm(module: Any, hidden: Tensor) -> Tensor:
    return (
        module.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)
    )


def _route(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
    top, ids = logits.softmax(-1).topk(module.top_k, dim=-1)
    return logits, top / top.sum(-1, keepdim=True), ids


def whole_state(trainers: list[dict[str, Any]]) -> dict[str, Tensor]:
    """All ranks' `local_state` as one model's parameters; dense ones must be the same bits on all ranks."""
    whole = {}
    for name, (_, span) in trainers[0].items():
        parts = [trainer[name][0] for trainer in trainers]
        if span is None:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            whole[name] = parts[0]
        else:
            whole[name] = torch.cat(parts)
    return whole


def local_state(trainer: Any) -> dict[str, Any]:
    """Name -> (master, span) of a trainer's parameters."""
    return {e.name: (e.master.detach().clone(), e.span) for e in trainer.parameters.entries}
