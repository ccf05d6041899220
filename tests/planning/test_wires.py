"""Quotas under a limited network: the least peak or the least of compute and wire time by MILP, and clear refusals."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from lrmoe.errors import InfeasibleError, PlanError
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.covering import Covering
from lrmoe.planning.prices import Quotas
from lrmoe.planning.routing import Limits, route
from lrmoe.planning.wires import wired_quotas
from lrmoe.simulate.generators import generate
from tests.planning.oracles import milp_wired, overload_goal, problems
from tests.planning.test_prices import Spread, check, spreads

MODEST = settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck), derandomize=True)
FEW = settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck), derandomize=True)


def own_rows(problem: Problem, expert_J: np.ndarray, rank_J: np.ndarray, quota_E: np.ndarray) -> np.ndarray:
    """Kept pairs on the instance's own rank, sources in proportion to their counts, rounded down."""
    counts_E = np.maximum(problem.counts_E, 1)
    return problem.counts_RE[rank_J, expert_J] * quota_E[expert_J] // counts_E[expert_J]


def run(spread: Spread, found: Quotas) -> tuple[int, int]:
    """Largest load, and most rows that enter a rank, where the router puts these quotas."""
    ranks, local_J = spread.problem.topology.ranks, own_rows(
        spread.problem, spread.expert_J, spread.rank_J, found.quota_E
    )  # fmt: skip
    limits = Limits(wire_R=np.full(ranks, found.wire_rows), local_J=local_J)
    routed = route(spread.expert_J, spread.rank_J, found.stay_J, ranks, limits=limits)
    over_J = np.maximum(routed.pairs_J - local_J, 0)
    return int(routed.load_R.max()), int(np.bincount(spread.rank_J, over_J, minlength=ranks).max())


def wired(spread: Spread) -> Quotas:
    return wired_quotas(spread.problem, spread.expert_J, spread.rank_J, spread.pairs_J)


@MODEST
@given(spreads(max_ranks=4, max_count=60), st.sampled_from([0.05, 0.2, 0.5, 1.0]))
def test_the_least_peak_under_a_cap_on_entering_rows_equals_milp(spread: Spread, share: float) -> None:
    pairs, ranks = spread.problem.pairs, spread.problem.topology.ranks
    wire = 1 + int(share * pairs / ranks)
    problem = dataclasses.replace(spread.problem, wire_rows=wire, drop="always")
    case = dataclasses.replace(spread, problem=problem)
    best = milp_wired(problem, spread.expert_J, spread.rank_J, wire)
    if best is None:
        with pytest.raises(InfeasibleError, match=f"wire_rows={wire}"):
            wired(case)
        return
    found = wired(case)
    check_legal(problem, found)
    peak, entering = run(case, found)
    assert entering <= wire
    assert peak <= found.peak == round(best)


@FEW
@given(spreads(max_ranks=4, max_count=60), st.sampled_from([0.3, 1.0, 2.5]))
def test_the_larger_of_compute_and_wire_time_is_within_1_percent_of_milp(
    spread: Spread, weight: float
) -> None:
    problem = dataclasses.replace(spread.problem, wire_weight=weight, drop="always")
    case = dataclasses.replace(spread, problem=problem)
    found = wired(case)
    check_legal(problem, found)
    peak, entering = run(case, found)
    best = milp_wired(problem, spread.expert_J, spread.rank_J, None, weight)
    assert best is not None
    assert best - 1e-6 <= max(peak, weight * entering)
    # Whole rows: a level holds whole pairs, and one row more on the wire is `weight` rows of the level.
    assert max(peak, weight * entering) <= max(1.01 * best, best + max(weight, 1.0))


def check_legal(problem: Problem, found: Quotas) -> None:
    assert (found.quota_E >= problem.floor_E).all()
    assert (found.quota_E <= problem.counts_E).all()
    assert problem.pairs - int(found.quota_E.sum()) <= problem.drop_cap


@FEW
@given(spreads(max_ranks=4, max_count=60))
def test_overload_drops_no_more_than_the_network_asks(spread: Spread) -> None:
    wire = 1 + spread.problem.pairs // (2 * spread.problem.topology.ranks)
    problem = dataclasses.replace(spread.problem, wire_rows=wire, drop="overload", peak_target=1.3)
    case = dataclasses.replace(spread, problem=problem)
    try:
        found = wired(case)
    except InfeasibleError:
        assert milp_wired(problem, spread.expert_J, spread.rank_J, wire) is None
        return
    check_legal(problem, found)
    peak, entering = run(case, found)
    best = milp_wired(problem, spread.expert_J, spread.rank_J, wire)
    assert best is not None
    assert entering <= wire
    assert peak <= max(round(best), overload_goal(problem))


@FEW
@given(spreads())
def test_a_network_without_limit_changes_nothing(spread: Spread) -> None:
    wide = dataclasses.replace(spread.problem, wire_rows=max(spread.problem.pairs, 1))
    found, free = wired(dataclasses.replace(spread, problem=wide)), spread.quotas()
    assert np.array_equal(found.quota_E, free.quota_E)
    check(spread, found)


