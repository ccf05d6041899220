"""Popularity of experts over sources and steps, by pattern.

A pattern is a function (shape, rng, steps, *, options) that yields, step by step, the popularity of every expert at
every source, float64 (R, E), and the tokens of every source, int64 (R,).

Shape letters: R ranks, E experts, L experts per home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from lrmoe.errors import ConfigError
from lrmoe.simulate.sampling import FloatArray, IntArray

if TYPE_CHECKING:
    from lrmoe.simulate.generators import Shape

Pattern = Iterator[tuple[FloatArray, IntArray]]


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}={value}: must lie in [{low:g}, {high:g}]")


def _even_tokens(shape: Shape) -> IntArray:
    return np.full(shape.ranks, shape.tokens, dtype=np.int64)


def _ones(shape: Shape) -> FloatArray:
    return np.ones((shape.ranks, shape.experts))


class _Drift:
    """A standard normal field that moves by AR(1): x' = rho x + sqrt(1 - rho^2) noise."""

    def __init__(self, rng: np.random.Generator, size: tuple[int, ...], rho: float) -> None:
        self._rng, self._rho = rng, rho
        self.value: FloatArray = rng.standard_normal(size)

    def step(self) -> None:
        noise = self._rng.standard_normal(self.value.shape)
        self.value = self._rho * self.value + np.sqrt(1 - self._rho**2) * noise


def lognormal(
    shape: Shape,
    rng: np.random.Generator,
    steps: int,
    *,
    sigma: float = 1.6,
    clustered: float = 0.3,
    corr: float = 0.8,
    drift: float = 0.98,
) -> Pattern:
    """Lognormal popularity: log = sigma * (sqrt(corr) common + sqrt(1 - corr) per source), drifting.

    Of the common part's variance the share `clustered` belongs to the home: hot experts then live together.
    """
    _within("sigma", sigma, 0, 20)
    for name, value in (("clustered", clustered), ("corr", corr), ("drift", drift)):
        _within(name, value, 0, 1)
    local = shape.experts // shape.ranks
    home = _Drift(rng, (shape.ranks,), drift)
    expert = _Drift(rng, (shape.experts,), drift)
    source = _Drift(rng, (shape.ranks, shape.experts), drift)
    for step in range(steps):
        if step:
            for field in (home, expert, source):
                field.step()
        common_E = np.sqrt(clustered) * np.repeat(home.value, local) + np.sqrt(1 - clustered) * expert.value
        log_RE = np.sqrt(corr) * common_E + np.sqrt(1 - corr) * source.value
        yield np.exp(sigma * log_RE), _even_tokens(shape)


def zipf(
    shape: Shape, rng: np.random.Generator, steps: int, *, exponent: float = 0.8, noise: float = 20.0
) -> Pattern:
    """Popularity (1 + rank)^-exponent in random order; each source multiplies gamma noise of that shape, mean 1."""
    _within("exponent", exponent, 0, 20)
    _within("noise", noise, 1e-3, 1e9)
    popular_E = rng.permutation((1.0 + np.arange(shape.experts)) ** -exponent)
    for _ in range(steps):
        yield popular_E * rng.gamma(noise, 1 / noise, (shape.ranks, shape.experts)), _even_tokens(shape)


def balanced(shape: Shape, rng: np.random.Generator, steps: int) -> Pattern:
    """Every expert equally popular: only sampling noise is left."""
    for _ in range(steps):
        yield _ones(shape), _even_tokens(shape)


