"""Replicas only where they pay: never dearer than none, the best of the family, few where rows are few."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.errors import PlanError
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.copies import fetch_messages
from lrmoe.planning.fit import fit
from lrmoe.planning.placement import place, placed, unmatched
from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import seats_of
from lrmoe.planning.worth import Scale, family, worthwhile
from lrmoe.simulate.generators import generate
from tests.planning.oracles import problems

MODEST = settings(deadline=None, max_examples=200, derandomize=True)


def make(counts: np.ndarray, **kwargs: object) -> Problem:
    ranks, experts = counts.shape
    return Problem(counts_RE=counts, topology=Topology(ranks=ranks, experts=experts), **kwargs)  # type: ignore[arg-type]


def skewed(tokens: int, seed: int = 0) -> IntArray:
    return generate("lognormal", ranks=8, experts=32, top_k=4, tokens=tokens, seed=seed)[0]


def plan(problem: Problem) -> LayerPlan:
    answer = get_policy("lrmoe")(problem)
    answer.check(problem)
    return answer


def messages(found: LayerPlan) -> int:
    """Copies in the busier direction of the busiest rank, counted from what really travels."""
    sent = fetch_messages(seats_of(found))
    ranks = found.topology.ranks
    each = [np.bincount(ends, minlength=ranks) for ends in (sent.sender_M, sent.receiver_M)]
    return int(np.maximum(*each).max())


def rows(problem: Problem, found: LayerPlan) -> float:
    """What a plan costs, in rows: compute, crossing, copies, each on its slowest rank."""
    local = np.zeros(found.topology.ranks, dtype=np.int64)
    np.add.at(
        local,
        found.instance_rank_J,
        found.assign_RJ[found.instance_rank_J, np.arange(len(found.instance_rank_J))],
    )
    enter, leave = found.forward_load_R - local, found.counts_RE.sum(axis=1) - local
    compute = (found.forward_load_R.max() + 2 * found.backward_load_R.max()) / 3
    crossing = max(enter.max(), leave.max()) * problem.cross_rows  # exact calls: the same in backward
    return float(compute + crossing + problem.copy_rows * messages(found))


@MODEST
@given(problems(), st.integers(1, 3), st.sampled_from([0.5, 20.0, 300.0]))
def test_plans_never_cost_more_than_every_expert_at_home(question: Problem, slots: int, price: float) -> None:
    slots = min(slots, question.topology.experts - question.topology.experts_per_rank)
    problem = dataclasses.replace(question, slots=slots, copy_rows=price, min_keep=min(question.min_keep, 1))
    home = plan(dataclasses.replace(problem, slots=0))
    assert rows(problem, plan(problem)) <= rows(problem, home) + 1  # quotas of single pairs round


@MODEST
@given(problems(), st.integers(1, 3), st.sampled_from([0.5, 20.0, 300.0]), st.sampled_from([0.0, 0.5, 2.0]))
def test_the_choice_is_the_best_of_the_family_and_what_is_charged_is_what_the_plan_does(
    question: Problem, slots: int, price: float, cross: float
) -> None:
    slots = min(slots, question.topology.experts - question.topology.experts_per_rank)
    problem = dataclasses.replace(
        question, slots=slots, max_drop=0.0, drop="always", copy_rows=price, cross_rows=cross
    )
    home, scale = unmatched(problem), Scale(problem)
    options = [home, *family(problem, home, None)]
    best = min(scale.rows(one) for one in options)
    assert rows(problem, plan(problem)) <= best * (1 + 1e-12)
    for one in options:
        if one.moved:
            laid = placed(one, problem.topology)
            assert laid.load_R.max() <= home.peak
            assert scale.floor <= scale.rows(one)
            assert laid.replicas_R.max() <= slots


def test_charged_copies_are_those_that_travel_also_in_trees() -> None:
    counts = np.ones((16, 16), dtype=np.int64)
    counts[:, 3] = 1000  # its copies go out by a tree
    counts[:, 9] = 300
    problem = make(counts, slots=2, copy_rows=10.0)
    found = plan(problem)
    assert found.replicas_R.sum() > 8
    assert rows(problem, found) == pytest.approx(
        Scale(problem).rows(family(problem, unmatched(problem), None)[0])
    )


def test_a_small_call_places_none_and_a_large_skewed_one_all() -> None:
    small, large = skewed(32), skewed(65536)
    for drop in (0.0, 0.3):
        assert not plan(make(small, slots=2, max_drop=drop, copy_rows=1000.0)).replicas_R.any()
        found = plan(make(large, slots=2, max_drop=drop, copy_rows=1000.0))
        assert found.forward_load_R.max() <= 1.05 * found.pairs / 8
        assert place(make(small, slots=2)).replicas_R.any(), "the price keeps them away"


def test_dearer_copies_are_fewer() -> None:
    counts = skewed(2048)
    used = [messages(plan(make(counts, slots=2, copy_rows=price))) for price in (0.0, 1.0, 100.0, 400.0, 1e5)]
    assert used == sorted(used, reverse=True)
    assert used[0] > used[3] > used[4] == 0


def test_a_copy_may_pay_by_what_no_longer_crosses() -> None:
    counts = np.full((4, 8), 100)
    counts[3, 0] = counts[0, 6] = 800  # two ranks send most of their pairs to each other
    counts[1, 2] = counts[2, 4] = 800  # two keep most of theirs; loads are even
    for cross, wanted in ((1.0, True), (0.1, False)):
        problem = make(counts, slots=1, copy_rows=300.0, cross_rows=cross)
        assert bool(plan(problem).replicas_R.any()) is wanted
        assert rows(problem, plan(problem)) <= rows(problem, plan(dataclasses.replace(problem, slots=0)))


def test_a_price_of_zero_changes_nothing() -> None:
    for seed in range(3):
        problem = make(skewed(512, seed), slots=2, max_drop=0.2)
        assert plan(problem).fingerprint() == plan(dataclasses.replace(problem, cross_rows=3.0)).fingerprint()


def test_a_budget_comes_before_the_price() -> None:
    problem = make(skewed(512), slots=2, copy_rows=1e6, replica_rows=10)
    loads = problem.counts_E.reshape(8, -1).sum(axis=1)
    roomy = dataclasses.replace(problem, budget_rows=int(loads.max()))
    tight = dataclasses.replace(problem, budget_rows=int(loads.max()) - 1)
    assert not plan(roomy).replicas_R.any()
    assert plan(tight).replicas_R.any()
    assert (plan(tight).forward_chunks, plan(tight).recompute) == (1, False)


def test_a_byte_budget_comes_before_the_price() -> None:
    problem = make(skewed(512), slots=2, copy_rows=1e6, replica_rows=10)

    def predict(found: LayerPlan) -> tuple[IntArray, IntArray]:
        need = -(-found.forward_load_R // found.forward_chunks) + 10 * found.replicas_R
        return need, need

    policy, home = get_policy("lrmoe"), int(problem.counts_E.reshape(8, -1).sum(axis=1).max())
    for budget, replicas in ((home, False), (home - 1, True), (home * 2 // 3, True)):
        found = fit(problem, policy, predict, budget, adapts=True)
        assert found.need <= budget
        assert found.plan.replicas_R.any() == replicas
        assert found.plan.forward_chunks == 1


@pytest.mark.parametrize("field", ["copy_rows", "cross_rows"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_prices_are_finite_and_not_negative(field: str, value: float) -> None:
    with pytest.raises(PlanError, match=field):
        make(np.ones((2, 4), np.int64), **{field: value})


_PRINT = """
from lrmoe.planning import Problem, Topology, get_policy
from lrmoe.simulate.generators import generate
for seed in range(4):
    for nodes in (None, 4):
        counts = generate("lognormal", ranks=8, experts=32, top_k=4, tokens=1024, seed=seed)[0]
        topology = Topology(ranks=8, experts=32, ranks_per_node=nodes)
        problem = Problem(counts_RE=counts, topology=topology, slots=2, max_drop=0.2, copy_rows=100.7, cross_rows=0.3)
        print(get_policy("lrmoe")(problem).fingerprint())
"""


def test_priced_plans_are_identical_across_processes() -> None:
    outputs = set()
    for seed in ("0", "31337"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", _PRINT]
        outputs.add(
            subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
        )
    assert len(outputs) == 1
    assert len(set(outputs.pop().split())) >= 4


def test_idle_calls_place_nothing() -> None:
    assert worthwhile(make(np.zeros((4, 8), np.int64), slots=2, copy_rows=1.0, cross_rows=1.0)) is None
