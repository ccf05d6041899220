"""TAOT in TopoEP's place: spills of large experts, slot-wise matching, the own node preferred, clone limits."""

from __future__ import annotations

import numpy as np
import pytest

from lrmoe.planning.policies import TopoEP
from lrmoe.planning.policies.topoep import _exp_minus, spills
from lrmoe.simulate.generators import GENERATORS
from tests.planning.policies.helpers import SHAPES, Shape, ask, copies, loads, run, series


def test_small_experts_fill_their_rank_and_the_large_ones_spill() -> None:
    # Mean 100 a rank. Rank 0: 20 + 50 fit, of 90 only 30 do, 60 spill. Rank 1 is below the mean.
    assert spills(np.array([90, 20, 50, 10, 10, 20]), 2, 100).tolist() == [60, 0, 0, 0, 0, 0]
    assert spills(np.array([90, 20, 130, 0]), 2, 80).tolist() == [30, 0, 50, 0]


def test_slots_match_the_largest_gives_on_one_node() -> None:
    # Mean 100. Spills: expert 0 of 60, expert 1 of 100 (rank 0 holds 260). Spare: 80, 50, 30 on ranks 1 to 3.
    load = loads([160, 100, 20, 0, 50, 0, 70, 0], ranks=4)
    problem = ask(load, slots=1)
    assert spills(problem.counts_E, 4, 100).tolist() == [160, 0, 0, 0, 0, 0, 0, 0]
    assert TopoEP().clones(problem) == [(0, 1, 80), (0, 2, 50), (0, 3, 30)]
    plan = TopoEP()(problem)
    assert plan.forward_load_R.tolist() == [100, 100, 100, 100]


def test_every_rank_proposes_and_every_expert_accepts_its_best() -> None:
    # Rank 0: 90 + 80, mean 65: spills of 80 (smaller, partly) and 90; ranks 1 and 2 spare.
    load = loads([90, 80, 10, 0, 15, 0], ranks=3)
    problem = ask(load, slots=1)
    assert spills(problem.counts_E, 3, 65).tolist() == [90, 15, 0, 0, 0, 0]
    # Both ranks propose to expert 0 (55 and 50 against 15); it accepts rank 1; rank 2 still finds it spilling 35.
    assert TopoEP().clones(problem) == [(0, 1, 55), (0, 2, 35)]
    assert TopoEP(slots=0).clones(problem) == []


def test_among_equal_gives_the_transport_hint_decides() -> None:
    # Spills of 10 each, room of 12 and 18: the transport sends 4 and 6 of every spill there.
    problem = ask(loads([110, 110, 110, 88, 82], ranks=5), slots=1)
    assert TopoEP().clones(problem)[:2] == [(0, 4, 10), (1, 3, 10)]


def test_a_rank_in_the_same_node_is_preferred() -> None:
    # Ranks 1 (same node) and 2 (other node) have equal room.
    load = loads([70, 0, 20, 0, 20, 0, 50, 0], ranks=4)
    flat, nodes = ask(load, slots=1), ask(load, slots=1, ranks_per_node=2)
    assert TopoEP().clones(flat)[0] == (0, 1, 20)
    mirrored = loads([50, 0, 20, 0, 20, 0, 70, 0], ranks=4)
    assert TopoEP().clones(nodes)[0] == (0, 1, 20)
    # Home rank 3: ties between ranks 1 and 2 go to the lower without nodes, to its own node with them.
    assert TopoEP().clones(ask(mirrored, slots=1)) == [(6, 1, 20), (0, 2, 10)]
    assert TopoEP().clones(ask(mirrored, slots=1, ranks_per_node=2)) == [(0, 1, 10), (6, 2, 20)]


@pytest.mark.parametrize("generator", GENERATORS)
def test_clones_leave_overloaded_homes_for_ranks_with_room(generator: str) -> None:
    for shape in SHAPES:
        for slots in (1, 2):
            for problem, plan in run(TopoEP(), series(generator, shape, steps=2), shape, slots=slots):
                limit = min(slots, shape.experts - problem.topology.experts_per_rank)
                assert plan.replicas_R.max() <= limit
                mean = problem.pairs // shape.ranks
                fixed = problem.counts_E.reshape(shape.ranks, -1).sum(axis=1)
                received = np.zeros(shape.ranks, dtype=np.int64)
                given = np.zeros(shape.ranks, dtype=np.int64)
                for expert, rank, pairs in TopoEP().clones(problem):
                    assert pairs > 0
                    received[rank] += pairs
                    given[problem.topology.home_E[expert]] += pairs
                assert (received <= np.maximum(mean - fixed, 0)).all()
                assert (given <= np.maximum(fixed - mean, 0)).all()
                assert np.array_equal(plan.forward_load_R, fixed - given + received)


def test_clones_are_fetched_twice_and_returned_once() -> None:
    (_, plan), *_ = run(TopoEP(), series("hot_rank", Shape(8, 32), steps=1), Shape(8, 32), slots=2)
    assert plan.replicas_R.sum() > 0
    for found in (plan.moved.fetch_R, plan.moved.refetch_R, plan.moved.return_R):
        assert np.array_equal(found, plan.replicas_R)


def test_the_transport_fits_excess_and_room() -> None:
    load = np.array([300, 100, 50, 150, 200, 100, 250, 50])
    plan, excess = TopoEP()._transport(load, np.arange(8) // 4)
    room = np.maximum(150 - load, 0)
    assert (plan >= 0).all()
    assert np.allclose(plan.sum(axis=1), excess, rtol=1e-6)
    assert np.allclose(plan.sum(axis=0), room, rtol=1e-6)
    # Rank 0 would rather fill ranks of its own node.
    assert plan[0, 1] / room[1] > plan[0, 5] / room[5]


def test_the_exponential() -> None:
    for x in (0.0, 1 / 3, 1.0):
        assert abs(_exp_minus(x) - np.exp(-x)) < 1e-15


def test_a_source_keeps_what_the_clones_do_not_take() -> None:
    problem = ask([[100, 0, 0, 0], [60, 0, 0, 0]], slots=1)
    plan = TopoEP()(problem)
    assert copies(plan)[:, 0].tolist() == [1, 1]
    columns = np.flatnonzero(plan.instance_expert_J == 0)
    # 80 leave, 50 and 30 in proportion to the sources.
    assert plan.assign_RJ[:, columns].tolist() == [[50, 50], [30, 30]]
