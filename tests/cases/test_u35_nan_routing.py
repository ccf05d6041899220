"""U35: NaN and infinite router logits never become an index out of range, and touch no other token."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.distributed.calls import spread
from tests.distributed.pool import Pool
from tests.layer.harness import exact, pruning, run
from tests.reference import Case, make_case, plain_loop

BAD = [0, 1, 2]  # NaN logits, a +inf among them, all -inf


def routed_case(tokens: int = 4) -> Case:
    """T=4, E=4, k=2 through softmax and top-k, as a block would: the bad tokens' weights come out NaN."""
    case = make_case(tokens=tokens, experts=4, top_k=2)
    logits = torch.randn(tokens, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[0, 1], logits[1, 2], logits[2] = float("nan"), float("inf"), float("-inf")
    top = torch.topk(torch.softmax(logits, dim=-1), 2, dim=-1)
    assert bool(top.values[BAD].isnan().any(dim=1).all())
    return dataclasses.replace(case, ids=top.indices, weights=top.values)


def without_bad(case: Case) -> Case:
    """The case with the bad tokens' pairs routed nowhere."""
    ids, weights = case.ids.clone(), case.weights.clone()
    ids[BAD], weights[BAD] = -1, 0.0
    return dataclasses.replace(case, ids=ids, weights=weights)


def test_the_bad_tokens_show_it_and_the_others_do_not_feel_it() -> None:
    case = routed_case()
    found = run(case, exact())
    good = [3]
    truth = plain_loop(without_bad(case))
    assert found.record.pairs == 8
    assert bool(found.result.out[BAD].isnan().all(dim=1).all())
    torch.testing.assert_close(found.result.out[good], truth.out[good], rtol=1e-10, atol=1e-12)
    for name in ("d_hidden", "d_weights"):
        torch.testing.assert_close(
            getattr(found.result, name)[good], getattr(truth, name)[good], rtol=1e-10, atol=1e-12
        )
    touched = set(case.ids[BAD].flatten().tolist())
    for name in ("d_gate_up", "d_down"):
        for expert in set(range(4)) - touched:
            torch.testing.assert_close(getattr(found.result, name)[expert], getattr(truth, name)[expert])


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_nan_scores_are_counted_and_displace_finite_ones_only_within_the_quota(estimator: str) -> None:
    case = routed_case(tokens=40)
    found = run(case, pruning(max_drop=0.5, estimator=estimator, router_grad="retained"))
    assert found.record.nonfinite_scores == 6
    assert found.record.kept == 40
    assert found.quota_E == run(make_like(case), pruning(max_drop=0.5)).quota_E
    assert found.result.d_hidden is not None
    good = [t for t in range(40) if t not in BAD]
    assert bool(found.result.d_hidden[good].isfinite().all())
    assert bool(found.result.d_hidden[BAD].isnan().any(dim=1).all()), "an overflow must not vanish"


def make_like(case: Case) -> Case:
    """The same routing with finite weights: counts and quotas must be the same."""
    return dataclasses.replace(case, weights=case.weights.nan_to_num(0.5))


@pytest.mark.parametrize("ids", [[-1, -1], [4, 5], [-(2**63), 2**63 - 1], [2**32, 2**31]], ids=str)
def test_ids_far_out_of_range_are_no_expert(ids: list[int]) -> None:
    case = make_case(tokens=4, experts=4, top_k=2)
    table = case.ids.clone()
    table[1] = torch.tensor(ids)
    case = dataclasses.replace(case, ids=table)
    found = run(case, exact())
    assert found.record.pairs == 6
    assert torch.equal(found.result.out[1], torch.zeros(16, dtype=torch.float64))
    torch.testing.assert_close(found.result.out, plain_loop(case).out, rtol=1e-10, atol=1e-12)


@pytest.mark.distributed
def test_two_ranks(pool2: Pool) -> None:
    case = routed_case()
    found = spread(pool2, case, exact())
    truth = plain_loop(without_bad(case))
    torch.testing.assert_close(found.result.out[3:], truth.out[3:], rtol=1e-10, atol=1e-12)
    assert found.result.d_hidden is not None
    assert truth.d_hidden is not None
    torch.testing.assert_close(found.result.d_hidden[3:], truth.d_hidden[3:], rtol=1e-10, atol=1e-12)
