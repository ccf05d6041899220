"""LAER-MoE: the replica heap with node steps, placement by nodes, the choice among candidates, gathered traffic."""

from __future__ import annotations

import numpy as np
import pytest

from lrmoe.planning import Topology
from lrmoe.planning.policies import Laer
from lrmoe.planning.policies.laer import floor_copies, place, proportional
from lrmoe.simulate.generators import GENERATORS
from tests.planning.policies.helpers import SHAPES, ask, copies, loads, run, series


def test_the_heap_gives_slots_to_the_most_load_per_copy() -> None:
    topology = Topology(ranks=2, experts=4)
    assert proportional(np.array([90, 40, 10, 10]), 4, topology).tolist() == [4, 2, 1, 1]


def test_with_nodes_an_expert_that_has_one_copy_a_node_gets_one_more_in_each() -> None:
    topology = Topology(ranks=4, experts=4, ranks_per_node=2)
    # 8 slots = one copy a node each, nothing left.
    assert floor_copies(topology, 2) == 2
    assert proportional(np.array([90, 40, 10, 10]), 2, topology).tolist() == [2, 2, 2, 2]
    # 12 slots: 4 left, in steps of 2, both to the hottest (45 > 20; 22.5 > 20).
    assert proportional(np.array([90, 40, 10, 10]), 3, topology).tolist() == [6, 2, 2, 2]
    # 7 slots cannot give everyone one a node: from 1 in single steps up to the number of nodes.
    topology = Topology(ranks=4, experts=8, ranks_per_node=2)
    assert floor_copies(topology, 3) == 1
    count = proportional(np.array([90, 40, 10, 10, 5, 5, 5, 5]), 3, topology)
    assert count.tolist() == [4, 2, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("generator", GENERATORS)
def test_every_rank_has_at_most_its_live_slots(generator: str) -> None:
    for _, plan in run(Laer(), series(generator, SHAPES[0], steps=3), SHAPES[0], slots=2):
        assert copies(plan).sum(axis=1).max() <= 6
        assert copies(plan).sum() >= 8 * 6 - 1  # steps of one a node may leave less than one step


def test_copies_prefer_nodes_with_fewest_of_them() -> None:
    topology = Topology(ranks=4, experts=4, ranks_per_node=2)
    copies_RE = place(np.array([90, 40, 10, 10]), np.array([4, 2, 1, 1]), 2, topology)
    assert copies_RE.sum(axis=1).tolist() == [2, 2, 2, 2]
    in_node = copies_RE.reshape(2, 2, 4).sum(axis=1)
    assert in_node[:, 0].tolist() == [2, 2]
    assert in_node[:, 1].tolist() == [1, 1]


def test_sources_use_the_copies_of_their_node() -> None:
    _, (problem, plan) = run(Laer(), series("lognormal", SHAPES[0], steps=2), SHAPES[0], slots=3)
    node_R = problem.topology.node_R
    in_node = copies(plan).reshape(2, 4, 32).sum(axis=1) > 0
    for j, (rank, expert) in enumerate(zip(plan.instance_rank_J, plan.instance_expert_J, strict=True)):
        for source in np.flatnonzero(plan.assign_RJ[:, j]):
            assert node_R[source] == node_R[rank] or not in_node[node_R[source], expert]
    assert in_node.all(axis=0).any()


def test_the_candidate_with_less_estimated_time_wins() -> None:
    # 16 slots for 4 experts: with equal copies every rank holds all, balanced and without any exchange.
    hot = loads([4000, 10, 10, 10], ranks=4)
    plan = Laer(slots=3)(ask(hot, past=hot))
    assert copies(plan).tolist() == [[1] * 4] * 4
    assert proportional(hot.sum(axis=0), 4, Topology(ranks=4, experts=4)).tolist() == [13, 1, 1, 1]
    skewed = loads([4000, *[10] * 7], ranks=4)
    plan = Laer(slots=2)(ask(skewed, past=skewed))  # 16 slots, two for each would leave 2000 on two ranks
    assert copies(plan).sum(axis=0).tolist() == [9, 1, 1, 1, 1, 1, 1, 1]
    assert plan.forward_load_R.max() < 2000


def test_all_live_experts_are_gathered_from_shards() -> None:
    for slots, gathered in ((2, 6), (4, 7)):  # 7 / 8 of 6 experts, rounded up; 7 / 8 of 8
        for regather in (True, False):
            policy = Laer(regather=regather)
            (_, plan), *_ = run(policy, series("zipf", SHAPES[0], steps=1), SHAPES[0], slots=slots)
            assert plan.moved.fetch_R.tolist() == plan.moved.return_R.tolist() == [gathered] * 8
            assert plan.moved.refetch_R.tolist() == [gathered if regather else 0] * 8
        assert not plan.moved.state_R.any()
        assert not plan.moved.resident_R.any()
