"""Chances and sample of one expert on a CPU: what `selection` does for many at once, bit for bit.

The sums of one expert are numbers of the host. Sizes and chances are whole numbers in fp64, exact below 2**53, and so
are masks: a CPU handles several of them at a time, and converts none.

Shape letters: M rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrmoe.layer.randomness import UNIT, UNIT_BITS

SCORE_BITS = 30
BROKEN = 2 ** (SCORE_BITS + 10)  # size of a row of non-finite score
FLOOR = 1e-3  # least score over the expert's mean: keeps every inclusion probability positive
MOST_ROWS = 2 ** (53 - UNIT_BITS)  # of one expert, so that sums of units are exact in fp64


def inclusion_of_one(score_M: Tensor, quota: int) -> Tensor:
    """Inclusion probabilities, whole fp64 (M,) in units of 1/UNIT; see `selection.inclusion`.

    Args:
        score_M: fp32 (M,) on a CPU, 0 < M < MOST_ROWS. quota: rows to keep.
    """
    rows = score_M.shape[0]
    if quota >= rows:
        return torch.full_like(score_M, UNIT, dtype=torch.float64)
    broken = broken_rows(score_M)
    size, left = _sizes(score_M, broken), quota
    if broken is not None and (certain := int(broken.sum())) <= quota:
        size.masked_fill_(broken, 0)  # 0 from here on: certain
        left -= certain
    below, exact = torch.empty_like(size), broken is None
    while True:
        ratio = float(left) / float(max(_whole_sum(size, exact), 1))
        torch.mul(size, ratio, out=below).lt_(1)
        fresh = rows - int(below.sum())
        if not fresh:
            return _fixed_point(size, torch.mul(size, ratio, out=below), left)
        left -= fresh
        size.mul_(below)


def sample_of_one(chance_M: Tensor, offset: int) -> Tensor:
    """Systematic sample, fp64 (M,), 1 where a row is taken; see `selection.systematic`.

    Args:
        chance_M: what `inclusion_of_one` gave.
    """
    passed = chance_M.cumsum(0).add_(offset).mul_(1 / UNIT).floor_()
    return torch.cat([passed[:1], passed[1:] - passed[:-1]])


def broken_rows(score_M: Tensor) -> Tensor | None:
    """Rows of non-finite score, bool (M,), or None where the scores' sum, which only a CPU is asked for, is finite."""
    if score_M.device.type == "cpu" and math.isfinite(float(score_M.sum())):
        return None
    return score_M.isfinite().logical_not_()


def finite_scores(score_M: Tensor, broken_M: Tensor | None) -> Tensor:
    """The scores, 0 where they are not finite."""
    return score_M if broken_M is None else score_M.nan_to_num(0.0, 0.0, 0.0)


def _sizes(score_M: Tensor, broken_M: Tensor | None) -> Tensor:
    """Scores over the largest, as whole numbers >= 1 in fp64; non-finite ones outweigh all others together."""
    score = finite_scores(score_M, broken_M).double()
    top = float(score.amax())
    size = score.div_(top if top > 0 else 1.0).mul_(2**SCORE_BITS).floor_()
    mean = _whole_sum(size, exact=True) // score_M.shape[0]
    size.clamp_(min=max(int(mean * FLOOR), 1))
    return size if broken_M is None else size.masked_fill_(broken_M, BROKEN)


def _whole_sum(size_M: Tensor, exact: bool) -> int:
    """Sum of whole numbers; `exact`: in fp64, since none of these MOST_ROWS is above 2**SCORE_BITS."""
    return int(size_M.sum() if exact else size_M.sum(dtype=torch.int64))


def _fixed_point(size_M: Tensor, chance_M: Tensor, free_quota: int) -> Tensor:
    """Round the free chances so that they sum to the free quota exactly: down first, then single units in order.

    Overwrites both.
    """
    units, free = chance_M.mul_(UNIT - 2).floor_(), size_M.gt_(0)
    missing, upto = free_quota * UNIT - int(units.sum()), free.cumsum(0)
    each, rest = divmod(missing, max(int(upto[-1]), 1))
    units.add_(free, alpha=-UNIT).add_(UNIT + each)  # certain rows have UNIT at least
    if rest:  # the first free rows get one unit more
        units[: int(torch.searchsorted(upto, rest)) + 1] += 1
    return units.clamp_(max=UNIT)
