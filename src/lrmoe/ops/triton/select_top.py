"""Kernels of `select`: a block of scores, and the rows of highest score by radix. Shape letters: M rows, L experts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_scores(
    score_ptr: tl.tensor, begin: tl.tensor, end: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """(row, whether it is one, whether its score is finite, fp32 score or 0, int32 key) of a block.

    Keys order as scores do; those of non-finite scores lie above all. Bits decide, so that no mode of the hardware
    can take small numbers for zero.
    """
    row = begin + tl.arange(0, BLOCK)
    inside = row < end
    score = tl.load(score_ptr + row, mask=inside, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    finite = inside & (size < 0x7F800000)
    key = tl.where(finite, tl.where(bits < 0, -size, size), 0x7F800000)
    return row, inside, finite, tl.where(finite, score, 0.0), key


@triton.jit
def _threshold(
    score_ptr: tl.tensor, begin: tl.tensor, end: tl.tensor, quota: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The key of the last row within the quota, and how many rows of that key the quota holds."""
    digits = tl.arange(0, 256)
    high = begin * 0
    left = quota
    for level in tl.static_range(4):
        count = tl.zeros((256,), dtype=tl.int32)
        for at in range(begin, end, BLOCK):
            _, inside, _, _, key = load_scores(score_ptr, at, end, BLOCK)
            if level == 0:
                count += tl.histogram((key >> 24) + 128, 256, mask=inside)
            else:
                alike = inside & ((key >> (32 - 8 * level)) == high.to(tl.int32))
                count += tl.histogram((key >> (24 - 8 * level)) & 255, 256, mask=alike)
        from_here = tl.sum(count, 0) - tl.cumsum(count, 0) + count
        digit = tl.max(tl.where(from_here >= left, digits, 0), 0)
        left -= tl.sum(tl.where(digits > digit, count, 0), 0)
        if level == 0:
            high = digit.to(tl.int64) - 128
        else:
            high = high * 256 + digit
    return high, left


@triton.jit
def keep_top(
    score_ptr: tl.tensor,
    end_ptr: tl.tensor,
    count_ptr: tl.tensor,
    quota_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cost_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Weights 1 or 0 of one expert's rows, and what they cost; see `select.keep_top`."""
    expert = tl.program_id(0)
    end = tl.load(end_ptr + expert)
    begin = end - tl.load(count_ptr + expert)
    last, ties = _threshold(score_ptr, begin, end, tl.load(quota_ptr + expert), BLOCK)
    seen = begin * 0
    broken = begin * 0
    energy = tl.full((), 0.0, tl.float64)
    dropped = tl.full((), 0.0, tl.float64)
    for at in range(begin, end, BLOCK):
        row, inside, finite, score, key = load_scores(score_ptr, at, end, BLOCK)
        tie = inside & (key == last)
        number = seen + tl.cumsum(tie.to(tl.int32), 0)
        keep = inside & ((key > last) | (tie & (number <= ties)))
        tl.store(weight_ptr + row, keep.to(tl.float32), mask=inside)
        seen += tl.sum(tie.to(tl.int32), 0)
        broken += tl.sum((inside & ~finite).to(tl.int32), 0)
        square = score.to(tl.float64) * score.to(tl.float64)
        energy += tl.sum(square, 0)
        dropped += tl.sum(tl.where(keep, 0.0, square), 0)
    tl.store(cost_ptr + 4 * expert, energy)
    tl.store(cost_ptr + 4 * expert + 1, dropped)
    tl.store(cost_ptr + 4 * expert + 3, broken.to(tl.float64))
