"""Paired differences: the same seed, data and weights on both sides. Needs neither torch nor NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Paired(mean=mean, standard_error=math.nan, n=1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Paired(mean=mean, standard_error=math.sqrt(variance / n), n=n)
