"""Plans that no policy makes: whatever is legal is computed as the plain loop computes it, lean wire or not."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist

from tests.distributed.plans import LAYOUTS, WAYS_BACK, Crafted
from tests.distributed.pool import Pool
from tests.distributed.test_sharded_layer import sharded_call
from tests.distributed.truth import Truth, mine
from tests.layer.harness import build, exact, run
from tests.reference import make_case

pytestmark = pytest.mark.distributed

SPLITS = {2: [[9, 9], [17, 1], [0, 18]], 4: [[7, 7, 2, 2], [0, 18, 0, 0]], 8: [[3, 3, 3, 3, 2, 2, 1, 1]]}
BATCH = len(LAYOUTS) * len(WAYS_BACK)
BATCHES = [(ranks, batch) for ranks, batches in ((2, 4), (4, 2), (8, 1)) for batch in range(batches)]


@functools.cache
def truth_of(number: int) -> Truth:
    """A small case and what it must give."""
    case = make_case(
        tokens=18,
        experts=(16, 8)[number % 2],
        top_k=(3, 2)[number % 2],
        hidden=8,
        width=6,
        seed=number,
        skew=2.0,
    )
    return Truth.of(case)


def random_plans(batch: int) -> list[int]:
    """Worker: a batch of plans; returns how many moved experts, and how many had parts.

    Two ranks run the first batch on both wires. Elsewhere wires alternate, the other way round in the next batch.
    """
    group, ranks, moved, parts = dist.group.WORLD, dist.get_world_size(), 0, 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        truth, policy = truth_of(seed % 4), Crafted(seed=seed)
        sizes = SPLITS[ranks][seed % len(SPLITS[ranks])]
        for lean in (False, True) if batch == 0 and ranks < 4 else ((seed + batch) % 2 == 0,):
            config = exact(lean_wire=lean)
            layer = build(truth.case, config, group=group, policy=policy)
            found = run(mine(truth.case, sizes), config, group=group, layer=layer)
            truth.check(found.result, sizes, f"plan {seed}, lean wire {lean}")
            assert policy.last is not None
            assert found.record.rows_backward_local == policy.last.backward_load_R[dist.get_rank()]
        assert policy.last is not None
        moved, parts = moved + bool(policy.last.foreign_J.any()), parts + (found.record.chunks > 1)
    return [moved, parts]


@pytest.mark.parametrize(("ranks", "batch"), BATCHES)
def test_random_plans(request: pytest.FixtureRequest, ranks: int, batch: int) -> None:
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    found = pool.run(random_plans, batch, limit_s=90)
    assert all(one == found[0] for one in found), "ranks drew other plans"
    assert found[0][0] >= BATCH * 3 // 4, "few plans moved experts"
    assert found[0][1] >= BATCH // 3, "few plans ran in parts"


def random_plans_on_shards(first: int) -> int:
    """Worker: a batch of plans where no rank owns an expert; returns how many moved experts."""
    group, ranks, moved = dist.group.WORLD, dist.get_world_size(), 0
    for seed in range(first, first + BATCH):
        truth, policy = truth_of(seed % 4), Crafted(seed=seed)
        sizes = SPLITS[ranks][seed % len(SPLITS[ranks])]
        config = exact(storage="sharded", lean_wire=(seed + seed // 8) % 2 == 0)
        layer = build(truth.case, config, group=group, policy=policy)
        found = sharded_call(layer, mine(truth.case, sizes))
        truth.check(found, sizes, f"plan {seed} on shards, lean wire {config.lean_wire}")
        assert policy.last is not None
        moved += bool(policy.last.foreign_J.any())
    return moved


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_plans_on_shards(request: pytest.FixtureRequest, ranks: int) -> None:
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    assert min(pool.run(random_plans_on_shards, 0, limit_s=90)) >= BATCH * 3 // 4
