"""Training on shards of experts: the weights that owned storage reaches, at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.distributed import Comm
from lrmoe.distributed.sharded import gather_homes
from lrmoe.training.config import ModelConfig
from lrmoe.training.model import build_model, expert_cuts
from tests.distributed.pool import Pool
from tests.training.test_model import fuse, saved
from tests.training.tiny import CPU, SHAPE, whole_state

LIMIT_S = 120  # the first case imports transformers in every process
EXPERTS = "model.layers.{}.mlp.experts.{}"
NAMES = [EXPERTS.format(layer, name) for layer in range(2) for name in ("gate_up_proj", "down_proj")]


def group_of(ranks: int) -> Any:
    return dist.group.WORLD if ranks > 1 else None


def joined(tensors: dict[str, Tensor], model: Any, group: Any) -> dict[str, tuple[Tensor, Any]]:
    """Shards as this rank's home experts, with a mark for `whole_state`; everything else as it is."""
    cuts = expert_cuts(model)
    return {
        name: (gather_homes(Comm(group), tensor, cuts[name]), "home") if name in cuts else (tensor, None)
        for name, tensor in tensors.items()
    }


def built(config: ModelConfig, ranks: int) -> dict[str, Any]:
    group = group_of(ranks)
    model = build_model(config, seed=0, device=CPU, group=group, storage="sharded")
    found = {name: p.detach() for name, p in model.named_parameters()}
    assert {name for name, p in found.items() if p.ndim == 2 and ".experts." in name} == set(NAMES)
    return joined(found, model, group)


@pytest.mark.distributed
@pytest.mark.parametrize("source", ["preset", "checkpoint", "fused"])
def test_initial_weights_are_those_of_owned_storage(pool4: Pool, tmp_path: Path, source: str) -> None:
    whole = dict(saved(tmp_path).named_parameters())
    if source == "fused":
        fuse(tmp_path)
    config = ModelConfig(overrides=SHAPE) if source == "preset" else ModelConfig(checkpoint=str(tmp_path))
    for found in (whole_state(pool4.run(built, config, 4, limit_s=LIMIT_S)), whole_state([built(config, 1)])):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