def hot_set(
    shape: Shape, rng: np.random.Generator, steps: int, *, hot: int | None = None, boost: float = 20.0
) -> Pattern:
    """A few experts, anywhere, are `boost` times as popular as the rest; `hot` of them (default E / 16)."""
    hot = max(1, shape.experts // 16) if hot is None else hot
    _within("hot", hot, 0, shape.experts)
    _within("boost", boost, 1e-9, 1e9)
    weight_RE = _ones(shape)
    weight_RE[:, rng.permutation(shape.experts)[:hot]] *= boost
    for _ in range(steps):
        yield weight_RE, _even_tokens(shape)


def hot_rank(
    shape: Shape, rng: np.random.Generator, steps: int, *, rank: int = 0, boost: float = 8.0
) -> Pattern:
    """All experts of one home are `boost` times as popular as the rest."""
    _within("rank", rank, 0, shape.ranks - 1)
    _within("boost", boost, 1e-9, 1e9)
    local = shape.experts // shape.ranks
    weight_RE = _ones(shape)
    weight_RE[:, rank * local : (rank + 1) * local] *= boost
    for _ in range(steps):
        yield weight_RE, _even_tokens(shape)


def uneven_sources(
    shape: Shape, rng: np.random.Generator, steps: int, *, sigma: float = 1.0, spread: float = 1.0
) -> Pattern:
    """Sources hold unequal shares of the tokens (lognormal, `spread`) and prefer different experts (`sigma`)."""
    _within("sigma", sigma, 0, 20)
    _within("spread", spread, 0, 20)
    share_R = np.exp(spread * rng.standard_normal(shape.ranks))
    ends_R = np.floor(np.cumsum(share_R) / share_R.sum() * shape.ranks * shape.tokens + 0.5)
    tokens_R = np.diff(ends_R, prepend=0).astype(np.int64)
    weight_RE = np.exp(sigma * rng.standard_normal((shape.ranks, shape.experts)))
    for _ in range(steps):
        yield weight_RE, tokens_R


def idle(
    shape: Shape,
    rng: np.random.Generator,
    steps: int,
    *,
    idle_experts: float = 0.5,
    idle_ranks: float = 0.25,
    idle_sources: float = 0.25,
    sigma: float = 1.0,
) -> Pattern:
    """A share of the experts gets nothing, all experts of a share of the homes neither; some sources hold no token.

    top_k experts at least stay in use, and one source.
    """
    for name, value in (
        ("idle_experts", idle_experts),
        ("idle_ranks", idle_ranks),
        ("idle_sources", idle_sources),
    ):
        _within(name, value, 0, 1)
    used_E = np.repeat(rng.permutation(shape.ranks) >= int(idle_ranks * shape.ranks), _local(shape))
    used_E &= rng.permutation(shape.experts) >= int(idle_experts * shape.experts)
    spare = np.flatnonzero(~used_E)[: max(0, shape.top_k - int(used_E.sum()))]
    used_E[spare] = True
    silent = min(int(idle_sources * shape.ranks), shape.ranks - 1)
    tokens_R = np.where(rng.permutation(shape.ranks) >= silent, shape.tokens, 0).astype(np.int64)
    weight_RE = np.exp(sigma * rng.standard_normal((shape.ranks, shape.experts))) * used_E.astype(np.float64)
    for _ in range(steps):
        yield weight_RE, tokens_R


def _local(shape: Shape) -> int:
    return shape.experts // shape.ranks


def rotating(
    shape: Shape, rng: np.random.Generator, steps: int, *, boost: float = 8.0, every: int = 1
) -> Pattern:
    """One home is hot, and `every` steps the next one: what history says is always about the wrong rank."""
    _within("boost", boost, 1e-9, 1e9)
    _within("every", every, 1, 2**31)
    local = _local(shape)
    for step in range(steps):
        hot = step // every % shape.ranks
        weight_RE = _ones(shape)
        weight_RE[:, hot * local : (hot + 1) * local] *= boost
        yield weight_RE, _even_tokens(shape)


def burst(
    shape: Shape,
    rng: np.random.Generator,
    steps: int,
    *,
    sigma: float = 0.5,
    boost: float = 30.0,
    at: int | None = None,
    length: int = 1,
) -> Pattern:
    """Mild lognormal skew; from step `at` (default the middle) the experts of one home burst for `length` steps."""
    _within("sigma", sigma, 0, 20)
    _within("boost", boost, 1e-9, 1e9)
    at = steps // 2 if at is None else at
    local, hot = _local(shape), int(rng.integers(shape.ranks))
    calm_E = np.exp(sigma * rng.standard_normal(shape.experts))
    loud_E = calm_E * np.where(np.arange(shape.experts) // local == hot, boost, 1.0)
    for step in range(steps):
        weight_E = loud_E if at <= step < at + length else calm_E
        yield np.broadcast_to(weight_E, (shape.ranks, shape.experts)), _even_tokens(shape)


PATTERNS: Mapping[str, Callable[..., Pattern]] = {
    "lognormal": lognormal,
    "zipf": zipf,
    "balanced": balanced,
    "hot_set": hot_set,
    "hot_rank": hot_rank,
    "uneven_sources": uneven_sources,
    "idle": idle,
    "rotating": rotating,
    "burst": burst,
}
