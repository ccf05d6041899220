"""Experts rebuilt from shards are the same bits; their gradients come home as the sum over copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.distributed import Comm
from lrmoe.distributed.sharded import (
    KeptShards,
    cut_experts,
    fetch_shards,
    gather_homes,
    return_shards,
    scatter_homes,
)
from lrmoe.planning import Problem, Topology, get_policy
from lrmoe.planning.problem import History
from lrmoe.planning.seats import Seats, seats_of
from lrmoe.planning.shards import ShardExchange, expert_cuts
from lrmoe.telemetry.tracking import StorageTracker
from tests.distributed.pool import Pool

EXPERTS, HIDDEN, WIDTH = 8, 6, 5  # 60 and 30 elements: 8 divides neither, 4 not the second
Hosts = list[list[int]]  # experts of every rank


def seats_from(hosts: Hosts, experts: int = EXPERTS) -> Seats:
    topology = Topology(ranks=len(hosts), experts=experts)
    pairs = [(rank, expert) for rank, found in enumerate(hosts) for expert in found]
    expert_Q = np.array([expert for _, expert in pairs], dtype=np.int64)
    rank_Q = np.array([rank for rank, _ in pairs], dtype=np.int64)
    nothing = np.zeros(len(pairs), dtype=np.int64)
    return Seats(
        topology=topology, expert_Q=expert_Q, rank_Q=rank_Q,
        assign_RQ=np.zeros((len(hosts), len(pairs)), dtype=np.int64), backward_Q=nothing,
    )  # fmt: skip


def layouts(ranks: int) -> dict[str, Hosts]:
    block = EXPERTS // ranks
    return {
        "home": [list(range(r * block, (r + 1) * block)) for r in range(ranks)],
        "reversed": [list(range(r * block, (r + 1) * block)) for r in reversed(range(ranks))],
        "everything everywhere": [list(range(EXPERTS)) for _ in range(ranks)],
        "one rank hosts all": [list(range(EXPERTS)) if r == ranks - 1 else [] for r in range(ranks)],
        "one hot expert": [[3] if r else [3, 0, 1, 2, 4, 5, 6, 7] for r in range(ranks)],
        "an expert without a seat": [[e for e in range(r, EXPERTS, ranks) if e != 2] for r in range(ranks)],
    }


def whole_experts(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    up, down = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return up, down


def seat_gradients(seats: Seats, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of all seats, on every rank the same."""
    generator = torch.Generator().manual_seed(4)
    count = len(seats.expert_Q)
    shapes = (count, 2 * WIDTH, HIDDEN), (count, HIDDEN, WIDTH)
    up, down = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return up, down


