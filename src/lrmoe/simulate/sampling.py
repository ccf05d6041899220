"""From the popularity of experts to counts: every token takes k distinct experts.

A token that draws k distinct experts one after the other, each in proportion to its popularity among those left, takes
the k experts whose exponential clocks (rate = popularity) ring first. Two ways to count such tokens:

- token by token, exactly;
- per expert: the probability that an expert is among the k, then a binomial count of the tokens, corrected so that the
  counts of a source sum to tokens * k. Its cost does not depend on the tokens.

Shape letters: R source ranks, E experts, T tokens of one source.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lrmoe.errors import ConfigError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

SAMPLINGS = ("auto", "tokens", "counts")
_TOKENS_UNTIL = 1 << 22  # clocks per call: up to here "auto" goes token by token
_FEW_EXPERTS = 32  # below, the shares of `inclusion` are not good enough
_CHUNK = 1 << 22  # clocks drawn at once
_TINY = 1e-150  # its square is still a number


def sample_counts(
    weight_RE: FloatArray, tokens_R: IntArray, top_k: int, rng: np.random.Generator, sampling: str = "auto"
) -> IntArray:
    """Counts of one call.

    Args:
        weight_RE: float64 (R, E), popularity of each expert at each source, non-negative; 0: never taken.
        tokens_R: int64 (R,), tokens of each source.
        top_k: distinct experts that each token takes.
        rng: drawn from.
        sampling: "tokens", "counts", or "auto": token by token where that is cheap.

    Returns:
        int64 (R, E); row r sums to tokens_R[r] * top_k, no entry above tokens_R[r].

    Raises:
        ConfigError: an unknown sampling, or a source with fewer than top_k experts to choose from.
    """
    if sampling not in SAMPLINGS:
        raise ConfigError(f"sampling={sampling!r}: must be one of {', '.join(SAMPLINGS)}")
    choices_R = (weight_RE > 0).sum(axis=1)
    if np.any((choices_R < top_k) & (tokens_R > 0)):
        fewest = int(choices_R[tokens_R > 0].min())
        raise ConfigError(f"top_k={top_k}: a source has only {fewest} experts of non-zero popularity")
    experts = weight_RE.shape[1]
    cheap = experts < _FEW_EXPERTS or int(tokens_R.sum()) * experts <= _TOKENS_UNTIL
    if sampling == "tokens" or (sampling == "auto" and cheap):
        rows = [
            _count_tokens(weight_E, int(tokens), top_k, rng)
            for weight_E, tokens in zip(weight_RE, tokens_R, strict=True)
        ]
        return np.stack(rows)
    share_RE = inclusion(weight_RE, top_k)
    return _binomial_counts(share_RE, tokens_R, top_k, rng)


def _count_tokens(weight_E: FloatArray, tokens: int, top_k: int, rng: np.random.Generator) -> IntArray:
    """Counts of one source, token by token, int64 (E,)."""
    experts = weight_E.size
    count_E = np.zeros(experts, dtype=np.int64)
    scale_E = np.divide(1.0, weight_E, out=np.full(experts, np.inf), where=weight_E > 0)
    step = max(1, _CHUNK // experts)
    for start in range(0, tokens, step):
        ring_TE = rng.standard_exponential((min(step, tokens - start), experts)) * scale_E
        first_TK = np.argpartition(ring_TE, top_k - 1, axis=1)[:, :top_k]
        count_E += np.bincount(first_TK.ravel(), minlength=experts)
    return count_E


def inclusion(weight_RE: FloatArray, top_k: int) -> FloatArray:
    """Probability that a token takes each expert, float64 (R, E), rows summing to top_k.

    An expert is taken if its clock rings before the k-th of the others, whose time is taken as a gamma variable with
    the mean and variance that follow, to first order, from the number of clocks rung. Exact for k = 1; within 0.01
    for 64 experts and more under the default skew (tested against counting tokens).
    """
    weight_RE = weight_RE / np.maximum(weight_RE.sum(axis=1, keepdims=True), _TINY)
    if top_k == 1:
        return weight_RE
    share_RE = _ring_before(weight_RE, _time(weight_RE, top_k, _ring_before))
    off_R = np.abs(share_RE.sum(axis=1) - top_k) > 1e-6 * top_k
    if off_R.any():  # gaps in the popularity that a gamma variable cannot bridge: one time for all experts
        rows_RE = weight_RE[off_R]
        share_RE[off_R] = _rung_by(rows_RE, _time(rows_RE, top_k, _rung_by))
    saturated_R = (weight_RE > 0).sum(axis=1) <= top_k
    return np.where(saturated_R[:, None], (weight_RE > 0).astype(np.float64), share_RE)


def _time(
    weight_RE: FloatArray, top_k: int, share: Callable[[FloatArray, FloatArray], FloatArray]
) -> FloatArray:
    """Time at which the shares of each row sum to top_k, float64 (R,): Newton steps inside a bracket."""
    low_R, high_R = np.full(weight_RE.shape[0], -5.0), np.full(weight_RE.shape[0], 80.0)
    log_R = np.full(weight_RE.shape[0], np.log(top_k))
    for _ in range(60):
        share_RE = share(weight_RE, np.exp(log_R))
        missing_R = top_k - share_RE.sum(axis=1)
        low_R, high_R = np.where(missing_R > 0, log_R, low_R), np.where(missing_R > 0, high_R, log_R)
        wt_RE = weight_RE * np.exp(log_R)[:, None]
        slope_R = np.maximum((wt_RE * np.exp(-wt_RE)).sum(axis=1), _TINY)
        step_R = log_R + np.clip(missing_R / slope_R, -100, 100)
        log_R = np.where((step_R > low_R) & (step_R < high_R), step_R, (low_R + high_R) / 2)
        if np.abs(missing_R).max(initial=0.0) < 1e-9 * top_k or (high_R - low_R).max(initial=0.0) < 1e-12:
            break
    return np.exp(log_R)


def _rung_by(weight_RE: FloatArray, time_R: FloatArray) -> FloatArray:
    """Probability that each expert's clock has rung by a given time."""
    return -np.expm1(-weight_RE * time_R[:, None])


