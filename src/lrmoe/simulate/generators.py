"""Load patterns for tests and simulation: counts per step, source rank and expert, from a seed.

Every pattern is a popularity of experts per source and step; each token takes k distinct experts (see sampling.py).

Shape letters: S steps, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lrmoe.errors import ConfigError
from lrmoe.planning.problem import IntArray, Topology
from lrmoe.simulate.patterns import PATTERNS, Pattern
from lrmoe.simulate.sampling import sample_counts

GENERATORS = tuple(PATTERNS)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a generated pattern.

    Attributes:
        ranks, experts: of the expert-parallel group; each rank is the home of experts / ranks experts.
        top_k: distinct experts per token. tokens: tokens per source rank and call (mean, where sources differ).

    Raises:
        ConfigError: a size below 1, or more experts per token than experts.
    """

    ranks: int
    experts: int
    top_k: int
    tokens: int

    def __post_init__(self) -> None:
        Topology(ranks=self.ranks, experts=self.experts)
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"top_k={self.top_k}: must lie in [1, {self.experts}], the number of experts")
        if self.tokens < 1:
            raise ConfigError(f"tokens={self.tokens}: must be at least 1")


def generate(
    name: str, *, ranks: int, experts: int, top_k: int, tokens: int, seed: int, steps: int = 1, **options: Any
) -> IntArray:
    """Counts of a named pattern.

    Args:
        name: one of GENERATORS.
        ranks, experts: of the expert-parallel group; experts a multiple of ranks.
        top_k: distinct experts that each token takes.
        tokens: tokens per source rank and step.
        seed: equal seeds give equal counts.
        steps: consecutive calls of one layer.
        options: of the pattern (patterns.py), and sampling="auto" | "tokens" | "counts" (sampling.py).

    Returns:
        int64 (S, R, E); each source's pairs sum to its tokens times top_k.

    Raises:
        ConfigError: an unknown name or option, or a value out of range. PlanError: experts do not divide by ranks.
    """
    shape = Shape(ranks=ranks, experts=experts, top_k=top_k, tokens=tokens)
    return np.stack(list(stream(name, shape, seed=seed, steps=steps, **options)))


def stream(name: str, shape: Shape, *, seed: int, steps: int, **options: Any) -> Iterator[IntArray]:
    """The counts of `generate`, one call (R, E) at a time: for clusters whose whole history would not fit."""
    if name not in PATTERNS:
        raise ConfigError(f"generator={name!r}: must be one of {', '.join(GENERATORS)}")
    if steps < 1:
        raise ConfigError(f"steps={steps}: must be at least 1")
    sampling = options.pop("sampling", "auto")
    pattern = _pattern(PATTERNS[name], name, shape, seed, steps, options)
    rng = np.random.default_rng([seed, 1])
    for weight_RE, tokens_R in pattern:
        yield sample_counts(weight_RE, tokens_R, shape.top_k, rng, sampling)


def _pattern(
    make: Callable[..., Pattern], name: str, shape: Shape, seed: int, steps: int, options: dict[str, Any]
) -> Pattern:
    known = list(make.__kwdefaults__ or {})
    for key in options:
        if key not in known:
            valid = ", ".join(["sampling", *known])
            raise ConfigError(f"option {key!r} of generator {name!r}: unknown; valid: {valid}")
        whole = make.__annotations__[key].startswith("int")
        value = options[key]
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{key}={value!r}: must be a {'whole ' if whole else ''}number")
    return make(shape, np.random.default_rng([seed, 0]), steps, **options)


def fixed_peak(counts_RE: IntArray) -> float:
    """Most loaded rank over the mean load when every expert runs at home; 1 for an empty call."""
    ranks, experts = counts_RE.shape
    load_R = counts_RE.sum(axis=0).reshape(ranks, experts // ranks).sum(axis=1)
    total = int(load_R.sum())
    return int(load_R.max()) * ranks / total if total else 1.0


def calibrate(
    target_peak: float,
    *,
    seeds: Sequence[int],
    steps: int = 1,
    skip: int = 0,
    tolerance: float = 0.002,
    **sizes: Any,
) -> float:
    """The sigma of `lognormal` at which fixed ownership's peak, mean over seeds and steps, is `target_peak`.

    Bisection; every sigma is tried on the same draws, so the mean peak rises almost steadily with it.

    Args:
        target_peak: most loaded rank over the mean load.
        seeds: the seeds that count.
        steps: calls per seed. skip: leading calls that do not count (history).
        tolerance: how near the mean peak must come.
        sizes: ranks, experts, top_k, tokens, and options of the pattern, as in `generate`.

    Raises:
        ConfigError: no sigma up to 8 comes that near.
    """

    def peak(sigma: float) -> float:
        calls = (generate("lognormal", seed=seed, steps=steps, sigma=sigma, **sizes)[skip:] for seed in seeds)
        return float(np.mean([fixed_peak(counts_RE) for counts in calls for counts_RE in counts]))

    low, high = 0.0, 1.0
    while peak(high) < target_peak:
        low, high = high, high + 1.0
        if high > 8:
            raise ConfigError(f"target_peak={target_peak}: sigma 8 reaches no more than {peak(8.0):.3f}")
    for _ in range(30):
        sigma = (low + high) / 2
        found = peak(sigma)
        if abs(found - target_peak) <= tolerance:
            return sigma
        low, high = (sigma, high) if found < target_peak else (low, sigma)
    raise ConfigError(f"target_peak={target_peak}: comes no nearer than {found:.3f}")
