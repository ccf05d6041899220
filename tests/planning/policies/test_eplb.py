"""EPLB: equal slot counts per rank, replication by load per copy, packing, both modes, lasting layouts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lrmoe.planning.policies import EPLB
from lrmoe.planning.policies.eplb import balanced_packing, replicate
from lrmoe.planning.problem import History
from lrmoe.simulate.generators import GENERATORS
from tests.planning.policies.helpers import SHAPES, Shape, ask, copies, loads, run, series


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("mode", ["auto", "global", "hierarchical"])
def test_every_rank_fills_the_same_number_of_slots(generator: str, mode: str) -> None:
    policy = EPLB(mode=mode, groups=4, interval=1)
    for slots in (0, 2):
        for problem, plan in run(policy, series(generator, SHAPES[0], steps=3), SHAPES[0], slots=slots):
            assert (copies(plan).sum(axis=1) == 4 + slots).all()
            assert (copies(plan).sum(axis=0) >= 1).all()
            assert plan.moved.resident_R.tolist() == [slots] * problem.topology.ranks


def test_hierarchical_keeps_a_group_and_its_copies_in_one_node() -> None:
    policy = EPLB(groups=4, interval=1)
    _, (problem, plan) = run(policy, series("lognormal", SHAPES[0], steps=2), SHAPES[0], slots=2)
    in_node = copies(plan).reshape(2, 4, 32).sum(axis=1) > 0
    assert (in_node.sum(axis=0) == 1).all()
    of_group = in_node[0].reshape(4, 8)
    assert (of_group.all(axis=1) | ~of_group.any(axis=1)).all()
    assert of_group.any(axis=1).sum() == 2
    spread = run(EPLB(mode="global", interval=1), series("lognormal", SHAPES[0], steps=2), SHAPES[0], slots=2)
    assert ((copies(spread[1][1]).reshape(2, 4, 32).sum(axis=1) > 0).sum(axis=0) > 1).any()
    assert problem.topology.nodes == 2


def test_each_further_copy_goes_to_the_most_load_per_copy() -> None:
    assert replicate(np.array([90, 40, 10]), 6).tolist() == [3, 2, 1]
    assert replicate(np.array([0, 0]), 3).tolist() == [2, 1]


def test_packs_get_equal_numbers_heaviest_first() -> None:
    assert balanced_packing(np.array([9.0, 8.0, 7.0, 1.0]), 2).tolist() == [0, 1, 1, 0]
    # The last item must go where there is a place, not where there is least.
    assert balanced_packing(np.array([9.0, 1.0, 1.0, 1.0]), 2).tolist() == [0, 1, 1, 0]


def test_a_layout_lasts_for_its_interval_and_moves_states_only_when_it_changes() -> None:
    done = run(EPLB(interval=3), series("rotating", SHAPES[0], steps=8), SHAPES[0], slots=2)
    layouts = [copies(plan) for _, plan in done]
    changed = [step for step in range(1, 8) if not np.array_equal(layouts[step - 1], layouts[step])]
    assert changed == [1, 4, 7]
    for step, (_, plan) in enumerate(done):
        arrived = ((layouts[step] > 0) & (layouts[max(step - 1, 0)] == 0)).sum(axis=1)
        assert plan.moved.fetch_R.tolist() == plan.moved.state_R.tolist() == arrived.tolist()
        assert (arrived.sum() > 0) == (step in changed)
        extra = (layouts[step] > 0).sum() - 32
        assert plan.moved.return_R.sum() == 2 * extra  # an all-reduce among k moves 2 (k - 1)


def test_copies_that_share_a_rank_survive_in_the_history() -> None:
    load = loads([1000, 1, 1, 1], ranks=2)
    done = run(EPLB(interval=5), np.stack([load] * 3), Shape(2, 4), slots=2)
    assert copies(done[1][1])[:, 0].tolist() == [3, 2]
    assert np.array_equal(copies(done[1][1]), copies(done[2][1]))
    assert done[1][1].fingerprint() == done[2][1].fingerprint()


def test_the_estimate_is_the_mean_of_the_window() -> None:
    old, new = loads([0, 0, 0, 800], ranks=2), loads([90, 0, 0, 0], ranks=2)
    problem = ask(new, slots=1)
    history = History(counts=(old, new), step=1)
    wide, narrow = (
        copies(EPLB(window=window)(dataclasses.replace(problem, history=history))) for window in (2, 1)
    )
    assert wide.sum(axis=0).tolist() == [1, 1, 1, 3]
    assert narrow.sum(axis=0).tolist() == [3, 1, 1, 1]
