"""Fitting a plan into bytes: every rung by an example, then as a guarantee over random calls."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.errors import InfeasibleError
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.fit import Fitted, fit
from lrmoe.planning.problem import IntArray

MODEST = settings(deadline=None, max_examples=100, derandomize=True)
WEIGHTS, REPLICA, SAVED, ROW = 100, 20, 6, 6


def price(plan: LayerPlan) -> tuple[IntArray, IntArray]:
    """A little memory model: weights, replicas, what is saved of every row, and transients of a chunk."""
    keeps = 0 if plan.recompute or plan.forward_chunks > 1 else SAVED
    fixed = WEIGHTS + REPLICA * plan.replicas_R + keeps * plan.forward_load_R
    forward = fixed + ROW * -(-plan.forward_load_R // plan.forward_chunks)
    return forward, fixed + 2 * ROW * -(-plan.backward_load_R // plan.backward_chunks)


def ask(loads: list[int], **kwargs: object) -> Problem:
    """One expert per rank; every pair is sent from rank 0."""
    counts = np.zeros((len(loads), len(loads)), dtype=np.int64)
    counts[0] = loads
    topology = Topology(ranks=len(loads), experts=len(loads))
    return Problem(counts_RE=counts, topology=topology, **kwargs)  # type: ignore[arg-type]  # any fields


def fitted(problem: Problem, budget: int | None, policy: str = "lrmoe", **kwargs: object) -> Fitted:
    options = {"adapts": policy == "lrmoe", **kwargs}
    found = fit(problem, get_policy(policy), price, budget, **options)  # type: ignore[arg-type]
    found.plan.check(problem)
    forward_R, backward_R = price(found.plan)
    assert (forward_R.tolist(), backward_R.tolist()) == (found.forward_R.tolist(), found.backward_R.tolist())
    return found


def means(one: Fitted) -> tuple[bool, int, int]:
    """Whether nothing is saved, and the chunks."""
    return one.plan.recompute, one.plan.forward_chunks, one.plan.backward_chunks


def test_without_a_budget_or_where_it_fits_the_plan_is_the_policys_own() -> None:
    problem = ask([40, 20, 30], slots=1)
    own = get_policy("lrmoe")(problem)
    need = fitted(problem, None).need
    for budget in (None, need):
        one = fitted(problem, budget)
        assert one.plan.fingerprint() == own.fingerprint()
        assert means(one) == (False, 1, 1)


def test_replicas_are_placed_where_they_lower_the_bytes_and_not_where_they_cost_more() -> None:
    skewed, level = ask([60, 20, 10], slots=1, replica_rows=2), ask([31, 30, 29], slots=1, replica_rows=2)
    assert fitted(skewed, 100 + 20 + 18 * 35).plan.replicas_R.any()
    own = fitted(level, None)
    assert own.plan.replicas_R.any()
    tight = fitted(level, own.need - 1)
    assert not tight.plan.replicas_R.any()
    assert means(tight) == (False, 1, 1)


def test_backward_drops_only_the_deficiency() -> None:
    problem = ask([40, 20, 30], max_drop=0.5, drop="overload", peak_target=9.0)
    assert fitted(problem, 100 + 6 * 40 + 12 * 40).plan.exact
    one = fitted(problem, 100 + 6 * 40 + 12 * 33)
    assert one.plan.backward_load_R.tolist() == [33, 20, 30]
    assert one.plan.reason == "budget"
    assert means(one) == (False, 1, 1)


def test_one_rank_drops_for_its_budget_too() -> None:
    problem = ask([40], max_drop=0.5, drop="overload")
    assert fitted(problem, None).plan.exact
    assert fitted(problem, 100 + 6 * 40 + 12 * 30).plan.kept == 30


def test_what_may_not_be_dropped_is_recomputed_first_and_then_chunked() -> None:
    problem = ask([40, 20, 30])
    assert means(fitted(problem, 100 + 6 * 40 + 12 * 40 - 1)) == (True, 1, 1)
    assert means(fitted(problem, 100 + 12 * 40)) == (True, 1, 1)
    assert means(fitted(problem, 100 + 12 * 40 - 1)) == (True, 1, 2)
    assert means(fitted(problem, 100 + 12 * 10)) == (True, 2, 4)


def test_a_chunked_forward_still_has_its_backward_dropped_to_fit() -> None:
    problem = ask([40, 20, 30], max_drop=0.5, drop="overload", peak_target=9.0)
    one = fitted(problem, 100 + 12 * 18)
    assert means(one) == (True, 2, 1)
    assert one.plan.backward_load_R.tolist() == [18, 18, 18]


def test_saving_is_as_the_user_asked() -> None:
    problem = ask([40, 20, 30])
    assert means(fitted(problem, 10**6, activations="recompute"))[0]
    stashed = fitted(problem, 100 + 6 * 40 + 12 * 20, activations="stash")
    assert means(stashed) == (False, 1, 2)


def test_other_systems_keep_their_plan_and_may_chunk_it() -> None:
    problem = ask([40, 20, 30], slots=1)
    own = get_policy("megatron")(problem)
    one = fitted(problem, 100 + 12 * 10, "megatron")
    assert means(one) == (True, 2, 4)
    plain = replace(one.plan, recompute=False, forward_chunks=1, backward_chunks=1)
    assert plain.fingerprint() == own.fingerprint()


def test_the_error_has_the_numbers_and_its_budget_is_the_smallest() -> None:
    problem = ask([40, 20, 30], max_chunks=4, max_drop=0.25)
    with pytest.raises(InfeasibleError) as caught:
        fitted(problem, 120)
    message = str(caught.value)
    assert message.startswith("layer_budget: rank 0 needs ")
    for part in (
        "120 (0.0 MiB) are available",
        "22 of 90 pairs",
        "4 chunks in forward, 4 in backward",
        "micro-batch has about ",
    ):
        assert part in message
    smallest = caught.value.smallest
    assert f"smallest budget is {smallest} bytes (0.0 MiB) a rank" in message
    assert smallest is not None
    assert fitted(problem, smallest).need == smallest
    with pytest.raises(InfeasibleError):
        fitted(problem, smallest - 1)


def test_a_refusal_predicts_a_plan_and_a_way_to_run_it_hardly_twice() -> None:
    problem = ask([4001, 2003, 3007], slots=1, replica_rows=2, max_drop=0.3, drop="overload")
    asked: list[LayerPlan] = []

    def counted(plan: LayerPlan) -> tuple[IntArray, IntArray]:
        asked.append(plan)  # and kept, so that ids stay apart
        return price(plan)

    with pytest.raises(InfeasibleError):
        fit(problem, get_policy("lrmoe"), counted, 120, adapts=True)
    ways = {(id(p.assign_RJ), p.recompute, p.forward_chunks, p.backward_chunks) for p in asked}
    assert len(asked) <= 1.1 * len(ways), "the search for the smallest budget asks again what it knows"


def test_the_micro_batch_of_the_error_fits() -> None:
    problem = ask([400, 200, 300], max_chunks=4)
    with pytest.raises(InfeasibleError, match="micro-batch has about") as caught:
        fitted(problem, 700)
    pairs = int(re.search(r"about (\d+) pairs", str(caught.value))[1])  # type: ignore[index]
    assert 0 < pairs < 900
    assert fitted(ask([400 * pairs // 900, 200 * pairs // 900, 300 * pairs // 900], max_chunks=4), 700)


@st.composite
def calls(draw: st.DrawFn) -> Problem:
    ranks = draw(st.sampled_from([1, 2, 4]))
    experts = ranks * draw(st.sampled_from([1, 3]))
    flat = draw(st.lists(st.integers(0, 60), min_size=ranks * experts, max_size=ranks * experts))
    topology = Topology(ranks=ranks, experts=experts)
    return Problem(
        counts_RE=np.array(flat, dtype=np.int64).reshape(ranks, experts),
        topology=topology,
        slots=min(draw(st.integers(0, 2)), experts - experts // ranks),
        max_drop=draw(st.sampled_from([0.0, 0.3, 0.8])),
        drop=draw(st.sampled_from(["always", "overload"])),
        replica_rows=draw(st.integers(0, 4)),
        max_chunks=draw(st.sampled_from([1, 4, 64])),
    )


@MODEST
@given(calls(), st.integers(1, 3000), st.sampled_from(["auto", "stash", "recompute"]))
def test_what_is_accepted_fits_and_what_is_refused_has_a_smallest_budget(
    problem: Problem, budget: int, activations: str
) -> None:
    try:
        one = fitted(problem, budget, activations=activations)
    except InfeasibleError as error:
        smallest = error.smallest
        assert smallest is not None
        assert smallest > budget
        assert fitted(problem, smallest, activations=activations).need <= smallest
        with pytest.raises(InfeasibleError):
            fitted(problem, smallest - 1, activations=activations)
    else:
        assert one.need <= budget
        again = fitted(problem, budget, activations=activations)
        assert again.plan.fingerprint() == one.plan.fingerprint()


@MODEST
@given(calls(), st.integers(100, 3000))
def test_a_larger_budget_needs_no_more_chunks(problem: Problem, budget: int) -> None:
    try:
        small = fitted(problem, budget)
    except InfeasibleError:
        return
    large = fitted(problem, 2 * budget)
    assert large.plan.forward_chunks <= small.plan.forward_chunks
    assert large.plan.backward_chunks <= max(small.plan.backward_chunks, 1)
