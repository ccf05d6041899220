"""The budget ladder: each rung by a small example, and the final error with its numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lrmoe.errors import InfeasibleError, PlanError
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.ladder import climb
from lrmoe.planning.placement import place

MODEST = settings(deadline=None, max_examples=300, derandomize=True)


def ask(loads: list[int] | np.ndarray, **kwargs: object) -> Problem:
    """One expert per rank unless `ranks` says otherwise; every source sends from rank 0."""
    ranks = int(kwargs.pop("ranks", len(loads)))  # type: ignore[call-overload]
    counts = np.zeros((ranks, len(loads)), dtype=np.int64)
    counts[0] = loads
    topology = Topology(ranks=ranks, experts=len(loads))
    return Problem(counts_RE=counts, topology=topology, **kwargs)  # type: ignore[arg-type]


def plan(problem: Problem) -> LayerPlan:
    answer = get_policy("lrmoe")(problem)
    answer.check(problem)
    return answer


def test_the_worked_example_needs_a_replica_before_selection_and_none_after() -> None:
    before, after = ask([4, 2, 3], slots=1, budget_rows=3), ask([3, 1, 2], slots=1, budget_rows=3)
    assert place(before, level=3).replicas_R.sum() == 1
    assert place(before, level=3).load_R.tolist() == [3, 3, 3]
    assert place(after, level=3).replicas_R.sum() == 0
    both = [
        plan(ask(loads, slots=1, budget_rows=3, drop="overload", peak_target=2.0))
        for loads in ([4, 2, 3], [3, 1, 2])
    ]
    assert [int(one.replicas_R.sum()) for one in both] == [1, 0]
    assert all(one.exact and one.forward_chunks == one.backward_chunks == 1 for one in both)


def test_rung_0_nothing_is_done_where_everything_fits() -> None:
    found = plan(ask([4, 2, 3], budget_rows=4, max_drop=0.5, drop="overload", peak_target=9.0))
    assert found.exact
    assert found.reason == "off"
    assert (found.forward_chunks, found.backward_chunks, found.recompute) == (1, 1, False)


def test_rung_2_backward_drops_the_deficiency_and_forward_is_chunked() -> None:
    found = plan(ask([4, 2, 3], budget_rows=3, max_drop=0.5, drop="overload", peak_target=9.0))
    assert found.pairs - found.kept == 1
    assert found.reason == "budget"
    assert found.backward_load_R.tolist() == [3, 2, 3]
    assert (found.forward_chunks, found.backward_chunks) == (2, 1)


def test_rung_3_recompute_comes_before_chunks() -> None:
    found = plan(ask([8, 2, 3], budget_rows=3, recompute_rows=8))
    assert found.recompute
    assert (found.forward_chunks, found.backward_chunks) == (1, 1)


def test_rung_4_rows_are_cut_evenly() -> None:
    found = plan(ask([10, 2, 3], budget_rows=3))
    assert (found.forward_chunks, found.backward_chunks, found.recompute) == (4, 4, False)


def test_the_trap_forward_stays_complete_below_one_mean_load() -> None:
    found = plan(ask([3, 3, 3], budget_rows=2, max_drop=0.5))
    assert found.backward_load_R.max() <= 2
    assert (found.forward_chunks, found.backward_chunks) == (2, 1)


def test_replicas_give_way_where_their_room_would_cost_chunks() -> None:
    found = plan(ask([8, 0, 0], slots=2, budget_rows=4, replica_rows=4))
    assert found.replicas_R.sum() == 0
    assert found.forward_chunks == 2


def test_rung_5_the_error_names_every_number() -> None:
    problem = ask([100, 20, 30], budget_rows=3, max_chunks=4, max_drop=0.2)
    with pytest.raises(InfeasibleError) as caught:
        plan(problem)
    text = str(caught.value)
    for part in (
        "rank 0 needs 100 rows",
        "3 are available",
        "4 chunks",
        "30 of 150 pairs",
        "smallest budget is 25",
    ):
        assert part in text
    largest = int(re.findall(r"largest micro-batch has (\d+) pairs", text)[0])
    assert largest == 18
    plan(ask([100, 20, 30], budget_rows=25, max_chunks=4))
    plan(ask([12, 2, 3], budget_rows=3, max_chunks=4))


@pytest.mark.parametrize(
    ("field", "value"), [("budget_rows", 0), ("recompute_rows", 0), ("max_chunks", 0), ("replica_rows", -1)]
)
def test_senseless_budgets_are_refused(field: str, value: int) -> None:
    with pytest.raises(PlanError, match=f"{field}={value}"):
        ask([4, 2, 3], **{field: value})


@MODEST
@example(740606353, 40, 60, 30, "overload", 3)  # a rank full of replicas must not get more rows in backward
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 200),
    st.sampled_from([None, 60, 150]),
    st.sampled_from([0, 2, 30]),
    st.sampled_from(["always", "overload"]),
    st.sampled_from([1, 3, 64]),
)
def test_every_plan_fits_its_budget_or_none_is_made(
    seed: int, budget: int, lean: int | None, charge: int, drop: str, parts: int
) -> None:
    rng = np.random.default_rng(seed)
    loads = rng.poisson(30 * rng.lognormal(0, 1, 8))
    problem = ask(
        loads,
        ranks=4,
        slots=int(rng.integers(0, 3)),
        budget_rows=budget,
        recompute_rows=lean,
        replica_rows=charge,
        max_chunks=parts,
        max_drop=0.3,
        drop=drop,
        peak_target=1.5,
    )
    fixed_R = loads.reshape(4, 2).sum(axis=1)
    try:
        found = plan(problem)
    except InfeasibleError:
        none_R = np.zeros(4, dtype=np.int64)
        with pytest.raises(InfeasibleError):
            climb(problem, none_R, fixed_R, fixed_R)
        return
    rows = max(budget, lean or 0) if found.recompute else budget
    charged_R = charge * found.replicas_R
    assert (-(-found.forward_load_R // found.forward_chunks) + charged_R).max() <= rows
    assert (-(-found.backward_load_R // found.backward_chunks) + charged_R).max() <= rows
    assert max(found.forward_chunks, found.backward_chunks) <= parts


def test_the_summary_names_the_highest_rung() -> None:
    none = np.zeros(3, dtype=np.int64)
    load = np.array([4, 2, 3])
    assert climb(ask([4, 2, 3]), none, load, load).highest == 0
    assert climb(ask([4, 2, 3], budget_rows=4), none + 1, load, load).highest == 1
    assert climb(ask([4, 2, 3], budget_rows=4), none, load, load - 1).highest == 2
    assert climb(ask([4, 2, 3], budget_rows=3, recompute_rows=9), none, load, load).highest == 3
    assert climb(ask([4, 2, 3], budget_rows=3), none, load, load).highest == 4
