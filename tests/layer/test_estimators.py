"""The sampled estimator: unbiased, better than uniform, non-finite scores first; the topk rule: ties in order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lrmoe.config import FORWARD_SCORES, SCORES
from tests.layer.harness import build, forward, kept, leaves, pruning, run
from tests.reference import GRADS, Case, make_case, plain_loop

DRAWS = 300
PROJECTIONS = 16
SMALL = make_case(tokens=32, experts=4, top_k=2, hidden=8, width=6, seed=4)


def draws(case: Case, *, score: str, count: int = DRAWS, **fields: object) -> dict[str, Tensor]:
    """Gradients of `count` independent draws of the kept set, one per optimizer step, (count, entries) by name."""
    config = pruning(max_drop=0.5, score=score, seed=11, **fields)
    found: dict[str, list[Tensor]] = {n: [] for n in GRADS}
    for step in range(count):
        layer = build(case, config)  # a fresh one: its quotas do not depend on the scores of earlier draws
        layer.clock.step = step
        leaf = leaves(case, GRADS)
        forward(layer, case, leaf).backward(case.grad_out)
        for n in GRADS:
            grad = leaf[n].grad
            assert grad is not None
            found[n].append(grad.reshape(-1))
    return {n: torch.stack(rows) for n, rows in found.items()}


@pytest.fixture(scope="module")
def by_lrm() -> dict[str, Tensor]:
    return draws(SMALL, score="lrm")


@pytest.fixture(scope="module")
def uniform() -> dict[str, Tensor]:
    return draws(SMALL, score="random")


def assert_unbiased(samples: dict[str, Tensor], case: Case) -> None:
    exact = plain_loop(case)
    for name, rows in samples.items():
        truth = getattr(exact, name).reshape(-1)
        gen = torch.Generator().manual_seed(len(truth))
        directions = torch.randn(len(truth), PROJECTIONS, generator=gen, dtype=torch.float64)
        error = (rows - truth) @ directions
        standard_error = error.std(dim=0) / len(rows) ** 0.5
        assert bool((standard_error > 0).all()), f"{name}: nothing was sampled"
        off = (error.mean(dim=0) / standard_error).abs()
        assert float(off.max()) < 4, (
            f"{name}: a projection of the mean is {float(off.max()):.1f} standard errors off"
        )


def test_sampled_by_lrm_is_unbiased(by_lrm: dict[str, Tensor]) -> None:
    assert_unbiased(by_lrm, SMALL)


def test_sampled_uniformly_is_unbiased(uniform: dict[str, Tensor]) -> None:
    assert_unbiased(uniform, SMALL)


@pytest.mark.parametrize(
    "fields",
    [
        *({"score": score} for score in SCORES if score not in ("lrm", "random")),
        *({"score": score, "select_in": "forward"} for score in FORWARD_SCORES),
        {"score": "lrm", "selection": "local"},
    ],
    ids=lambda fields: "-".join(fields.values()),
)
def test_sampled_is_unbiased_with_other_settings(fields: dict[str, str]) -> None:
    assert_unbiased(draws(SMALL, count=200, **fields), SMALL)


def test_sampling_by_lrm_varies_less_than_uniform_sampling(
    by_lrm: dict[str, Tensor], uniform: dict[str, Tensor]
) -> None:
    """At the same quotas: neither side has a score history that could move them."""
    exact = plain_loop(SMALL)
    for name in ("d_down", "d_gate_up"):
        truth = getattr(exact, name).reshape(-1)
        ours, plain = (float((rows - truth).pow(2).sum(1).mean()) for rows in (by_lrm[name], uniform[name]))
        assert ours < 0.8 * plain, f"{name}: {ours:.3g} against {plain:.3g}"


def test_topk_is_biased_on_the_same_case() -> None:
    """The check above can fail: the published rule does not pass it."""
    config = pruning(max_drop=0.5, estimator="topk")
    gap = run(SMALL, config).result.d_down - plain_loop(SMALL).d_down  # type: ignore[operator]
    assert float(gap.norm()) > 0.01 * float(plain_loop(SMALL).d_down.norm())  # type: ignore[union-attr]


def test_ties_go_to_the_earlier_token_and_slot() -> None:
    case = make_case(tokens=10, experts=2, top_k=2)
    case = dataclasses.replace(
        case,
        hidden=case.hidden[:1].repeat(10, 1),
        weights=torch.full((10, 2), 0.5, dtype=torch.float64),
        grad_out=case.grad_out[:1].repeat(10, 1),
    )
    for score in ("lrm", "grad_norm", "alpha"):
        config = pruning(max_drop=0.5, estimator="topk", score=score)
        keep_TK = kept(case, config)
        quota_E = run(case, config).quota_E
        assert sum(quota_E) == 10
        for expert in range(2):
            tokens = torch.nonzero((case.ids == expert) & (keep_TK > 0))[:, 0]
            assert tokens.tolist() == list(range(quota_E[expert]))


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), float("-inf")])
def test_non_finite_scores_are_kept_first_and_counted(bad: float, estimator: str) -> None:
    case = make_case(tokens=40, experts=2, top_k=1, seed=6)
    grad = case.grad_out.clone()
    poisoned = [3, 17, 31]
    grad[poisoned, 2] = bad
    case = dataclasses.replace(case, grad_out=grad)
    config = pruning(max_drop=0.6, estimator=estimator, router_grad="retained")
    found = run(case, config)
    assert found.record.nonfinite_scores == 3
    assert found.record.kept == 16
    d_weights = found.result.d_weights
    assert d_weights is not None
    assert not bool(d_weights[poisoned].isfinite().any()), "an overflow must reach the gradients"
    healthy = torch.ones(40, dtype=torch.bool)
    healthy[poisoned] = False
    assert int((d_weights[healthy] != 0).sum()) == 16 - 3
    assert bool(d_weights[healthy].isfinite().all())


def test_more_non_finite_scores_than_the_quota_keep_the_quota() -> None:
    case = make_case(tokens=20, experts=1, top_k=1, seed=6)
    case = dataclasses.replace(case, grad_out=torch.full_like(case.grad_out, float("inf")))
    for estimator in ("topk", "sampled"):
        found = run(case, pruning(max_drop=0.5, estimator=estimator))
        assert found.record.nonfinite_scores == 20
        assert found.record.kept == 10
