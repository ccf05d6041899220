"""FasterMoE: the published conditions for a shadow, the early stop, the code's rule, all-or-nothing copies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from lrmoe.planning import Problem
from lrmoe.planning.policies import FasterMoE
from tests.planning.policies.helpers import SHAPES, ask, copies, loads, run, series

# A machine on which one row costs 1 s of compute (forward and backward) and 4 * WIRE s of exchange.
UNIT: dict[str, Any] = {"hidden": 1, "width": 1, "matrices": 1, "element_bytes": 1, "flops": 6.0}


def greedy(problem: Problem, wire: float, model: float) -> list[int]:
    """Algorithm 1 written out with plain lists: row = 1 s of compute, 4 wire s of exchange; shadow = 2 model s."""
    ranks, experts = problem.counts_RE.shape
    home = problem.topology.home_E.tolist()
    counts = problem.counts_RE.tolist()

    def loads_with(shadowed: set[int]) -> list[int]:
        load = [0] * ranks
        for source in range(ranks):
            for expert in range(experts):
                load[source if expert in shadowed else home[expert]] += counts[source][expert]
        return load

    best = max(loads_with(set())) * (1 + 4 * wire)
    chosen: list[int] = []
    for expert in sorted(range(experts), key=lambda e: (-sum(row[e] for row in counts), e)):
        cost = max(loads_with({*chosen, expert})) + 2 * (len(chosen) + 1) * model
        if cost >= best:
            break
        best = cost
        chosen.append(expert)
    return chosen


@pytest.mark.parametrize("generator", ["lognormal", "zipf", "hot_set", "balanced", "uneven_sources"])
@pytest.mark.parametrize("bandwidth", [0.01, 0.1, 10.0])
def test_paper_rule_equals_algorithm_1_written_out(generator: str, bandwidth: float) -> None:
    for problem, plan in run(
        FasterMoE(**UNIT, bandwidth=bandwidth), series(generator, SHAPES[0], steps=2), SHAPES[0], slots=0
    ):
        expected = greedy(problem, wire=1 / bandwidth, model=1 / bandwidth)
        found = np.flatnonzero(copies(plan).sum(axis=0) > 1)
        assert sorted(expected) == found.tolist()


def test_it_stops_at_the_first_expert_without_gain() -> None:
    # Rank 0: experts 0 and 1 of 100 and 60 pairs; rank 1: expert 2 of 80. Shadowing 0 helps; 2, the next by load,
    # raises the peak; 1 alone would help again but is never reached.
    problem = ask(loads([100, 60, 80, 0], ranks=2))
    policy = FasterMoE(**UNIT, bandwidth=100.0)
    assert policy.shadows(problem) == [0]
    without_0 = ask(loads([0, 60, 0, 0], ranks=2))
    assert policy.shadows(without_0) == [1]


@pytest.mark.parametrize(("pairs", "chosen"), [(4095, []), (4097, [0])])
def test_the_first_shadow_pays_where_a_rank_has_more_than_alpha_h_rows(pairs: int, chosen: list[int]) -> None:
    """The paper's condition B > r * alpha * H, where shadowing does not change the loads: all pairs are local."""
    policy = FasterMoE(hidden=2048, width=4096, matrices=2)  # alpha = 2: alpha * H = 4096
    problem = ask([[pairs, 0], [0, pairs]])
    assert policy.shadows(problem)[:1] == chosen


def test_a_shadow_sits_on_every_rank_and_serves_only_its_own() -> None:
    (problem, plan), *_ = run(
        FasterMoE(**UNIT, bandwidth=10.0), series("hot_set", SHAPES[0], steps=1), SHAPES[0], slots=0
    )
    shadowed = np.flatnonzero(copies(plan).sum(axis=0) > 1)
    assert shadowed.size > 0
    assert (copies(plan)[:, shadowed] == 1).all()
    for j, (expert, rank) in enumerate(zip(plan.instance_expert_J, plan.instance_rank_J, strict=True)):
        if expert in shadowed:
            assert np.flatnonzero(plan.assign_RJ[:, j]).tolist() in ([], [rank])
    # Broadcast once, kept until backward, reduced once.
    foreign = shadowed.size - np.bincount(problem.topology.home_E[shadowed], minlength=8)
    assert plan.moved.fetch_R.tolist() == plan.moved.return_R.tolist() == foreign.tolist()
    assert not plan.moved.refetch_R.any()
    assert not plan.moved.state_R.any()
    assert not plan.moved.resident_R.any()


def test_code_rule_compares_experts_not_ranks() -> None:
    # A row costs 1 s of compute and 4 s of exchange, a shadow 100 s: 20 rows less in the next expert pay for one.
    policy = FasterMoE(
        rule="code", hidden=1, width=100, matrices=1, element_bytes=1, flops=600.0, bandwidth=1.0
    )
    for load, chosen in (
        ([100, 81, 0, 0], []),
        ([100, 79, 60, 0], [0]),
        ([100, 79, 58, 57], [0, 1]),
        ([100, 81, 1, 0], []),  # stops there, though shadowing two would pay
    ):
        assert policy.shadows(ask(loads(load, ranks=2))) == chosen
    limited = dataclasses.replace(policy, max_shadows=1)
    assert limited.shadows(ask(loads([100, 79, 58, 57], ranks=2))) == [0]
    assert policy.shadows(ask([[100, 0]])) == []  # one rank has nobody to share with
