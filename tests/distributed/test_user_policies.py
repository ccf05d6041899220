"""Policies from a file that fail, or answer differently, on some ranks: an error on every rank at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from lrmoe.errors import LRMoEError
from tests.distributed.calls import bounds_of, even
from tests.distributed.pool import Pool
from tests.distributed.test_faults import healthy
from tests.layer.harness import build, exact, forward, leaves
from tests.reference import GRADS, make_case

pytestmark = pytest.mark.distributed

CASE = make_case(tokens=24, experts=4, top_k=2, hidden=8, width=6)
FILE = """
import torch.distributed as dist
from lrmoe.planning import get_policy

def fails(problem):
    if dist.get_rank() == 1:
        raise ValueError("lost")
    return get_policy("megatron")(problem)

def differs(problem):
    return get_policy("llep" if dist.get_rank() == 1 else "megatron")(problem)

def agrees(problem):
    return get_policy("llep")(problem)
"""


def called(policy: str, training: bool) -> tuple[str, str, bool]:
    """Worker: what was raised here, and whether the group works afterwards."""
    group = dist.group.WORLD
    mine = CASE.tokens(*bounds_of(even(CASE, 2))[dist.get_rank()])
    layer = build(mine, exact(policy=policy), group=group)
    try:
        forward(layer, mine, leaves(mine, GRADS, group), training=training).backward(mine.grad_out)
    except LRMoEError as error:
        return type(error).__name__, str(error), healthy(group)
    return "nothing", "", healthy(group)


@pytest.mark.parametrize("training", [True, False])
def test_what_one_rank_says_every_rank_knows(pool2: Pool, tmp_path: Path, training: bool) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    (first, text, works), (second, own, also) = pool2.run(called, f"{file}:fails", training, limit_s=20)
    assert (first, second, works, also) == ("RankError", "PlanError", True, True)
    assert "failed on rank 1" in text
    assert "ValueError: lost" in own
    for kind, text, works in pool2.run(called, f"{file}:differs", training, limit_s=20):
        assert kind == "PlanError"
        assert "differ between ranks (rank 0 and rank 1)" in text
        assert works
    assert [one[0] for one in pool2.run(called, f"{file}:agrees", training, limit_s=20)] == ["nothing"] * 2