def lognormal(seed: int, **kwargs: object) -> Problem:
    counts = generate("lognormal", ranks=8, experts=32, top_k=4, tokens=2048, seed=seed)[0]
    return Problem(counts_RE=counts, topology=Topology(ranks=8, experts=32), max_drop=0.2, **kwargs)  # type: ignore[arg-type]


def entering_of(problem: Problem, found: LayerPlan) -> np.ndarray:
    expert_J, rank_J = found.instance_expert_J, found.instance_rank_J
    kept_J = found.quota_E if found.backward_J is None else found.backward_J
    over_J = np.maximum(kept_J - own_rows(problem, expert_J, rank_J, found.quota_E), 0)
    return np.bincount(rank_J, over_J, minlength=problem.topology.ranks)


@pytest.mark.parametrize("slots", [0, 2])
def test_a_refusal_names_the_rank_the_rows_the_cap_and_what_works(slots: int) -> None:
    asked = lognormal(2, slots=slots, wire_rows=300)
    with pytest.raises(InfeasibleError) as error:
        get_policy("lrmoe")(asked)
    text = str(error.value)
    assert "wire_rows=300" in text
    assert re.search(r"rank \d+ must take in \d+ rows", text)
    wire = int(re.findall(r"wire_rows of at least (\d+)", text)[0])
    drop = float(re.findall(r"max_drop of at least ([\d.]+)", text)[0])
    assert f"take in {wire} rows" in text
    for change in ({"wire_rows": wire}, {"max_drop": drop}):
        works = dataclasses.replace(asked, **change)
        found = get_policy("lrmoe")(works)
        found.check(works)
        assert entering_of(works, found).max() <= (works.wire_rows or 0)
    for change in ({"wire_rows": wire - 2}, {"max_drop": drop - 0.005}):
        with pytest.raises(InfeasibleError):
            get_policy("lrmoe")(dataclasses.replace(asked, **change))


def test_plans_trade_load_for_wire_as_the_weight_grows() -> None:
    value = {}
    for weight in (0.0, 0.5, 1.2, 2.0):
        asked = lognormal(1, slots=2, wire_weight=weight)
        found = get_policy("lrmoe")(asked)
        found.check(asked)
        value[weight] = (int(found.backward_load_R.max()), int(entering_of(asked, found).max()))
    assert value[0.0][0] <= value[0.5][0] <= value[1.2][0] <= value[2.0][0]
    assert value[2.0][1] < value[0.0][1]
    assert max(value[2.0][0], 2.0 * value[2.0][1]) < max(value[0.0][0], 2.0 * value[0.0][1])


@MODEST
@given(problems(max_ranks=4, max_local=3), st.integers(0, 2), st.sampled_from([None, 0.4, 1.5]))
def test_whole_plans_are_legal_and_repeat(question: Problem, slots: int, weight: float | None) -> None:
    slots = min(slots, question.topology.experts - question.topology.experts_per_rank)
    limits: dict[str, Any] = {"wire_rows": max(1, question.pairs // 3)}
    if weight is not None:
        limits = {"wire_weight": weight}
    asked = dataclasses.replace(question, slots=slots, **limits)
    try:
        found = get_policy("lrmoe")(asked)
    except InfeasibleError:
        assert asked.wire_rows is not None
        return
    found.check(asked)
    assert asked.wire_rows is None or entering_of(asked, found).max() <= asked.wire_rows
    assert found.fingerprint() == get_policy("lrmoe")(dataclasses.replace(asked)).fingerprint()


@pytest.mark.parametrize("weight", [-0.1, math.inf, math.nan])
def test_senseless_weights_are_refused(weight: float) -> None:
    with pytest.raises(PlanError, match="wire_weight="):
        lognormal(0, wire_weight=weight)


@MODEST
@given(st.integers(0, 2**32 - 1))
def test_the_covering_program_equals_linprog(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts, needs = int(rng.integers(1, 12)), int(rng.integers(1, 8))
    table = rng.random((needs, experts)) * (rng.random((needs, experts)) < 0.6)
    upper = rng.integers(0, 20, experts).astype(float)
    covering, need = Covering(upper), np.zeros(0)
    for k in range(needs):
        covering.add(table[k])
        need = np.append(need, rng.uniform(-3, 0.9) * (table[k] @ upper) + 3 * (rng.random() < 0.05))
        for shrink in (1.0, 0.7):  # warm starts with other needs
            found = covering.solve(shrink * need)
            best = linprog(
                np.ones(experts), A_ub=-table[: k + 1], b_ub=-shrink * need, bounds=[(0, u) for u in upper]
            )
            assert (found.short > 0) == (best.status == 2)
            assert found.short > 0 or found.total == pytest.approx(best.fun, abs=1e-6)
