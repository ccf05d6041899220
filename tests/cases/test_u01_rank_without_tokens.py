"""U01: a rank that receives nothing, sends nothing, or keeps nothing still joins every exchange and gets zeros."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import bounds_of, merge, spread, spread_kept
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, forward, leaves, pruning
from tests.reference import GRADS, Case, Result, assert_result, make_case

pytestmark = pytest.mark.distributed
DTYPES = [torch.float32, torch.bfloat16]


def case_on_first_rank(tokens: int, dtype: torch.dtype) -> Case:
    """k=1, E=4, d=8; every pair goes to expert 0 or 1, both on rank 0."""
    case = make_case(tokens=tokens, experts=4, top_k=1, hidden=8, width=6, dtype=dtype)
    return dataclasses.replace(case, ids=case.ids % 2)


def three_steps(case: Case, config: Any, sizes: list[int]) -> Result:
    """Worker: forward, backward and an SGD step, three times; returns the last step's result."""
    part = case.tokens(*bounds_of(sizes)[dist.get_rank()])
    layer = build(part, config, group=dist.group.WORLD)
    leaf = leaves(part, GRADS, dist.group.WORLD)
    optimizer = torch.optim.SGD([leaf["d_gate_up"], leaf["d_down"]], lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        leaf["d_hidden"].grad = leaf["d_weights"].grad = None
        out = forward(layer, part, leaf)
        out.backward(part.grad_out)
        optimizer.step()
        layer.clock.advance()
    return Result(out=out.detach(), **{n: leaf[n].grad for n in GRADS})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[4, 4], [0, 4], [0, 0]], ids=str)
def test_idle_ranks(pool2: Pool, sizes: list[int], dtype: torch.dtype) -> None:
    case = case_on_first_rank(sum(sizes), dtype)
    ranks = pool2.run(three_steps, case, exact(), sizes, limit_s=30)
    assert [r.out.shape for r in ranks] == [(size, 8) for size in sizes]
    assert_result(merge(ranks), case)
    for name in ("d_gate_up", "d_down"):  # local experts of the idle rank: zeros, not None
        assert torch.equal(getattr(ranks[1], name), torch.zeros_like(getattr(ranks[1], name)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rank_whose_experts_keep_nothing(pool2: Pool, dtype: torch.dtype) -> None:
    """Counts are fine on both ranks; every quota of the second rank's experts is 0."""
    ids = torch.tensor([[0], [1], [0], [2], [1], [0], [3], [2]])
    case = dataclasses.replace(case_on_first_rank(8, dtype), ids=ids)
    # Rank 0 has 5 rows, rank 1 has 3; 7 of 8 may go and no floor holds any: one row is kept, on one rank.
    config = pruning(max_drop=0.9, min_keep=0, estimator="topk", router_grad="full")
    found = spread(pool2, case, config)
    load = list(found.records[0].backward_load_R)
    assert sorted(load) == [0, 1]
    idle = found.ranks[load.index(0)]
    for name in ("d_gate_up", "d_down"):
        assert torch.equal(getattr(idle, name), torch.zeros_like(getattr(idle, name)))
    wide = case.to(torch.float64)
    assert_result(found.result, case, keep_TK=spread_kept(pool2, wide, config))


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
@pytest.mark.parametrize("sizes", [[4, 4], [0, 8], [0, 0]], ids=str)
def test_idle_ranks_under_pruning(pool2: Pool, sizes: list[int], estimator: str) -> None:
    case = case_on_first_rank(sum(sizes), torch.float64)
    config = pruning(max_drop=0.5, estimator=estimator, router_grad="full", replica_slots=0)
    found = spread(pool2, case, config, sizes=sizes)
    assert_result(found.result, case, keep_TK=spread_kept(pool2, case, config, sizes=sizes))
    assert list(found.records[0].backward_load_R)[1] == 0


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_idle_ranks_under_checkpointing(pool2: Pool, checkpoint: str) -> None:
    case = case_on_first_rank(4, torch.float64)
    assert_result(spread(pool2, case, exact(), sizes=[0, 4], checkpoint=checkpoint).result, case)
