"""The schedule of replica traffic: everybody gets everything once, from someone who has it, in bounded memory."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrmoe.planning.copies import (
    DIRECT,
    WINDOW,
    Messages,
    fetch_experts_R,
    fetch_messages,
    open_sums,
    return_experts_R,
    return_messages,
)
from lrmoe.planning.problem import Topology
from lrmoe.planning.seats import Seats


def seats_with(ranks: int, experts: int, foreign: set[tuple[int, int]]) -> Seats:
    """Seats at every home and at the (rank, expert) pairs of `foreign`."""
    topology = Topology(ranks=ranks, experts=experts)
    homes = [(int(rank), 0, expert) for expert, rank in enumerate(topology.home_E)]
    away = [(rank, 1, expert) for rank, expert in foreign if topology.home_E[expert] != rank]
    rank_Q, _, expert_Q = np.array(sorted(homes + away), dtype=np.int64).T
    return Seats(
        topology=topology,
        expert_Q=expert_Q,
        rank_Q=rank_Q,
        assign_RQ=np.ones((ranks, rank_Q.size), dtype=np.int64),
        backward_Q=np.ones(rank_Q.size, dtype=np.int64),
    )


@st.composite
def random_seats(draw: st.DrawFn) -> Seats:
    """Up to 24 ranks; any set of foreign seats, often one expert on nearly all of them."""
    ranks = draw(st.integers(1, 24))
    experts = ranks * draw(st.integers(1, 3))
    cells = st.tuples(st.integers(0, ranks - 1), st.integers(0, experts - 1))
    foreign = draw(st.sets(cells, max_size=40))
    for hot in draw(st.sets(st.integers(0, experts - 1), max_size=3)):
        foreign |= {(rank, hot) for rank in draw(st.sets(st.integers(0, ranks - 1)))}
    return seats_with(ranks, experts, foreign)


def foreign_seats(seats: Seats) -> list[tuple[int, int]]:
    pairs = zip(seats.rank_Q[seats.foreign_Q].tolist(), seats.expert_Q[seats.foreign_Q].tolist(), strict=True)
    return sorted(pairs)


def by_round(messages: Messages) -> list[list[tuple[int, int, int]]]:
    """(expert, sender, receiver) of every message, round by round."""
    rounds: list[list[tuple[int, int, int]]] = [[] for _ in range(messages.rounds)]
    columns = (messages.round_M, messages.expert_M, messages.sender_M, messages.receiver_M)
    for when, *message in zip(*(column.tolist() for column in columns), strict=True):
        rounds[when].append(tuple(message))
    return rounds


@given(random_seats())
def test_every_foreign_seat_receives_once_from_a_rank_that_has_the_weights(seats: Seats) -> None:
    home_E = seats.topology.home_E.tolist()
    have = {(rank, expert) for expert, rank in enumerate(home_E)}
    received = []
    for messages in by_round(fetch_messages(seats)):
        assert all((sender, expert) in have for expert, sender, _ in messages)
        arrived = [(receiver, expert) for expert, _, receiver in messages]
        have |= set(arrived)
        received += arrived
    assert sorted(received) == foreign_seats(seats)


@given(random_seats())
def test_a_home_sends_a_hot_expert_a_logarithmic_number_of_times(seats: Seats) -> None:
    messages = fetch_messages(seats)
    copies_E = np.bincount(seats.expert_Q[seats.foreign_Q], minlength=seats.topology.experts)
    for expert, copies in enumerate(copies_E.tolist()):
        from_home = (messages.expert_M == expert) & (messages.sender_M == seats.topology.home_E[expert])
        levels = int(np.ceil(np.log2(copies + 1)))
        assert from_home.sum() == (copies if copies <= DIRECT else levels)
    most = int(copies_E.max())
    assert messages.rounds == (min(most, 1) if most <= DIRECT else int(np.ceil(np.log2(most + 1))))


@given(random_seats())
def test_every_gradient_reaches_its_home_exactly_once(seats: Seats) -> None:
    home_E = seats.topology.home_E.tolist()
    holds = {(rank, expert): {rank} for rank, expert in foreign_seats(seats)}
    holds |= {(home, expert): {home} for expert, home in enumerate(home_E)}
    for messages in by_round(return_messages(seats)):
        leaving = [(receiver, expert, holds.pop((sender, expert))) for expert, sender, receiver in messages]
        for receiver, expert, ranks in leaving:
            assert not holds[receiver, expert] & ranks
            holds[receiver, expert] |= ranks
    assert set(holds) == {(home, expert) for expert, home in enumerate(home_E)}
    for (_, expert), ranks in holds.items():
        assert ranks == set(seats.rank_Q[seats.expert_Q == expert].tolist())


@given(random_seats())
def test_what_returning_holds_is_bounded_and_counted(seats: Seats) -> None:
    messages, ranks = return_messages(seats), seats.topology.ranks
    window = np.zeros(ranks, dtype=int)
    first_last: dict[int, tuple[int, int]] = {}
    for when, sent in enumerate(by_round(messages)):
        received = np.bincount([receiver for _, _, receiver in sent], minlength=ranks)
        window = np.maximum(window, received)
        for expert, _, receiver in sent:
            if receiver == seats.topology.home_E[expert]:
                first_last[expert] = (first_last.get(expert, (when, when))[0], when)
    assert window.max() <= WINDOW
    sums = np.zeros((messages.rounds, ranks), dtype=int)
    for expert, (first, last) in first_last.items():
        sums[first : last + 1, seats.topology.home_E[expert]] += 1
    np.testing.assert_array_equal(open_sums(seats, messages), sums)
    copies_E = np.bincount(seats.expert_Q[seats.foreign_Q], minlength=seats.topology.experts)
    assert (sums <= WINDOW + np.bincount(seats.topology.home_E[copies_E > DIRECT], minlength=ranks)).all()
    slots = np.bincount([rank for rank, _ in foreign_seats(seats)], minlength=ranks)
    np.testing.assert_array_equal(fetch_experts_R(seats), slots)
    np.testing.assert_array_equal(return_experts_R(seats), window)
    np.testing.assert_array_equal(return_experts_R(seats, narrow_foreign=True), window + slots)
    np.testing.assert_array_equal(return_experts_R(seats, narrow_home=True), window + sums.max(0, initial=0))


@pytest.mark.parametrize(("copies", "rounds"), [(0, 0), (1, 1), (4, 1), (5, 3), (7, 3), (8, 4), (15, 4)])
def test_rounds_grow_with_the_logarithm_of_the_copies(copies: int, rounds: int) -> None:
    seats = seats_with(16, 16, {(rank, 0) for rank in range(1, copies + 1)})
    assert fetch_messages(seats).rounds == rounds


def test_a_thousand_ranks_are_planned_in_milliseconds() -> None:
    ranks = 1024
    rng = np.random.default_rng(0)
    foreign = {(rank, int(expert)) for rank in range(ranks) for expert in rng.integers(0, 2 * ranks, 2)}
    seats = seats_with(ranks, 2 * ranks, foreign | {(rank, 7) for rank in range(1, 55)})
    fastest = min(_seconds(seats) for _ in range(5))
    assert fastest < 0.05


def _seconds(seats: Seats) -> float:
    start = time.perf_counter()
    fetch_messages(seats)
    return_experts_R(seats, narrow_home=True)
    return time.perf_counter() - start
