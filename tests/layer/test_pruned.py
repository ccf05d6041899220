"""A pruned backward equals the reference with the same kept set, and keeps the right set."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lrmoe.config import SCORES
from tests.layer.harness import kept, pruning, run
from tests.reference import Case, assert_result, counts, inclusion_TK, make_case, scores, top_pairs

CASE = make_case(tokens=60, experts=8, top_k=3, seed=1)


def kept_per_expert(keep_TK: torch.Tensor, case: Case) -> list[int]:
    return [int(((case.ids == e) & (keep_TK > 1e-9)).sum()) for e in range(case.num_experts)]


@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("router_grad", ["full", "retained"])
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
@pytest.mark.parametrize("score", SCORES)
def test_equals_the_reference(score: str, estimator: str, router_grad: str, activations: str) -> None:
    config = pruning(
        max_drop=0.4,
        score=score,
        estimator=estimator,
        router_grad=router_grad,
        activations=activations,
        seed=3,
    )
    keep_TK = kept(CASE, config)
    found = run(CASE, config)
    assert kept_per_expert(keep_TK, CASE) == found.quota_E
    assert sum(found.quota_E) == found.record.kept == 180 - 72
    assert_result(found.result, CASE, keep_TK=keep_TK, router_grad=router_grad)


@pytest.mark.parametrize("score", [s for s in SCORES if s != "random"])
def test_topk_keeps_the_highest_scores(score: str) -> None:
    config = pruning(max_drop=0.4, score=score, estimator="topk")
    keep_TK = kept(CASE, config)
    quota_E = run(CASE, config).quota_E
    torch.testing.assert_close(keep_TK, top_pairs(scores(CASE, score), CASE.ids, quota_E), rtol=0, atol=1e-9)


@pytest.mark.parametrize("score", SCORES)
def test_sampled_weighs_a_kept_pair_by_one_over_its_probability(score: str) -> None:
    config = pruning(max_drop=0.4, score=score, seed=9)
    keep_TK = kept(CASE, config)
    pi_TK = inclusion_TK(scores(CASE, score), CASE.ids, run(CASE, config).quota_E)
    chosen = keep_TK > 1e-9
    torch.testing.assert_close(keep_TK[chosen], 1 / pi_TK[chosen], rtol=1e-3, atol=0)
    certain = keep_TK[pi_TK > 1 - 1e-9]
    torch.testing.assert_close(certain, torch.ones_like(certain), rtol=1e-6, atol=0)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_other_activations(activation: str) -> None:
    case = dataclasses.replace(CASE, activation=activation)
    config = pruning(max_drop=0.5)
    assert_result(run(case, config).result, case, keep_TK=kept(case, config), router_grad="retained")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_low_precision(dtype: torch.dtype, estimator: str) -> None:
    case = CASE.to(dtype)
    # Forward-known scores choose the same set in every dtype; weights are then the float64 run's.
    config = pruning(max_drop=0.4, score="alpha", estimator=estimator, router_grad="full")
    wide = case.to(torch.float64)
    assert_result(run(case, config).result, case, keep_TK=kept(wide, config), router_grad="full")


@pytest.mark.parametrize("score", ["lrm", "grad_norm", "alpha_phi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_in_low_precision_by_the_set_it_kept_itself(dtype: torch.dtype, score: str) -> None:
    case = CASE.to(dtype)
    config = pruning(max_drop=0.4, score=score, estimator="topk", router_grad="retained")
    found = run(case, config)
    assert found.result.d_weights is not None
    keep_TK = (found.result.d_weights != 0).double()
    assert kept_per_expert(keep_TK, case) == found.quota_E
    assert_result(found.result, case, keep_TK=keep_TK, router_grad="retained")
    wanted = top_pairs(scores(case, score), case.ids, found.quota_E)
    assert int((keep_TK != wanted).sum()) <= (0 if dtype == torch.float32 else 8), (
        "bf16 may swap close scores"
    )


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_checkpointing_changes_nothing(checkpoint: str, estimator: str) -> None:
    config = pruning(max_drop=0.4, estimator=estimator)
    plain, replayed = run(CASE, config), run(CASE, config, checkpoint=checkpoint)
    for name in ("out", "d_hidden", "d_weights", "d_gate_up", "d_down"):
        assert torch.equal(getattr(plain.result, name), getattr(replayed.result, name)), name


def test_an_expert_keeps_min_keep_and_no_more_than_it_has() -> None:
    few = make_case(tokens=30, experts=10, top_k=2, skew=2.5, seed=2)
    config = pruning(max_drop=0.9, min_keep=4)
    found = run(few, config)
    n_E = counts(few.ids, 10).tolist()
    assert min(n for n in n_E if n) < 4
    assert all(min(n, 4) <= q <= n for q, n in zip(found.quota_E, n_E, strict=True))
    keep_TK = kept(few, config)
    assert kept_per_expert(keep_TK, few) == found.quota_E


def test_topk_with_min_keep_zero_may_leave_an_expert_without_any() -> None:
    config = pruning(max_drop=0.97, min_keep=0, estimator="topk")
    found = run(CASE, config)
    assert 0 in found.quota_E
    assert_result(found.result, CASE, keep_TK=kept(CASE, config), router_grad="full")
    idle = found.quota_E.index(0)
    assert found.result.d_down is not None
    assert torch.equal(found.result.d_down[idle], torch.zeros_like(found.result.d_down[idle]))


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_pairs_without_expert_and_doubled_pairs(estimator: str) -> None:
    ids = CASE.ids.clone()
    ids[::7, 1], ids[3::7, 2] = -1, CASE.num_experts
    ids[1::7] = ids[1::7, :1]
    case = dataclasses.replace(CASE, ids=ids)
    config = pruning(max_drop=0.4, estimator=estimator, router_grad="full")
    found = run(case, config)
    keep_TK = kept(case, config)
    assert kept_per_expert(keep_TK, case) == found.quota_E
    assert_result(found.result, case, keep_TK=keep_TK)


def test_zero_gradients_leave_zeros_and_the_quota_holds() -> None:
    case = dataclasses.replace(CASE, grad_out=torch.zeros_like(CASE.grad_out))
    for estimator in ("topk", "sampled"):
        found = run(case, pruning(max_drop=0.4, estimator=estimator))
        assert found.record.kept == 108
        assert_result(found.result, case)


def test_local_and_global_selection_agree_on_one_device() -> None:
    for estimator in ("topk", "sampled"):
        config = pruning(max_drop=0.4, estimator=estimator)
        assert torch.equal(kept(CASE, config), kept(CASE, config.replace(selection="local")))
