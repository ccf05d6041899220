"""SYMI: E / R slots equal fixed ownership, instances by popularity, contiguous placement, capacity drop."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.planning import get_policy
from lrmoe.planning.policies import Symi
from lrmoe.planning.policies.symi import instances
from lrmoe.planning.problem import History
from lrmoe.simulate.generators import GENERATORS
from tests.planning.policies.helpers import SHAPES, ask, copies, loads, run, series


@pytest.mark.parametrize("generator", GENERATORS)
def test_with_one_slot_an_expert_it_equals_fixed_ownership(generator: str) -> None:
    policy = Symi(slots_per_rank=4)
    for problem, plan in run(policy, series(generator, SHAPES[0], steps=3), SHAPES[0], slots=2):
        fixed = get_policy("megatron")(problem)
        assert np.array_equal(plan.instance_rank_J, fixed.instance_rank_J)
        assert np.array_equal(plan.instance_expert_J, fixed.instance_expert_J)
        assert np.array_equal(plan.assign_RJ, fixed.assign_RJ)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.integers(0, 40))
def test_instances_follow_popularity(popularity: list[int], extra: int) -> None:
    load = np.array(popularity)
    slots = load.size + extra
    count = instances(load, slots)
    assert count.sum() == slots
    assert count.min() >= 1
    if load.sum() == 0:
        assert np.ptp(count) <= 1
        return
    goal = load / load.sum() * slots
    # A more popular expert never has fewer, and no expert is a whole instance short unless all slots are taken.
    assert all(count[i] >= count[j] for i in range(load.size) for j in range(i) if goal[i] > goal[j] + 1)
    assert (count <= np.maximum(np.floor(goal) + 1, 1)).all()


def test_instances_of_the_algorithm_by_hand() -> None:
    # Goals 5.6, 1.6, .4, .4 of 8: floors 5, 1, 1, 1 are 8 already.
    assert instances(np.array([70, 20, 5, 5]), 8).tolist() == [5, 1, 1, 1]
    # Goals 3.2, 2.6, .1, .1 of 6: floors 3, 2, 1, 1 are one too many; of those with more than one, 3 exceeds most.
    assert instances(np.array([320, 260, 10, 10]), 6).tolist() == [2, 2, 1, 1]
    # Goals 2.5, 1.5 of 4: floors 2, 1 leave one; both lack .5, the first takes it.
    assert instances(np.array([5, 3]), 4).tolist() == [3, 1]


def test_experts_lie_in_id_order_over_the_slots() -> None:
    past = loads([70, 20, 5, 5], ranks=2)
    plan = Symi(slots_per_rank=4)(ask(past, past=past))
    assert copies(plan).tolist() == [[4, 0, 0, 0], [1, 1, 1, 1]]
    # 70 pairs over 5 instances: 14 each, 4 of them on rank 0.
    assert plan.forward_load_R.tolist() == [56, 14 + 30]


def test_slots_are_those_of_fixed_ownership_plus_the_problems() -> None:
    for _, plan in run(Symi(), series("zipf", SHAPES[0], steps=2), SHAPES[0], slots=2):
        assert (copies(plan).sum(axis=1) == 6).all()
        assert plan.moved.resident_R.tolist() == [2] * 8
        for field in ("fetch_R", "refetch_R", "return_R", "state_R"):
            assert not getattr(plan.moved, field).any()


def test_dropless_by_default() -> None:
    for _, plan in run(Symi(), series("hot_rank", SHAPES[0], steps=2), SHAPES[0], slots=2):
        assert plan.overflow_RE is None
        assert plan.exact


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_pairs_beyond_an_experts_capacity_are_not_computed(factor: float) -> None:
    for problem, plan in run(
        Symi(capacity_factor=factor), series("lognormal", SHAPES[0], steps=2), SHAPES[0], slots=2
    ):
        count_E = copies(plan).sum(axis=0)
        capacity_E = np.floor(factor * problem.pairs / 48 * count_E)
        computed_E = np.zeros(32, dtype=np.int64)
        np.add.at(computed_E, plan.instance_expert_J, plan.assign_RJ.sum(axis=0))
        assert np.array_equal(computed_E, np.minimum(problem.counts_E, capacity_E))
        assert plan.overflow_RE is not None
        assert plan.overflow_RE.sum() == problem.pairs - computed_E.sum()
        # Every source loses its proportional share, to a pair.
        share = computed_E / np.maximum(problem.counts_E, 1)
        kept_RE = problem.counts_RE - plan.overflow_RE
        assert np.abs(kept_RE - problem.counts_RE * share).max() < 1 + 1e-9
        plan.check(problem)


def test_capacity_that_suffices_leaves_no_overflow() -> None:
    problem = ask(np.full((2, 4), 50))
    assert Symi(capacity_factor=1.0)(problem).overflow_RE is None


def test_only_the_last_call_counts() -> None:
    old, last = loads([0, 0, 0, 90], ranks=2), loads([90, 0, 0, 0], ranks=2)
    problem = ask(np.ones((2, 4)), slots=1)
    history = History(counts=(old, last), step=2)
    plan = Symi()(dataclasses.replace(problem, history=history))
    assert copies(plan).sum(axis=0).tolist() == [3, 1, 1, 1]
