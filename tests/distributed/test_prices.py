"""What a layer asks its policy for: prices of copies from sizes and devices, the same on all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lrmoe.layer import announce
from lrmoe.planning import LayerPlan, Problem, get_policy
from lrmoe.planning.rates import CPU, UNKNOWN, Sizes, copy_price
from tests.distributed.calls import bounds_of, even
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, pruning, run
from tests.reference import make_case

pytestmark = pytest.mark.distributed
SIZES = Sizes(hidden=8, width=6, ranks=2, element_bytes=8)


def asked(mixed: bool) -> list[tuple[float, float, int]]:
    """Worker: prices and copies of an exact call on a lean wire, and of a pruned one that keeps outputs."""
    case = make_case(tokens=40, experts=8, top_k=2, hidden=8, width=6, seed=4, skew=3.0)
    found = []

    def policy(problem: Problem) -> LayerPlan:
        plan = get_policy("lrmoe")(problem)
        found.append((problem.copy_rows, problem.cross_rows, int(plan.replicas_R.sum())))
        assert get_policy("lrmoe")(dataclasses.replace(problem, copy_rows=0.0)).replicas_R.any()
        return plan

    code = 2 if mixed and dist.get_rank() else CPU
    configs: list[Any] = [exact(lean_wire=True), pruning(max_drop=0.5, lean_wire="auto", router_grad="full")]
    with mock.patch.object(announce, "device_code", return_value=code):
        for config in configs:
            layer = build(case, config, group=dist.group.WORLD, policy=policy)
            part = case.tokens(*bounds_of(even(case, dist.get_world_size()))[dist.get_rank()])
            run(part, config, group=dist.group.WORLD, layer=layer)
    return found


@pytest.mark.parametrize("mixed", [False, True])
def test_all_ranks_ask_with_the_prices_of_their_sizes_and_devices(pool2: Pool, mixed: bool) -> None:
    ranks = pool2.run(asked, mixed)
    assert ranks[0] == ranks[1]
    device = UNKNOWN if mixed else CPU
    lean, full = copy_price(device, dataclasses.replace(SIZES, lean=True)), copy_price(device, SIZES)
    assert ranks[0] == [(*lean, 0), (*full, 0)], "and a call as small as this places none"