def local(seats: Seats, comm: Comm, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    own = seats.of(comm.rank)
    return tensors[0][own], tensors[1][own]


def fetch_and_return(layout: Hosts, dtype: torch.dtype) -> dict[str, Any]:
    """Runs on every rank: the shards, what was fetched, the gradients that came home (twice), the bytes."""
    comm, seats = Comm(dist.group.WORLD), seats_from(layout)
    cuts = expert_cuts(HIDDEN, WIDTH, comm.size)
    up, down = (cut_experts(w, cut, comm.rank) for w, cut in zip(whole_experts(dtype), cuts, strict=True))
    shards = [up, down]
    pending = fetch_shards(comm, seats, up, down, cuts)
    fetched = pending.wait()
    assert pending.wait()[0] is fetched[0]
    grads = local(seats, comm, seat_gradients(seats, dtype))
    returned, sent = return_shards(comm, seats, *grads, cuts)
    again, _ = return_shards(comm, seats, *grads, cuts)
    return {
        "shards": shards, "fetched": fetched, "returned": returned, "again": again,
        "fetch_bytes": pending.sent_bytes, "return_bytes": sent,
    }  # fmt: skip


def assert_layout(ranks: list[dict[str, Any]], layout: Hosts, dtype: torch.dtype) -> None:
    seats, whole = seats_from(layout), whole_experts(dtype)
    grads = seat_gradients(seats, dtype)
    for which, cut in enumerate(expert_cuts(HIDDEN, WIDTH, len(layout))):
        joined = torch.cat([rank["shards"][which] for rank in ranks], dim=1)
        assert torch.equal(joined[:, : cut.size].view(whole[which].shape), whole[which])
        assert not joined[:, cut.size :].any()
        for rank, found in enumerate(ranks):
            assert torch.equal(found["fetched"][which], whole[which][layout[rank]])
            assert torch.equal(found["returned"][which], found["again"][which])
        total = torch.zeros(EXPERTS, cut.size, dtype=torch.float64)
        total.index_add_(0, torch.from_numpy(seats.expert_Q), grads[which].double().flatten(1))
        home = torch.cat([rank["returned"][which] for rank in ranks], dim=1)
        assert home.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        eps = torch.finfo(home.dtype).eps
        torch.testing.assert_close(home[:, : cut.size].double(), total, rtol=0, atol=32 * eps)
        assert not home[:, cut.size :].any()


def assert_bytes(ranks: list[dict[str, Any]], layout: Hosts, dtype: torch.dtype) -> None:
    """Every seat's elements cross once, but for the part that lies on its own rank. Padding does not."""
    cuts, size = expert_cuts(HIDDEN, WIDTH, len(layout)), dtype.itemsize
    for rank, found in enumerate(ranks):
        width = sum(cut.width(rank) for cut in cuts)
        others = sum(len(hosts) for r, hosts in enumerate(layout) if r != rank)
        assert found["fetch_bytes"] == others * width * size
        assert found["return_bytes"] == len(layout[rank]) * (sum(cut.size for cut in cuts) - width) * size


@pytest.mark.distributed
@pytest.mark.parametrize("name", layouts(2))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_ranks(pool2: Pool, name: str, dtype: torch.dtype) -> None:
    layout = layouts(2)[name]
    ranks = pool2.run(fetch_and_return, layout, dtype)
    assert_layout(ranks, layout, dtype)
    assert_bytes(ranks, layout, dtype)


@pytest.mark.distributed
@pytest.mark.parametrize("name", layouts(4))
def test_four_ranks(pool4: Pool, name: str) -> None:
    layout = layouts(4)[name]
    ranks = pool4.run(fetch_and_return, layout, torch.float32)
    assert_layout(ranks, layout, torch.float32)
    assert_bytes(ranks, layout, torch.float32)


@pytest.mark.distributed
@pytest.mark.parametrize("name", layouts(8))
def test_eight_ranks(pool8: Pool, name: str) -> None:
    layout = layouts(8)[name]
    ranks = pool8.run(fetch_and_return, layout, torch.bfloat16)
    assert_layout(ranks, layout, torch.bfloat16)
    assert_bytes(ranks, layout, torch.bfloat16)


def tiny_experts() -> list[list[int]]:
    """Experts of fewer elements than there are ranks: some ranks hold nothing of them."""
    comm, seats = Comm(dist.group.WORLD), seats_from([[0], [1], [2], [3, 0]], experts=4)
    cuts = expert_cuts(1, 1, comm.size)
    whole = torch.arange(8.0).view(4, 2, 1), torch.arange(4.0).view(4, 1, 1)
    mine = [cut_experts(w, cut, comm.rank) for w, cut in zip(whole, cuts, strict=True)]
    up, down = fetch_shards(comm, seats, mine[0], mine[1], cuts, wait=True).wait()
    (d_up, d_down), _ = return_shards(comm, seats, up, down, cuts)
    assert d_up is not None
    assert d_down is not None
    return [up.flatten().tolist(), down.flatten().tolist(), d_up[0].tolist(), d_down[0].tolist()]


@pytest.mark.distributed
def test_experts_smaller_than_the_group(pool4: Pool) -> None:
    ranks = pool4.run(tiny_experts)
    assert [up for up, *_ in ranks] == [[0, 1], [2, 3], [4, 5], [6, 7, 0, 1]]
    assert [down for _, down, *_ in ranks] == [[0], [1], [2], [3, 0]]
    assert [d_up for *_, d_up, _ in ranks] == [[0], [2], [0], [0]]  # expert 0 twice: 0 and 1 doubled


def sum_of_three(dtype: torch.dtype) -> Tensor:
    """Three copies, whose sum depends on the dtype it is formed in."""
    comm, seats = Comm(dist.group.WORLD), seats_from([[0, 1], [0, 2], [0, 3], []], experts=4)
    cuts = expert_cuts(2, 2, comm.size)
    value = [256.0, 1.0, 1.0, 0.0][comm.rank]
    count = seats.of(comm.rank).stop - seats.of(comm.rank).start
    up, down = torch.full((count, 4, 2), value, dtype=dtype), torch.full((count, 2, 2), value, dtype=dtype)
    (d_up, d_down), _ = return_shards(comm, seats, up, down, cuts)
    assert d_up is not None
    assert d_down is not None
    return torch.cat((d_up[0], d_down[0]))


@pytest.mark.distributed
def test_copies_are_summed_in_float32(pool4: Pool) -> None:
    for found in pool4.run(sum_of_three, torch.bfloat16):
        assert found.tolist() == [258.0] * 3  # in bfloat16 256 + 1 is 256


def peaks(layout: Hosts, dtype: torch.dtype) -> list[tuple[int, int]]:
    """(measured, predicted) bytes of what stays of a fetch, of its peak, and of the peak of a return.

    The least of some tries: gloo's threads may let go of a buffer a moment after the exchange has ended.
    """
    return [min(tries) for tries in zip(*(one_peak(layout, dtype) for _ in range(5)), strict=True)]


def one_peak(layout: Hosts, dtype: torch.dtype) -> list[tuple[int, int]]:
    comm, seats = Comm(dist.group.WORLD), seats_from(layout)
    cuts = expert_cuts(64, 48, comm.size)
    exchange = ShardExchange.of(seats, cuts, comm.rank)
    shards = [torch.zeros(EXPERTS, cut.shard, dtype=dtype) for cut in cuts]
    with StorageTracker() as tracker:
        experts = fetch_shards(comm, seats, shards[0], shards[1], cuts).wait()
        stays, fetch = tracker.current, tracker.peak
    tracker = StorageTracker()
    tracker.ignore(experts)
    with tracker:
        found = return_shards(comm, seats, experts[0], experts[1], cuts)
    assert found[1] == exchange.return_sent * dtype.itemsize
    sum_bytes = 8 if dtype == torch.float64 else 4
    return [
        (stays, exchange.built * dtype.itemsize),
        (fetch, exchange.fetch_peak(dtype.itemsize)),
        (tracker.peak, exchange.return_peak(dtype.itemsize, sum_bytes)),
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("name", layouts(4))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_memory_is_what_planning_says(pool4: Pool, name: str, dtype: torch.dtype) -> None:
    for rank in pool4.run(peaks, layouts(4)[name], dtype, limit_s=120):
        for measured, predicted in rank:
            assert abs(measured - predicted) <= 512  # ids of seats are not in the account


def frozen_down() -> tuple[bool, bool, int]:
    comm, seats = Comm(dist.group.WORLD), seats_from(layouts(2)["home"])
    cuts = expert_cuts(HIDDEN, WIDTH, comm.size)
    up, down = local(seats, comm, seat_gradients(seats, torch.float32))
    both, sent = return_shards(comm, seats, up, down, cuts)
    (d_up, d_down), less = return_shards(comm, seats, up, None, cuts)
    neither = return_shards(comm, seats, None, None, cuts)
    assert neither == ((None, None), 0)
    assert both[0] is not None
    assert d_up is not None
    return torch.equal(d_up, both[0]), d_down is None, sent - less


@pytest.mark.distributed
def test_a_frozen_projection_does_not_travel(pool2: Pool) -> None:
    assert pool2.run(frozen_down) == [(True, True, 4 * 15 * 4)] * 2  # 4 seats, 15 elements to the other rank


def policy_layouts(policy: str) -> list[list[int]]:
    """Layouts of the first and second call of a policy, the second planned from the first's counts."""
    comm = Comm(dist.group.WORLD)
    topology = Topology(ranks=comm.size, experts=EXPERTS)
    counts_RE = np.full((comm.size, EXPERTS), 3, dtype=np.int64)
    counts_RE[:, 5] = 90
    cuts = expert_cuts(HIDDEN, WIDTH, comm.size)
    whole = whole_experts(torch.float32)
    shards = [cut_experts(w, cut, comm.rank) for w, cut in zip(whole, cuts, strict=True)]
    plan, found = None, []
    for step in range(2):
        history = History(counts=(counts_RE,) * step, previous=plan, step=step)
        problem = Problem(counts_RE=counts_RE, topology=topology, slots=1, max_drop=0.0, history=history)
        plan = get_policy(policy)(problem)
        seats = seats_of(plan, homes=False)
        hosted = seats.expert_Q[seats.of(comm.rank)]
        up, down = fetch_shards(comm, seats, shards[0], shards[1], cuts).wait()
        assert torch.equal(up, whole[0][hosted])
        assert torch.equal(down, whole[1][hosted])
        found.append(hosted.tolist())
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["symi", "laer"])
def test_layouts_of_the_systems_that_store_shards(pool4: Pool, policy: str) -> None:
    ranks = pool4.run(policy_layouts, policy)
    assert all({e for rank in ranks for e in rank[call]} == set(range(EXPERTS)) for call in range(2))
    assert sum(5 in second for _, second in ranks) > 1, "the hot expert has several hosts"


def homes(dtype: torch.dtype) -> tuple[Tensor, ...]:
    comm, found = Comm(dist.group.WORLD), []
    for whole, cut in zip(whole_experts(dtype), expert_cuts(HIDDEN, WIDTH, comm.size), strict=True):
        shards = cut_experts(whole, cut, comm.rank)
        found.append(gather_homes(comm, shards, cut))
        assert torch.equal(scatter_homes(comm, found[-1], cut), shards)
    return tuple(found)


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_homes_are_gathered_and_scattered(pool4: Pool, dtype: torch.dtype) -> None:
    ranks = pool4.run(homes, dtype)
    for which, whole in enumerate(whole_experts(dtype)):
        assert torch.equal(torch.cat([rank[which] for rank in ranks]), whole)


def per_step() -> list[int]:
    """Bytes of: a first call, the same layout, another, the same after a release; then what stays."""
    comm = Comm(dist.group.WORLD)
    cuts = expert_cuts(HIDDEN, WIDTH, comm.size)
    whole = whole_experts(torch.float32)
    shards = [cut_experts(w, cut, comm.rank) for w, cut in zip(whole, cuts, strict=True)]
    kept, found = KeptShards(comm, cuts), []
    home, other = seats_from(layouts(2)["home"]), seats_from(layouts(2)["one hot expert"])

    def fetch(seats: Seats) -> Tensor:
        pending = kept.fetch(seats, shards[0], shards[1])
        found.append(pending.sent_bytes)
        return pending.wait()[0]

    first, again = fetch(home), fetch(home)
    assert first is again
    assert torch.equal(fetch(other), whole[0][other.expert_Q[other.of(comm.rank)]])
    for shard in shards:
        shard.mul_(2)
    kept.release()
    assert torch.equal(fetch(other), 2 * whole[0][other.expert_Q[other.of(comm.rank)]])
    found.append(kept.kept_bytes)
    kept.release()
    assert kept.kept_bytes == 0
    return found


@pytest.mark.distributed
def test_weights_may_stay_for_a_step(pool2: Pool) -> None:
    # float32; of 90 elements of an expert each rank holds 45
    assert pool2.run(per_step) == [
        [720, 0, 180, 180, 8 * 360],
        [720, 0, 1440, 1440, 360],
    ]


def test_one_rank_needs_no_group() -> None:
    comm, cuts = Comm(None), expert_cuts(HIDDEN, WIDTH, 1)
    whole = whole_experts(torch.float32)
    up, down = (cut_experts(w, cut, 0) for w, cut in zip(whole, cuts, strict=True))
    seats = seats_from([list(range(EXPERTS))])
    pending = fetch_shards(comm, seats, up, down, cuts)
    fetched = pending.wait()
    assert [torch.equal(found, w) for found, w in zip(fetched, whole, strict=True)] == [True, True]
    assert fetched[0].data_ptr() == up.data_ptr(), "a view"
    assert pending.sent_bytes == 0
    some = seats_from([[1, 6]])
    assert torch.equal(fetch_shards(comm, some, up, down, cuts).wait()[1], whole[1][[1, 6]])
    (d_up, d_down), sent = return_shards(comm, some, whole[0][[1, 6]], whole[1][[1, 6]], cuts)
    assert sent == 0
    assert d_up is not None
    assert d_down is not None
    assert torch.equal(d_up[6], whole[0][6].flatten())
    assert not d_down[0].any()


def test_shards_are_a_copy_and_follow_the_device_of_meta_weights() -> None:
    cut = expert_cuts(HIDDEN, WIDTH, 4)[1]
    whole = torch.ones(2, HIDDEN, WIDTH)
    shards = cut_experts(whole, cut, 3)
    whole.zero_()
    assert shards.shape == (2, 8)
    assert shards.sum() == 2 * 6  # two elements of padding each
    assert cut_experts(torch.empty(2, HIDDEN, WIDTH, device="meta"), cut, 0).is_meta
