"""Weights reach their slots bit for bit, gradients come home once, summed in fp32, whatever the seats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.distributed import Comm
from lrmoe.distributed.messages import Exchange
from lrmoe.distributed.replicas import fetch_replicas, return_gradients, start_return
from lrmoe.errors import InputError
from lrmoe.planning import copies
from lrmoe.planning.copies import fetch_experts_R, return_experts_R
from lrmoe.planning.seats import Seats
from lrmoe.telemetry.tracking import StorageTracker
from tests.distributed.pool import Pool
from tests.planning.test_copies import foreign_seats, seats_with

HIDDEN, WIDTH = 3, 5
SHAPES = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
Away = frozenset[tuple[int, int]]

# Foreign (rank, expert) seats of (ranks, experts): few and many copies, a tree, idle ranks, everything on one rank.
Message = tuple[int, Tensor]  # a rank, and what goes there or comes from there
LAYOUTS: dict[str, tuple[int, int, Away]] = {
    "none": (2, 4, frozenset()),
    "swapped": (2, 4, frozenset({(0, 2), (1, 0)})),
    "one-way": (2, 4, frozenset({(1, 0), (1, 1)})),
    "idle-ranks": (4, 8, frozenset({(1, 0)})),
    "all-on-one": (4, 8, frozenset((2, expert) for expert in range(8))),
    "everything-everywhere": (4, 4, frozenset((rank, expert) for rank in range(4) for expert in range(4))),
    "tree": (8, 8, frozenset((rank, 3) for rank in range(8))),
    "trees-and-direct": (
        8,
        16,
        frozenset({(r, e) for r in range(8) for e in (0, 1, 15)} | {(2, 9), (3, 9), (0, 9), (5, 4)}),
    ),
    "five-copies": (8, 8, frozenset((rank, 7) for rank in range(1, 6))),
}


@functools.lru_cache(maxsize=16)
def weights(experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All experts' gate_up and down, alike on every rank."""
    generator = torch.Generator().manual_seed(5)
    gate_up, down = (torch.randn(experts, *s, generator=generator, dtype=torch.float64) for s in SHAPES)
    return gate_up.to(dtype), down.to(dtype)


