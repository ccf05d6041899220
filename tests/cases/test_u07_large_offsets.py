"""U07: counts, offsets and bytes stay exact beyond 2^31; slots without an expert carry nothing and shift nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.config import POLICIES
from lrmoe.layer.routing import Layout, sort_pairs
from lrmoe.ops.grouped import fits_offsets
from lrmoe.planning import ExpertShape, LayerPlan, Problem, Topology, get_policy, predict_bytes
from lrmoe.planning.memory import call_bytes, split_floor, training_execution
from lrmoe.planning.seats import seats_of
from tests.cases.on_device import NEEDS_CUDA, check_on_device
from tests.layer.harness import exact, pruning, run
from tests.layer.test_property import check
from tests.reference import Case, make_case, plain_loop

WIDE = ExpertShape(hidden=7168, width=2048, element_bytes=2)
FEW = settings(deadline=None, max_examples=60, derandomize=True)
MODES = {
    "exact": exact(),
    "recompute": exact(activations="recompute"),
    "sampled": pruning(max_drop=0.5),
    "topk": pruning(max_drop=0.5, estimator="topk"),
}
HUGE = st.one_of(st.integers(2**31 - 2, 2**31 + 2), st.integers(0, 2**40), st.just(0))


def plan_of(counts: list[int], policy: str = "megatron", max_drop: float = 0.0) -> tuple[Problem, LayerPlan]:
    """One rank's plan of a call with these counts."""
    topology = Topology(ranks=1, experts=len(counts))
    problem = Problem(counts_RE=np.array([counts]), topology=topology, max_drop=max_drop)
    return problem, get_policy(policy)(problem)


@FEW
@given(st.lists(HUGE, min_size=1, max_size=4), st.sampled_from([0.0, 0.25]))
def test_rows_segments_and_bytes_of_huge_calls(counts: list[int], max_drop: float) -> None:
    problem, plan = plan_of(counts, "lrmoe" if max_drop else "megatron", max_drop)
    plan.check(problem)
    assert problem.pairs == sum(counts)
    assert problem.drop_cap == int(max_drop * 4) * sum(counts) // 4
    assert problem.pairs - plan.kept == min(problem.drop_cap, problem.pairs - int(problem.floor_E.sum()))
    seats = seats_of(plan)
    layout = Layout.build(seats.assign_RQ, seats.starts_R, 0, torch.device("cpu"))
    assert (layout.segments_S, layout.received, layout.sent) == (counts, sum(counts), sum(counts))
    kept = int(plan.quota_E.sum())
    parts = predict_bytes(WIDE, plan, 0, training_execution(plan, stash=True))
    norms = 4 * sum(counts) * (kept < sum(counts))
    assert parts["stash"] == sum(counts) * 2 * 2048 * 2 + norms
    assert parts["outputs"] == sum(counts) * 7168 * 2
    assert parts["backward"] == kept * 7168 * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_plans_beyond_32_bits(policy: str) -> None:
    """The case's own counts and width, as two ranks' sources."""
    counts = np.array([[2**31 - 1, 5, 0, 2**31], [2**31 - 1, 2**33, 1, 7]])
    problem = Problem(counts_RE=counts, topology=Topology(ranks=2, experts=4), slots=2)
    plan = get_policy(policy)(problem)
    plan.check(problem)
    assert int(plan.forward_load_R.sum()) == int(plan.backward_load_R.sum()) == int(counts.sum())
    memory = call_bytes(WIDE, plan, training_execution(plan, stash=True))
    rows = [int(n) for n in plan.forward_load_R]
    for rank, received in enumerate(rows):
        assert int(memory.forward["stash"][rank]) == received * 2 * 2048 * 2
        assert int(memory.peak_R[rank]) > received * 7168 * 2


