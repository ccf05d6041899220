"""U13: the same data and weights give the same expert gradients as EP 1 x DP 2 and as EP 2 x DP 1."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.calls import bounds_of
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, forward, leaves, pruning
from tests.reference import GRADS, make_case, plain_loop

pytestmark = pytest.mark.distributed
CASE = make_case(tokens=8, experts=4, top_k=2, hidden=8, width=6)


def mean_loss_grads(config: Any, expert_parallel: bool) -> dict[str, Tensor]:
    """Each rank takes the mean over its own 4 tokens; data parallelism averages gradients over ranks."""
    part = CASE.tokens(*bounds_of([4, 4])[dist.get_rank()])
    group = dist.group.WORLD if expert_parallel else None
    leaf = leaves(part, GRADS, group)
    out = forward(build(part, config, group=group), part, leaf)
    out.square().mean().backward()
    grads = {n: leaf[n].grad for n in ("d_gate_up", "d_down")}
    for grad in grads.values():
        assert grad is not None
        if not expert_parallel:
            dist.all_reduce(grad)
        grad.div_(2)  # the stated rule: divide by the data-parallel world, which is 2 in both layouts
    return grads  # type: ignore[return-value]


def reference_grads() -> dict[str, Tensor]:
    out = plain_loop(CASE).out
    upstream = 2 * out / out.numel()  # mean over all 8 tokens
    found = plain_loop(dataclasses.replace(CASE, grad_out=upstream))
    return {"d_gate_up": found.d_gate_up, "d_down": found.d_down}  # type: ignore[dict-item]


def test_layouts_agree(pool2: Pool) -> None:
    wanted = reference_grads()
    data_parallel = pool2.run(mean_loss_grads, exact(), False)
    expert_parallel = pool2.run(mean_loss_grads, exact(), True)
    for name, truth in wanted.items():
        for rank in data_parallel:
            torch.testing.assert_close(rank[name], truth, rtol=1e-10, atol=1e-13)
        joined = torch.cat([rank[name] for rank in expert_parallel])
        torch.testing.assert_close(joined, truth, rtol=1e-10, atol=1e-13)


def test_a_weight_of_one_over_pi_is_not_rescaled_by_the_layout(pool2: Pool) -> None:
    """With every pair kept by topk at max_drop near 0 the pruned path runs and must scale like the exact one."""
    config = pruning(max_drop=0.07, estimator="topk", router_grad="full")  # floor(0.07 * 16) = 1 pair goes
    expert_parallel = pool2.run(mean_loss_grads, config, True)
    joined = torch.cat([rank["d_down"] for rank in expert_parallel])
    truth = reference_grads()["d_down"]
    same = [e for e in range(4) if torch.allclose(joined[e], truth[e], rtol=1e-10, atol=1e-13)]
    assert len(same) == 3