def gradient(rank: int, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient that a rank found for an expert."""
    generator = torch.Generator().manual_seed(1000 * rank + expert)
    gate_up, down = (torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES)
    return gate_up.to(dtype), down.to(dtype)


def set_up(name: str) -> tuple[Comm, Seats, list[int], list[int]]:
    """This rank's group, all seats, its home experts and its foreign experts."""
    ranks, experts, away = LAYOUTS[name]
    comm, seats = Comm(dist.group.WORLD), seats_with(ranks, experts, set(away))
    local = experts // ranks
    homes = list(range(comm.rank * local, comm.rank * local + local))
    return comm, seats, homes, [expert for rank, expert in foreign_seats(seats) if rank == comm.rank]


def stacked(rank: int, experts: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    found = [gradient(rank, expert, dtype) for expert in experts]
    gate_up, down = (torch.empty((len(experts), *shape), dtype=dtype) for shape in SHAPES)
    for place, (one, two) in enumerate(found):
        gate_up[place], down[place] = one, two
    return gate_up, down


def counted(call: Callable[[], int]) -> tuple[int, int]:
    """What a call says it sent, and what it handed to the backend."""
    handed, start = 0, Exchange.__init__

    def spy(self: Exchange, comm: Comm, sends: Iterable[Message], receives: Iterable[Message]) -> None:
        nonlocal handed
        there = list(sends)
        handed += sum(tensor.numel() * tensor.element_size() for rank, tensor in there if rank != comm.rank)
        start(self, comm, there, receives)

    with mock.patch.object(Exchange, "__init__", spy):
        return call(), handed


def both(tensors: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    gate_up, down = tensors
    return gate_up, down


def fetched(name: str, dtype: torch.dtype) -> None:
    comm, seats, homes, foreign = set_up(name)
    every = weights(seats.topology.experts, dtype)
    own = tuple(tensor[homes].clone().requires_grad_() for tensor in every)

    def fetch() -> int:
        pending = fetch_replicas(comm, seats, *own)
        for found, tensor in zip(pending.wait(), every, strict=True):
            assert torch.equal(found, tensor[foreign])
            assert found.is_contiguous()
        assert pending.wait()[0] is pending.wait()[0]
        return pending.sent_bytes

    said, handed = counted(fetch)
    assert said == handed
    out = both(torch.full((len(foreign) + 2, *shape), 7.0, dtype=dtype) for shape in SHAPES)
    slots = fetch_replicas(comm, seats, *own, out=out, wait=True).wait()
    for found, tensor, room in zip(slots, every, out, strict=True):
        assert torch.equal(found, tensor[foreign])
        assert found.data_ptr() == room.data_ptr() or not foreign
        assert bool((room[len(foreign) :] == 7.0).all())


def returned(name: str, given: torch.dtype, kept: torch.dtype) -> list[bytes]:
    comm, seats, homes, foreign = set_up(name)
    home = stacked(comm.rank, homes, kept)
    away = stacked(comm.rank, foreign, given) if foreign else None
    said, handed = counted(lambda: return_gradients(comm, seats, away, home))
    assert said == handed
    for place, expert in enumerate(homes):
        copies_of = [rank for rank, other in foreign_seats(seats) if other == expert]
        parts = [[t.double() for t in gradient(comm.rank, expert, kept)]]
        parts += [[t.double() for t in gradient(rank, expert, given)] for rank in copies_of]
        for found, terms in zip(home, zip(*parts, strict=True), strict=True):
            exact, size = sum(terms), sum(term.abs() for term in terms)
            # One rounding to the home's dtype, after sums in fp32 (fp64 for fp64).
            eps = torch.finfo(torch.float64 if kept is torch.float64 else torch.float32).eps
            limit = torch.finfo(kept).eps / 2 * exact.abs() + len(terms) * eps * size
            assert bool(((found[place].double() - exact).abs() <= limit).all())
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in home]


def frozen(name: str, projection: int) -> None:
    comm, seats, homes, foreign = set_up(name)
    home, away = stacked(comm.rank, homes, torch.float32), stacked(comm.rank, foreign, torch.float32)
    one: list[Tensor | None] = [None, None]
    two: list[Tensor | None] = [None, None]
    one[projection], two[projection] = away[projection].clone(), home[projection].clone()
    said, handed = counted(lambda: return_gradients(comm, seats, (one[0], one[1]), (two[0], two[1])))
    assert said == handed
    return_gradients(comm, seats, away, home)
    found = two[projection]
    assert found is not None
    assert torch.equal(found, home[projection])
    assert return_gradients(comm, seats, (None, None), (None, None)) == 0


def with_direct(limit: int, case: Callable[..., object], *args: object) -> object:
    """A case with another number of copies that a home serves itself."""
    usual, copies.DIRECT = copies.DIRECT, limit
    try:
        return case(*args)
    finally:
        copies.DIRECT = usual


def overlapping(name: str) -> None:
    """Two fetches under way at once, a collective between them, waited for in the wrong order."""
    comm, seats, homes, foreign = set_up(name)
    first = weights(seats.topology.experts, torch.float32)
    second = tuple(-tensor for tensor in first)
    one = fetch_replicas(comm, seats, *(tensor[homes] for tensor in first))
    two = fetch_replicas(comm, seats, *(tensor[homes] for tensor in second))
    comm.all_gather_ints(torch.arange(3))
    assert torch.equal(two.wait()[0], second[0][foreign])
    assert torch.equal(one.wait()[1], first[1][foreign])


def returned_while_homes_compute(name: str, given: torch.dtype, kept: torch.dtype) -> None:
    """Home gradients that are written after the copies' have begun to travel; exchanges of others in between."""
    comm, seats, homes, foreign = set_up(name)
    want = stacked(comm.rank, homes, kept)
    return_gradients(comm, seats, stacked(comm.rank, foreign, given), want)
    home = both(torch.full_like(tensor, torch.nan) for tensor in want)
    returning = start_return(comm, seats, stacked(comm.rank, foreign, given), home)
    comm.all_gather_ints(torch.arange(3))
    for tensor, own in zip(home, stacked(comm.rank, homes, kept), strict=True):
        tensor.copy_(own)
    returning.wait()
    for tensor, sums in zip(home, want, strict=True):
        assert torch.equal(tensor, sums)


def allocated(name: str, given: torch.dtype, kept: torch.dtype) -> None:
    """Everything a rank allocates to fetch and to return, beside what planning says."""
    comm, seats, homes, foreign = set_up(name)
    own = tuple(tensor[homes] for tensor in weights(seats.topology.experts, kept))
    params = sum(shape[0] * shape[1] for shape in SHAPES)
    with StorageTracker() as fetching:
        slots = fetch_replicas(comm, seats, *own, wait=True).wait()
    assert fetching.peak == fetch_experts_R(seats)[comm.rank] * params * kept.itemsize
    del slots
    home, away = stacked(comm.rank, homes, kept), stacked(comm.rank, foreign, given)
    with StorageTracker() as returning:
        return_gradients(comm, seats, away, home)
    narrow = {"narrow_foreign": given.itemsize < 4, "narrow_home": kept.itemsize < 4}
    assert returning.peak == return_experts_R(seats, **narrow)[comm.rank] * params * max(4, kept.itemsize)
    assert returning.current == 0


def in_a_part_of_the_world() -> None:
    """Two groups of every second rank, one beside the other."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    comm = Comm(groups[dist.get_rank() % 2])
    seats = seats_with(2, 4, {(0, 2), (1, 0)})
    homes, foreign = [2 * comm.rank, 2 * comm.rank + 1], [2 - 2 * comm.rank]
    mark = dist.get_rank() % 2
    every = tuple(tensor + mark for tensor in weights(4, torch.float32))
    slots = fetch_replicas(comm, seats, *(tensor[homes] for tensor in every)).wait()
    assert torch.equal(slots[0], every[0][foreign])
    home = both(tensor[homes].clone() for tensor in every)
    return_gradients(comm, seats, slots, home)
    assert torch.equal(home[1][0], 2 * every[1][homes[0]])


def many_calls(calls: int) -> None:
    """Layouts that come and go; a rank may be calls ahead of another."""
    for turn in range(calls):
        comm = Comm(dist.group.WORLD)
        seats = seats_with(
            8, 8, {(rank, turn % 8) for rank in range(turn % 9)} | {(turn * 3 % 8, turn * 5 % 8)}
        )
        mine = [expert for rank, expert in foreign_seats(seats) if rank == comm.rank]
        every = tuple(tensor * turn for tensor in weights(8, torch.float32))
        slots = fetch_replicas(comm, seats, *(tensor[comm.rank : comm.rank + 1] for tensor in every)).wait()
        assert torch.equal(slots[0], every[0][mine])
        home = both(tensor[comm.rank : comm.rank + 1].clone() for tensor in every)
        copies_here = int((seats.expert_Q == comm.rank).sum())
        return_gradients(comm, seats, slots, home)
        torch.testing.assert_close(home[0][0], copies_here * every[0][comm.rank])


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Pool:
    ranks = LAYOUTS[request.node.callspec.params["name"]][0]
    return request.getfixturevalue(f"pool{ranks}")


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_slots_hold_the_weights_bit_for_bit(pool: Pool, name: str, dtype: torch.dtype) -> None:
    pool.run(fetched, name, dtype)


@pytest.mark.distributed
@pytest.mark.parametrize("kinds", [(d, d) for d in DTYPES] + [(torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_equal_float64_and_repeat_bit_for_bit(
    pool: Pool, name: str, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    assert pool.run(returned, name, *kinds) == pool.run(returned, name, *kinds)


@pytest.mark.distributed
@pytest.mark.parametrize("projection", [0, 1])
@pytest.mark.parametrize("name", ["swapped", "trees-and-direct"])
def test_a_frozen_projection_sends_nothing(pool: Pool, name: str, projection: int) -> None:
    pool.run(frozen, name, projection)


@pytest.mark.distributed
@pytest.mark.parametrize("limit", [0, 99])
@pytest.mark.parametrize("name", ["swapped", "everything-everywhere", "trees-and-direct"])
def test_trees_and_homes_alone_give_the_same(pool: Pool, name: str, limit: int) -> None:
    pool.run(with_direct, limit, fetched, name, torch.bfloat16)
    pool.run(with_direct, limit, returned, name, torch.float64, torch.float64)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["swapped", "all-on-one", "trees-and-direct"])
def test_fetches_may_overlap(pool: Pool, name: str) -> None:
    pool.run(overlapping, name)


@pytest.mark.distributed
@pytest.mark.parametrize("kinds", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_home_gradients_may_be_computed_while_copies_travel(
    pool: Pool, name: str, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    pool.run(returned_while_homes_compute, name, *kinds)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kinds",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_planning_knows_every_byte(pool: Pool, name: str, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    pool.run(allocated, name, *kinds, limit_s=120)  # the first use of a dispatch mode imports the compiler


@pytest.mark.distributed
def test_a_group_may_be_part_of_the_world(pool4: Pool) -> None:
    pool4.run(in_a_part_of_the_world)


@pytest.mark.distributed
def test_layouts_may_change_from_call_to_call(pool8: Pool) -> None:
    pool8.run(many_calls, 40)


def test_slots_that_do_not_fit_are_refused() -> None:
    seats, (gate_up, down) = seats_with(1, 2, set()), weights(2, torch.float32)
    for out in ((gate_up.bfloat16(), down), (gate_up, gate_up)):
        with pytest.raises(InputError, match=r"out: .* cannot hold 0 experts"):
            fetch_replicas(Comm(None), seats, gate_up, down, out=out)


def test_gradients_of_other_seats_are_refused() -> None:
    seats, home = seats_with(1, 2, set()), weights(2, torch.float32)
    with pytest.raises(InputError, match=r"foreign: gradients of shape \(2, 10, 3\) for 0 foreign seats"):
        return_gradients(Comm(None), seats, home, home)


def test_one_rank_has_nothing_to_move() -> None:
    comm, seats = Comm(None), seats_with(1, 2, set())
    gate_up, down = weights(2, torch.float32)
    pending = fetch_replicas(comm, seats, gate_up, down)
    assert [slot.shape for slot in pending.wait()] == [(0, *shape) for shape in SHAPES]
    assert pending.sent_bytes == 0
    before = gate_up.clone()
    assert return_gradients(comm, seats, None, (gate_up, down)) == 0
    assert torch.equal(gate_up, before)