@FEW
@given(st.lists(HUGE, min_size=2, max_size=3), st.lists(HUGE, min_size=2, max_size=3))
def test_shares_of_quotas_are_whole_numbers_of_any_size(first: list[int], second: list[int]) -> None:
    size = min(len(first), len(second))
    counts = np.array([first[:size], second[:size]], dtype=np.int64)
    total = counts.sum(axis=0)
    quota = total // 3
    found = split_floor(quota, counts, total)
    wanted = [
        [int(n) * int(q) // max(int(t), 1) for n, q, t in zip(row, quota, total, strict=True)]
        for row in counts
    ]
    assert found.dtype == np.int64
    assert found.tolist() == wanted


@pytest.mark.parametrize(
    ("counts", "fits"),
    [([2**31 - 1], True), ([2**31], False), ([2**30, 2**30], False), ([0, 5], True), ([], True)],
    ids=str,
)
def test_kernels_with_32_bit_row_offsets_get_no_more_than_those_hold(counts: list[int], fits: bool) -> None:
    assert fits_offsets(counts) is fits


@st.composite
def with_missing_slots(draw: st.DrawFn) -> Case:
    """Some slots without an expert, also all of a token or of a slot; their weights hold nothing sensible."""
    case = make_case(
        tokens=draw(st.sampled_from([1, 4, 9])),
        experts=draw(st.sampled_from([2, 5])),
        top_k=2,
        hidden=6,
        width=5,
        seed=draw(st.integers(0, 99)),
    )
    size = case.ids.numel()
    missing = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    at = torch.tensor(missing).view(case.ids.shape)
    return dataclasses.replace(case, ids=case.ids.masked_fill(at, -1))


@pytest.mark.parametrize("mode", MODES)
@FEW
@given(case=with_missing_slots())
def test_missing_slots_carry_no_load_no_data_and_no_gradient(mode: str, case: Case) -> None:
    missing = case.ids < 0
    loose = dataclasses.replace(
        case,
        weights=case.weights.masked_fill(missing, float("nan")),
        hidden=case.hidden.masked_fill(missing.all(dim=1)[:, None], float("inf")),
    )
    tidy = dataclasses.replace(case, weights=case.weights.masked_fill(missing, 0))
    found, wanted = run(loose, MODES[mode]), run(tidy, MODES[mode])
    assert found.record.pairs == int((~missing).sum())
    assert found.quota_E == wanted.quota_E
    for name in ("out", "d_hidden", "d_weights", "d_gate_up", "d_down"):
        assert torch.equal(getattr(found.result, name), getattr(wanted.result, name)), name
    assert found.result.d_weights is not None
    assert not bool(found.result.d_weights[missing].any())
    torch.testing.assert_close(found.result.out, plain_loop(tidy).out, rtol=1e-10, atol=1e-12)


@FEW
@given(with_missing_slots())
def test_pairs_are_sorted_as_if_the_missing_were_not_there(case: Case) -> None:
    order, counts_E = sort_pairs(case.ids, case.num_experts)
    flat = case.ids.reshape(-1).tolist()
    wanted = sorted((p for p in range(len(flat)) if flat[p] >= 0), key=lambda p: (flat[p], p))
    assert order[: int(counts_E.sum())].tolist() == wanted
    assert counts_E.tolist() == [flat.count(e) for e in range(case.num_experts)]


def test_the_case_of_four_tokens() -> None:
    case = make_case(tokens=4, experts=4, top_k=2)
    ids = case.ids.clone()
    ids[0, 0] = ids[2, 1] = ids[3, 0] = ids[3, 1] = -1
    case = dataclasses.replace(case, ids=ids)
    for config in MODES.values():
        retained = config.replace(router_grad="retained")
        found = run(case, retained)
        exact_grad = plain_loop(case).d_weights
        assert exact_grad is not None
        assert found.result.d_weights is not None
        keep_TK = torch.where(ids < 0, 0.0, found.result.d_weights / exact_grad.masked_fill(ids < 0, 1.0))
        check(case, retained, found.result, found.quota_E, keep_TK)


@NEEDS_CUDA
def test_300000_rows_of_width_7168() -> None:
    check_on_device("U07")
