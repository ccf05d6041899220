"""Chances and samples of experts on a CPU, one after the other: what `selection` does for many at once, bit for bit.

The sums of one expert are numbers of the host, and sizes and chances whole numbers in fp64, exact below 2**53: nothing
is converted, and NumPy starts an operation in a fraction of torch's time, which is what a few thousand rows wait for.

Shape letters: M rows, L experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrmoe.layer.randomness import UNIT, UNIT_BITS
from lrmoe.planning.problem import FloatArray

SCORE_BITS = 30
BROKEN = 2 ** (SCORE_BITS + 10)  # size of a row of non-finite score
FLOOR = 1e-3  # least score over the expert's mean: keeps every inclusion probability positive
MOST_ROWS = 2 ** (53 - UNIT_BITS)  # so that sums of units are exact in fp64


def inclusion_of_each(score_M: NDArray[np.float32], counts: list[int], quotas: list[int]) -> FloatArray:
    """Inclusion probabilities, whole fp64 (M,) in units of 1/UNIT; see `selection.inclusion`.

    Args:
        score_M: fp32 (M,), expert after expert, M < MOST_ROWS. counts, quotas: rows of each, and how many to keep.
    """
    return _joined(_inclusion, score_M, counts, quotas)


def sample_of_each(chance_M: FloatArray, counts: list[int], offsets: list[int]) -> FloatArray:
    """Systematic sample, fp64 (M,), 1 where a row is taken; see `selection.systematic`.

    Args:
        chance_M: what `inclusion_of_each` gave.
    """
    return _joined(_sample, chance_M, counts, offsets)


def _joined(
    of_one: Callable[[Any, int], FloatArray],
    value_M: NDArray[np.floating[Any]],
    counts: list[int],
    given: list[int],
) -> FloatArray:
    ends = itertools.accumulate(counts)
    found = [of_one(value_M[e - n : e], one) for e, n, one in zip(ends, counts, given, strict=True) if n]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _inclusion(score_M: NDArray[np.float32], quota: int) -> FloatArray:
    rows = score_M.shape[0]
    if quota >= rows:
        return np.full(rows, float(UNIT))
    broken = None if math.isfinite(score_M.sum(dtype=np.float64)) else ~np.isfinite(score_M)
    size, left = _sizes(score_M, broken), quota
    if broken is not None and (certain := int(np.count_nonzero(broken))) <= quota:
        size[broken] = 0  # from here on: certain
        left -= certain
    chance, over = np.empty_like(size), np.empty(rows, dtype=np.bool_)
    while True:
        np.multiply(size, float(left) / float(max(_whole_sum(size, broken), 1)), out=chance)
        fresh = int(np.count_nonzero(np.greater_equal(chance, 1, out=over)))
        if not fresh:
            return _fixed_point(size, chance, left)
        left -= fresh
        np.putmask(size, over, 0)


def _sample(chance_M: FloatArray, offset: int) -> FloatArray:
    passed = np.cumsum(chance_M)
    passed += offset
    passed *= 1 / UNIT
    np.floor(passed, out=passed)
    kept = passed.copy()
    kept[1:] -= passed[:-1]
    return kept


def _sizes(score_M: NDArray[np.float32], broken_M: NDArray[np.bool_] | None) -> FloatArray:
    """Scores over the largest, as whole numbers >= 1 in fp64; non-finite ones outweigh all others together."""
    size = score_M.astype(np.float64)
    if broken_M is not None:
        size[broken_M] = 0
    top = float(size.max())
    size /= top if top > 0 else 1.0
    size *= 2**SCORE_BITS
    np.floor(size, out=size)
    mean = int(size.sum()) // size.shape[0]
    np.maximum(size, max(int(mean * FLOOR), 1), out=size)
    if broken_M is not None:
        size[broken_M] = BROKEN
    return size


def _whole_sum(size_M: FloatArray, broken_M: NDArray[np.bool_] | None) -> int:
    """Exact sum: of MOST_ROWS sizes in fp64 where none is BROKEN."""
    return int(size_M.sum() if broken_M is None else size_M.astype(np.int64).sum())


def _fixed_point(size_M: FloatArray, chance_M: FloatArray, free_quota: int) -> FloatArray:
    """Round the free chances so that they sum to the free quota exactly: down first, then single units in order.

    Overwrites the chances.
    """
    units = np.floor(np.multiply(chance_M, UNIT - 2, out=chance_M), out=chance_M)
    certain = np.flatnonzero(size_M == 0)
    free = size_M.shape[0] - certain.shape[0]
    each, rest = divmod(free_quota * UNIT - int(units.sum()), max(free, 1))
    units += each
    # The first `rest` free rows get one unit more; what certain rows get is overwritten.
    earlier = np.searchsorted(certain - np.arange(certain.shape[0]), rest)
    units[: rest + int(earlier)] += 1
    np.minimum(units, UNIT, out=units)
    units[certain] = UNIT
    return units
