"""Means over seeds and their standard errors, and paired differences: the same seed, data and weights on both sides.

Needs neither torch nor NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Differences of pairs, or their ratios.

    Attributes:
        mean: of the differences.
        standard_error: of the mean; NaN for one pair, which says nothing of it.
        n: pairs.
    """

    mean: float
    standard_error: float
    n: int

    def resolved(self, errors: float = 2.0) -> bool:
        """Whether the mean differs from 0 by more than so many standard errors."""
        return abs(self.mean) > errors * self.standard_error


def paired(values_a: Sequence[float], values_b: Sequence[float]) -> Paired:
    """Mean of a - b and its standard error (sample standard deviation over the root of n).

    Args:
        values_a, values_b: one value per seed, in the same order.

    Raises:
        ValueError: no pairs, or not as many values on both sides.
    """
    if len(values_a) != len(values_b) or not values_a:
        raise ValueError(
            f"values_a has {len(values_a)} values, values_b {len(values_b)}: must be as many, 1 or more"
        )
    return averaged([a - b for a, b in zip(values_a, values_b, strict=True)])


def averaged(values: Sequence[float]) -> Paired:
    """Mean and standard error of differences or ratios that were taken pair by pair; at least one."""
    error = standard_error(values)
    return Paired(mean=fmean(values), standard_error=math.nan if error is None else error, n=len(values))


def standard_error(values: Sequence[float]) -> float | None:
    """Of the values' mean: their sample standard deviation over the root of their number; None of fewer than two.

    Not a number where a value is not finite (statistics.stdev would fail).
    """
    n = len(values)
    if n < 2:
        return None
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