def _ring_before(weight_RE: FloatArray, time_R: FloatArray) -> FloatArray:
    """Probability that each expert's clock rings before the k-th of the others, if the k-th of all rings about then."""
    wt_RE = weight_RE * time_R[:, None]
    rung_RE = -np.expm1(-wt_RE)
    speed_RE, spread_RE = wt_RE * np.exp(-wt_RE), rung_RE * (1 - rung_RE)  # of log time
    others_RE = np.maximum(speed_RE.sum(axis=1, keepdims=True) - speed_RE, _TINY)
    late_RE = np.minimum(1 + rung_RE / others_RE, 4.0)  # mean time of the k-th of the others, in time_R
    variance_RE = np.maximum(spread_RE.sum(axis=1, keepdims=True) - spread_RE, 0) / np.square(others_RE)
    variance_RE = np.clip(variance_RE, 1e-12, np.square(late_RE) / 5)
    shape_RE = np.square(late_RE) / variance_RE
    return -np.expm1(-shape_RE * np.log1p(wt_RE * variance_RE / late_RE))


def _binomial_counts(
    share_RE: FloatArray, tokens_R: IntArray, top_k: int, rng: np.random.Generator
) -> IntArray:
    """Binomial counts conditioned on the row sums: each expert takes its part of the surplus, by its variance."""
    limit_RE = np.broadcast_to(tokens_R[:, None], share_RE.shape)
    count_RE = rng.binomial(limit_RE, np.clip(share_RE, 0.0, 1.0)).astype(np.int64)
    variance_RE = share_RE * (1 - share_RE)
    total_R = np.maximum(variance_RE.sum(axis=1, keepdims=True), _TINY)
    missing_R = tokens_R * top_k - count_RE.sum(axis=1)
    wish_RE = count_RE + missing_R[:, None] * (variance_RE / total_R)
    high_RE = np.where(share_RE > 0, limit_RE, 0)
    count_RE = np.clip(np.rint(wish_RE).astype(np.int64), 0, high_RE)
    return _settle(count_RE, share_RE, high_RE, tokens_R * top_k)


def _settle(count_RE: IntArray, share_RE: FloatArray, high_RE: IntArray, total_R: IntArray) -> IntArray:
    """Add or take single pairs, most popular experts first, until every row has its sum."""
    order_RE = np.argsort(-share_RE * (1 - share_RE), axis=1, kind="stable")
    while (off := np.flatnonzero(total_R != count_RE.sum(axis=1))).size:
        for r in off:
            missing = int(total_R[r] - count_RE[r].sum())
            order = order_RE[r]
            room = count_RE[r, order] < high_RE[r, order] if missing > 0 else count_RE[r, order] > 0
            count_RE[r, order[room][: abs(missing)]] += 1 if missing > 0 else -1
    return count_RE
