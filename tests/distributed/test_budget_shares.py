"""Budgets where ranks differ: shares of devices of two sizes, and one rank alone that checkpoints."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lrmoe.config import LRMoEConfig
from lrmoe.errors import RankError
from lrmoe.layer import announce
from tests.distributed.calls import bounds_of, even
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, forward, leaves
from tests.reference import GRADS, Case, make_case

pytestmark = pytest.mark.distributed

CASE = make_case(tokens=120, experts=4, top_k=2, hidden=48, width=32, dtype=torch.float32)


def on_unlike_devices(config: LRMoEConfig) -> int:
    """Worker: parts of a call whose budget is a share of this rank's device; the second rank's is ten times larger."""
    group, rank = dist.group.WORLD, dist.get_rank()
    mine = CASE.tokens(*bounds_of(even(CASE, 2))[rank])
    with mock.patch.object(announce, "device_bytes", return_value=2**19 * (1 + 9 * rank)):
        layer = build(mine, config, group=group)
        forward(layer, mine, leaves(mine, GRADS, group)).backward(mine.grad_out)
    assert layer.last_record is not None
    return layer.last_record.chunks


@pytest.mark.parametrize("name", ["layer_budget", "memory_budget"])
def test_a_share_is_of_the_smallest_device(pool2: Pool, name: str) -> None:
    chunks = pool2.run(on_unlike_devices, exact(**{name: "25%" if name == "layer_budget" else "35%"}))
    assert chunks[0] == chunks[1] > 1


def one_checkpoints(case: Case, config: LRMoEConfig) -> str:
    """Worker: the first rank alone checkpoints."""
    group, rank = dist.group.WORLD, dist.get_rank()
    mine = case.tokens(*bounds_of(even(case, 2))[rank])
    kind = "non-reentrant" if rank == 0 else None
    try:
        forward(build(mine, config, group=group), mine, leaves(mine, GRADS, group), checkpoint=kind)
    except RankError as error:
        return str(error)
    return ""


def test_ranks_that_keep_a_model_budget_checkpoint_alike(pool2: Pool) -> None:
    for text in pool2.run(one_checkpoints, CASE, exact(memory_budget="1GiB")):
        assert "checkpoint" in text
    assert pool2.run(one_checkpoints, CASE, exact()) == ["", ""]
