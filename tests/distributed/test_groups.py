"""Expert parallelism inside subgroups, agreement of plans, and the sampled estimator over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.calls import bounds_of, merge, spread
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, forward, leaves, pruning, run
from tests.reference import GRADS, Result, assert_result, make_case, plain_loop

pytestmark = pytest.mark.distributed
SMALL = make_case(tokens=24, experts=4, top_k=2, hidden=8, width=6, seed=4)


def expert_parallel_pairs(config: Any, seeds: tuple[int, int]) -> Result:
    """Worker of four: two groups of two ranks (EP 2 x DP 2), each group with its own batch."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    which, member = divmod(dist.get_rank(), 2)
    case = make_case(tokens=20, experts=4, seed=seeds[which])
    part = case.tokens(*bounds_of([13, 7])[member])
    return run(part, config, group=groups[which]).result


def test_two_groups_of_two_do_not_mix(pool4: Pool) -> None:
    ranks = pool4.run(expert_parallel_pairs, exact(), (5, 6))
    for which, seed in enumerate((5, 6)):
        assert_result(merge(ranks[2 * which : 2 * which + 2]), make_case(tokens=20, experts=4, seed=seed))


def test_the_same_batch_in_both_groups_keeps_the_same_set(pool4: Pool) -> None:
    ranks = pool4.run(expert_parallel_pairs, pruning(max_drop=0.5), (5, 5))
    for name in ("out", *GRADS):
        for member in range(2):
            assert torch.equal(getattr(ranks[member], name), getattr(ranks[2 + member], name)), name


def plans_over_steps(sizes: list[int]) -> list[list[int]]:
    """Worker: quotas of several steps; from the second on they depend on scores that other ranks learned."""
    case = make_case(tokens=sum(sizes), experts=8, top_k=3, seed=1)
    part = case.tokens(*bounds_of(sizes)[dist.get_rank()])
    config = pruning(max_drop=0.4)
    layer = build(case, config, group=dist.group.WORLD)
    found = []
    for _ in range(4):
        for _ in range(2):
            found.append(run(part, config, layer=layer, group=dist.group.WORLD).quota_E)
        layer.clock.advance()
    return found


def test_all_ranks_make_the_same_plans_whatever_they_learned(pool4: Pool) -> None:
    ranks = pool4.run(plans_over_steps, [3, 40, 0, 7])
    assert all(one == ranks[0] for one in ranks)
    assert ranks[0][0] != ranks[0][1], "scores of the first call must show in the second plan"


def draw_gradients(config: Any, sizes: list[int], draws: int) -> dict[str, Tensor]:
    """Worker: this rank's gradients of independent draws, (draws, entries) by name."""
    group = dist.group.WORLD
    part = SMALL.tokens(*bounds_of(sizes)[dist.get_rank()])
    found: dict[str, list[Tensor]] = {n: [] for n in GRADS}
    for step in range(draws):
        layer = build(part, config, group=group)
        layer.clock.step = step
        leaf = leaves(part, GRADS, group)
        forward(layer, part, leaf).backward(part.grad_out)
        for n in GRADS:
            grad = leaf[n].grad
            assert grad is not None
            found[n].append(grad.reshape(-1))
    return {n: torch.stack(rows) for n, rows in found.items()}


@pytest.mark.parametrize("selection", ["global", "local"])
def test_sampling_over_two_ranks_is_unbiased(pool2: Pool, selection: str) -> None:
    """Local shares are rounded at random, and that probability enters pi: a small uneven split would show it."""
    config = pruning(max_drop=0.5, selection=selection, seed=3)
    ranks = pool2.run(draw_gradients, config, [5, 19], 250, limit_s=100)
    exact_result = plain_loop(SMALL)
    for name in GRADS:
        rows = torch.cat([rank[name] for rank in ranks], dim=1)
        error = rows - getattr(exact_result, name).reshape(-1)
        directions = torch.randn(
            rows.shape[1], 16, generator=torch.Generator().manual_seed(rows.shape[1]), dtype=torch.float64
        )
        projected = error @ directions
        off = (projected.mean(dim=0) / (projected.std(dim=0) / len(rows) ** 0.5)).abs()
        assert float(off.max()) < 4, f"{name}: {float(off.max()):.1f} standard errors off"


def test_bytes_are_those_of_the_rows_that_leave(pool2: Pool) -> None:
    case = make_case(tokens=40, experts=4, top_k=2, hidden=16, dtype=torch.float32)
    sizes = [25, 15]
    for config, share in (
        (exact(replica_slots=0), 1.0),
        (pruning(max_drop=0.5, estimator="topk", router_grad="full", replica_slots=0), 0.5),
    ):
        found = spread(pool2, case, config, sizes=sizes)
        for rank, (begin, end) in enumerate(bounds_of(sizes)):
            away = int((case.ids[begin:end] // 2 != rank).sum())
            record = found.records[rank]
            assert away * 16 * 4 == record.bytes["dispatch"]
            assert record.bytes["exchange"] <= away * (16 * 4 + 4)
        total = sum(r.bytes["exchange"] for r in found.records)
        everything = (
            int(sum((case.ids[b:e] // 2 != r).sum() for r, (b, e) in enumerate(bounds_of(sizes)))) * 68
        )
        assert total == everything if share == 1.0 else total < 0.75 * everything
