"""Whatever a policy plans, the runtime computes the plain loop: outputs and all gradients, over several calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.config import POLICIES
from lrmoe.layer import MoELayer
from tests.distributed.calls import bounds_of, even, merge
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, run
from tests.reference import Result, assert_result, make_case

CALLS = 4  # history policies start from fixed ownership and move in later calls


def run_calls(config: Any, ranks: int, calls: int, dtype: torch.dtype) -> list[tuple[Result, list[int]]]:
    """Runs in a worker: several calls of one layer, each with another skewed batch."""
    layer: MoELayer | None = None
    found = []
    for number in range(calls):
        case = make_case(
            tokens=13 * ranks, experts=16, top_k=4, hidden=8, width=6, seed=number % 2, dtype=dtype, skew=3.0
        )
        if layer is None:
            layer = build(case, config, group=dist.group.WORLD)
        sizes = even(case, ranks)
        mine = case.tokens(*bounds_of(sizes)[dist.get_rank()])
        one = run(mine, config, group=dist.group.WORLD, layer=layer)
        found.append((one.result, one.record.replicas_R))
    return found


def check(pool: Pool, config: Any, *, calls: int = CALLS, dtype: torch.dtype = torch.float64) -> int:
    """Compare every call with the plain loop; returns how many foreign copies the last call had."""
    ranks = pool.run(run_calls, config, pool.world_size, calls, dtype)
    for number in range(calls):
        case = make_case(
            tokens=13 * pool.world_size, experts=16, top_k=4, hidden=8, width=6, seed=number % 2, dtype=dtype,
            skew=3.0,
        )  # fmt: skip
        merged = merge([calls_of[number][0] for calls_of in ranks])
        assert_result(merged, case, what=f"call {number}")
    return sum(ranks[0][-1][1])


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_exact(pool4: Pool, policy: str, lean: bool) -> None:
    copies = check(pool4, exact(policy=policy, lean_wire=lean))
    if policy not in ("megatron", "fastermoe", "smartmoe"):  # a copy to all, a permutation: neither pays here
        assert copies > 0, "the case must make the policy move experts"
