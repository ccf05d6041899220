"""Kernels of `select`: inclusion probabilities and the systematic sample. Shape letters: M rows, L experts."""

from __future__ import annotations

import triton
import triton.language as tl

from lrmoe.ops.triton.select_top import load_scores


@triton.jit
def _scaled(score: tl.tensor, top: tl.tensor, SCORE_BITS: tl.constexpr) -> tl.tensor:
    """Scores over the largest, whole numbers, int64."""
    return (score.to(tl.float64) / top * tl.full((), 1 << SCORE_BITS, tl.float64)).to(tl.int64)


@triton.jit
def _sizes(
    score_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    top: tl.tensor,
    floor: tl.tensor,
    fits: tl.tensor,
    limit: tl.tensor,
    SCORE_BITS: tl.constexpr,
    BROKEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """(row, whether it is one, whether its probability is to be found, its size, fp32 score or 0) of a block.

    Certain are rows of at least the size `limit`, and non-finite ones where the quota `fits` them all.
    """
    row, inside, finite, score, _ = load_scores(score_ptr, begin, end, BLOCK)
    size = tl.maximum(_scaled(score, top, SCORE_BITS), floor)
    size = tl.where(finite, size, tl.full((), BROKEN, tl.int64))
    free = inside & (size < limit) & (finite | ~fits)
    return row, inside, free, tl.where(free, size, 0), score


@triton.jit
def _scale(
    score_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    SCORE_BITS: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of an expert: largest score, fp64, 1 where none is positive; least size; non-finite scores."""
    largest = tl.full((), 0.0, tl.float32)
    broken = begin * 0
    for at in range(begin, end, BLOCK):
        _, inside, finite, score, _ = load_scores(score_ptr, at, end, BLOCK)
        largest = tl.maximum(largest, tl.max(score, 0))
        broken += tl.sum((inside & ~finite).to(tl.int32), 0)
    top = tl.where(largest > 0, largest, 1.0).to(tl.float64)
    total = begin * 0
    for at in range(begin, end, BLOCK):
        _, _, _, score, _ = load_scores(score_ptr, at, end, BLOCK)
        total += tl.sum(_scaled(score, top, SCORE_BITS), 0)
    mean = total // tl.maximum(end - begin, 1)
    floor = (mean.to(tl.float64) * tl.full((), FLOOR, tl.float64)).to(tl.int64)
    return top, tl.maximum(floor, 1), broken


@triton.jit
def _rounds(
    score_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    quota: tl.tensor,
    top: tl.tensor,
    floor: tl.tensor,
    broken: tl.tensor,
    SCORE_BITS: tl.constexpr,
    BROKEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(size from which on rows are certain, quota of the others, their quota over their sizes' sum, fp64).

    A round fixes the rows that reach probability 1: those from some size on, so that one number tells all of them.
    """
    fits = broken <= quota
    every = quota == end - begin
    limit = tl.where(every, 0, tl.full((), 1 << 62, tl.int64))
    left = tl.where(every, 0, tl.where(fits, quota - broken, quota))
    total = begin * 0
    for at in range(begin, end, BLOCK):
        _, _, _, size, _ = _sizes(score_ptr, at, end, top, floor, fits, limit, SCORE_BITS, BROKEN, BLOCK)
        total += tl.sum(size, 0)
    ratio = left.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)
    fresh = begin * 0 + 1
    while fresh > 0:
        fresh = begin * 0
        rest = begin * 0
        least = limit
        for at in range(begin, end, BLOCK):
            _, _, _, size, _ = _sizes(score_ptr, at, end, top, floor, fits, limit, SCORE_BITS, BROKEN, BLOCK)
            over = size.to(tl.float64) * ratio >= 1.0
            fresh += tl.sum(over.to(tl.int32), 0)
            rest += tl.sum(tl.where(over, 0, size), 0)
            least = tl.minimum(least, tl.min(tl.where(over, size, limit), 0))
        left -= fresh
        limit = least
        ratio = left.to(tl.float64) / tl.maximum(rest, 1).to(tl.float64)
    return limit, left, ratio


@triton.jit
def _units(size: tl.tensor, ratio: tl.tensor, UNIT_BITS: tl.constexpr) -> tl.tensor:
    """Free probabilities in units, rounded down by a little more than they have to be, int64."""
    return (size.to(tl.float64) * ratio * tl.full((), (1 << UNIT_BITS) - 2, tl.float64)).to(tl.int64)


@triton.jit
def keep_sampled(
    score_ptr: tl.tensor,
    end_ptr: tl.tensor,
    count_ptr: tl.tensor,
    quota_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    chance_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cost_ptr: tl.tensor,
    UNIT_BITS: tl.constexpr,
    SCORE_BITS: tl.constexpr,
    BROKEN: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Free probabilities go down to units, then single units go to rows in order until they sum to the free quota."""
    expert = tl.program_id(0)
    end = tl.load(end_ptr + expert)
    begin = end - tl.load(count_ptr + expert)
    quota = tl.minimum(tl.load(quota_ptr + expert), end - begin)
    top, floor, broken = _scale(score_ptr, begin, end, SCORE_BITS, FLOOR, BLOCK)
    fits = broken <= quota
    limit, left, ratio = _rounds(score_ptr, begin, end, quota, top, floor, broken, SCORE_BITS, BROKEN, BLOCK)
    missing = left << UNIT_BITS
    among = begin * 0
    for at in range(begin, end, BLOCK):
        _, _, free, size, _ = _sizes(score_ptr, at, end, top, floor, fits, limit, SCORE_BITS, BROKEN, BLOCK)
        missing -= tl.sum(_units(size, ratio, UNIT_BITS), 0)
        among += tl.sum(free.to(tl.int32), 0)
    among = tl.maximum(among, 1)
    each = missing // among
    extra = missing - each * among
    unit = tl.full((), 1 << UNIT_BITS, tl.int64)
    seen = begin * 0
    passed = begin * 0
    if offset_ptr is not None:
        passed += tl.load(offset_ptr + expert)
    cost_0 = tl.full((), 0.0, tl.float64)
    cost_1 = tl.full((), 0.0, tl.float64)
    cost_2 = tl.full((), 0.0, tl.float64)
    for at in range(begin, end, BLOCK):
        row, inside, free, size, score = _sizes(
            score_ptr, at, end, top, floor, fits, limit, SCORE_BITS, BROKEN, BLOCK
        )
        number = seen + tl.cumsum(free.to(tl.int32), 0)
        seen += tl.sum(free.to(tl.int32), 0)
        chance = _units(size, ratio, UNIT_BITS) + each + (number <= extra).to(tl.int64)
        chance = tl.where(inside, tl.where(free, tl.minimum(chance, unit), unit), 0)
        if chance_ptr is not None:
            tl.store(chance_ptr + row, chance, mask=inside)
        if weight_ptr is not None:
            upto = passed + tl.cumsum(chance, 0)
            passed += tl.sum(chance, 0)
            keep = (upto >> UNIT_BITS) > ((upto - chance) >> UNIT_BITS)
            inverse = 1.0 / tl.maximum(chance, 1).to(tl.float64) * unit.to(tl.float64)
            tl.store(weight_ptr + row, tl.where(keep, inverse, 0.0).to(tl.float32), mask=inside)
            square = score.to(tl.float64) * score.to(tl.float64)
            cost_0 += tl.sum(square, 0)
            cost_1 += tl.sum(tl.where(keep, 0.0, square), 0)
            cost_2 += tl.sum((inverse - 1.0) * square, 0)
    if weight_ptr is not None:
        tl.store(cost_ptr + 4 * expert, cost_0)
        tl.store(cost_ptr + 4 * expert + 1, cost_1)
        tl.store(cost_ptr + 4 * expert + 2, cost_2)
        tl.store(cost_ptr + 4 * expert + 3, broken.to(tl.float64))
