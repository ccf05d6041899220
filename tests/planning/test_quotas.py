"""Filling quotas by weight, and splitting them over sources."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.planning import fewest_drops, fill, split_quota

MODEST = settings(deadline=None, max_examples=150, derandomize=True)


def clamped_constant(total: int, weight: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """clip(c * weight, low, high) of sum `total`, by bisection on c."""
    lo, hi = 0.0, float(high.max()) / float(weight.min()) + 1.0
    for _ in range(300):
        c = (lo + hi) / 2
        lo, hi = (c, hi) if np.clip(c * weight, low, high).sum() < total else (lo, c)
    return np.clip(hi * weight, low, high)


@MODEST
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.floats(0, 1))
def test_fill_is_one_constant_rounded(seed: int, experts: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    high = rng.poisson(rng.lognormal(2, 1.5, experts))
    low = np.minimum(high, 1)
    weight = rng.lognormal(0, 1, experts)
    total = int(low.sum() + share * (high.sum() - low.sum()))
    result = fill(total, weight, low, high)
    assert result.sum() == total
    assert (result >= low).all()
    assert (result <= high).all()
    assert np.abs(result - clamped_constant(total, weight, low, high)).max() < 1 + 1e-6


def test_fill_clips_the_total_and_fills_zero_weights_last() -> None:
    low, high = np.array([1, 1, 0]), np.array([5, 5, 5])
    assert fill(99, np.ones(3), low, high).tolist() == [5, 5, 5]
    assert fill(-3, np.ones(3), low, high).tolist() == [1, 1, 0]
    assert fill(9, np.array([1.0, 0.0, 1.0]), np.zeros(3, np.int64), high).tolist() == [5, 0, 4]
    assert fill(12, np.array([1.0, 0.0, 1.0]), np.zeros(3, np.int64), high).tolist() == [5, 2, 5]
    assert fill(6, np.zeros(3), np.zeros(3, np.int64), high).tolist() == [2, 2, 2]


def test_fewest_drops_cuts_to_the_target_or_the_floor() -> None:
    assert fewest_drops(np.array([9, 4, 7]), np.array([2, 2, 6]), 5).tolist() == [4, 0, 1]


@MODEST
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 6), st.sampled_from([1, 50, 2**40]))
def test_split_quota_is_exact_and_proportional(seed: int, ranks: int, experts: int, scale: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, scale + 1, (ranks, experts)) * (rng.random((ranks, experts)) < 0.8)
    total = counts.sum(axis=0)
    quota = np.array([int(rng.integers(0, int(n) + 1)) for n in total])
    share = split_quota(quota, counts)
    assert np.array_equal(share.sum(axis=0), quota)
    assert (share >= 0).all()
    assert (share <= counts).all()
    for (r, e), value in np.ndenumerate(share):
        fair = Fraction(int(quota[e]) * int(counts[r, e]), max(int(total[e]), 1))
        assert abs(int(value) - fair) < 1
