"""What a call's scores teach: sums over all rows of small experts, over every k-th row of large ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from lrmoe.layer.learned import _ROWS, Learned, score_sums
from lrmoe.planning.score_bins import ScoreHistory
from tests.layer.harness import build, forward, leaves, pruning, run
from tests.layer.test_fidelity import BASE, records
from tests.reference import GRADS


def lognormal(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, generator=torch.Generator().manual_seed(seed)).exp()


def test_small_experts_are_read_whole() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, torch.nan, 8.0])
    sums = score_sums(scores, torch.tensor([3, 0, 2]))
    assert sums[:, :3].tolist() == [[3.0, 6.0, 14.0], [0.0, 0.0, 0.0], [1.0, 8.0, 64.0]]


def test_large_experts_are_read_in_steps_and_small_ones_beside_them_whole() -> None:
    counts = torch.tensor([10 * _ROWS + 7, 5, 0, _ROWS])
    scores = torch.cat([lognormal(int(n), e) for e, n in enumerate(counts)])
    sums = score_sums(scores, counts)
    assert sums[0, 0] == pytest.approx(float(counts[0]), rel=1e-3), "every read row stands for k"
    assert sums[1, 1] == pytest.approx(scores[counts[0] :][:5].double().sum().item(), rel=1e-12)
    assert sums[2].abs().max() == 0
    assert sums[3, 0] == _ROWS
    assert sums[0, 1] == pytest.approx(scores[: counts[0]].double().sum().item(), rel=0.06)


def test_the_histogram_of_a_large_expert_is_that_of_all_its_rows() -> None:
    scores = lognormal(40 * _ROWS, 3)
    some = ScoreHistory.from_sums(score_sums(scores, torch.tensor([scores.shape[0]])).numpy())
    parts = torch.full((40,), _ROWS)
    every = score_sums(scores, parts).sum(0, keepdim=True).numpy()
    whole = ScoreHistory.from_sums(every)
    assert some is not None
    assert whole is not None
    assert np.abs(some.bins_EB2[0, :, 0] - whole.bins_EB2[0, :, 0]).max() < 0.03


def test_the_default_device_does_not_matter() -> None:
    scores, counts = lognormal(3 * _ROWS, 1), torch.tensor([3 * _ROWS])
    plain = score_sums(scores, counts)
    with torch.device("meta"):
        assert torch.equal(score_sums(scores, counts), plain)


def test_one_overflow_does_not_end_pruning() -> None:
    """More non-finite scores than the quota holds: other pairs' weights are then about 1e10."""
    config = pruning(max_drop=0.8, max_added_variance=0.1)
    layer = build(BASE, config)
    before = records(layer, config, range(10))[-1].kept
    grad = torch.where(torch.arange(160)[:, None] % 3 == 0, torch.inf, BASE.grad_out)
    grad[1::3] = torch.nan
    broken = run(dataclasses.replace(BASE, grad_out=grad), config, layer=layer).record
    assert broken.nonfinite_scores > broken.kept
    after = records(layer, config, range(9, 12))
    assert all(r.kept <= before + 0.1 * r.pairs for r in after)


def test_a_call_without_a_prediction_leaves_none_of_those_sent_with_it() -> None:
    learned, one = Learned(2, 1, own=False), torch.tensor(1.0, dtype=torch.float64)
    learned.book(one, one, 0.25)
    learned.book(one, one, 0.5)
    assert (learned.calls, learned.predicted) == (2, 0.75)
    learned.book(one, one, None)
    learned.book(one, one, 0.5)
    assert (learned.calls, learned.predicted) == (4, None)
    learned.sent()
    assert (learned.calls, learned.predicted) == (0, 0.0)


def test_evaluation_neither_takes_nor_pushes_out_what_is_timed() -> None:
    config = pruning(max_drop=0.6, drop="auto", warmup_steps=6)
    layer = build(BASE, config)
    for _ in range(8):
        leaf = leaves(BASE, GRADS)
        out = forward(layer, BASE, leaf)
        for _ in range(5):
            forward(layer, BASE, leaves(BASE, []), training=False)
        out.backward(BASE.grad_out)
        forward(layer, BASE, leaves(BASE, []), training=False)
        layer.clock.advance()
    auto = layer.controller.drops.auto
    assert auto is not None
    assert auto.frozen
    assert auto.calls == 6


def test_past_scores_fade_by_a_tenth_and_calls_without_any_change_nothing() -> None:
    learned, counts = Learned(2, 1, own=False), torch.tensor([10, 0])
    for _ in range(2):
        learned.learn(torch.ones(10), counts)
    assert learned.sums_XF[:, 0].tolist() == [19.0, 0.0]
    for nothing in (torch.zeros(10), torch.full((10,), torch.nan)):
        learned.learn(nothing, counts)
    assert learned.sums_XF[:, :2].tolist() == [[19.0, 19.0], [0.0, 0.0]]
