"""Grouped products over variable segments in one launch: any strides, any row counts, rows read by index if asked.

Twins: `lrmoe.ops.grouped`. As many programs as the device's processors hold at a time go through the tiles in turn:

    forward, input gradient   tiles are (rows of one segment) x columns; a table says whose rows
    weight gradient           tiles are (segment, b, a); the sum runs over the segment's rows in order

Sums are fp32, each by one program in one order: results repeat, and a row's does not depend on the rows beside it
within tiles of one size. Rows after the last segment are neither read nor written. Nothing is compiled anew for another
number of tiles or segments.

Shape letters: N rows, S segments, A and B widths, P rows of a buffer that is read by index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lrmoe.ops.host import upload
from lrmoe.ops.triton.launch import interpreted, on
from lrmoe.ops.triton.rule import Product, Tiles, tiles

_INTERPRETED_PROGRAMS = 3  # fewer than tiles, so that programs take several


def grouped_mm(
    rows: Tensor,
    weight_SAB: Tensor,
    counts: Sequence[int],
    *,
    out: Tensor,
    index_N: Tensor | None = None,
    place_N: Tensor | None = None,
    by: Tiles | None = None,
) -> Tensor:
    """`out[n] = rows[n] @ weight[s]` for every row n of every segment s.

    Args:
        rows: (N, A), or (P, A) where `index_N` says which of them row n is.
        weight_SAB: (S, A, B), any strides, fewer than 2**31 entries a matrix.
        counts: S row counts, N in all.
        out: (N, B) any strides; or (P', B), row n at `place_N[n]`, all distinct.
        by: tiles, those of `rule.tiles` by default.

    Returns:
        `out`.
    """
    total, (_, a, b) = sum(counts), weight_SAB.shape
    if total == 0 or b == 0:
        return out
    product = Product(dtype=rows.dtype, rows=total, segments=len(counts), a=a, b=b)
    by = tiles(product) if by is None else by
    table = upload(row_tiles(counts, by.rows), rows.device)
    with on(rows):
        _rows[(_programs(rows, table.shape[0] * -(-b // by.columns), by),)](
            rows, index_N, weight_SAB, out, place_N, table, table.shape[0], a, b,
            *rows.stride(), *weight_SAB.stride(), *out.stride(),
            PRECISION=_precision(rows), WIDE=_wide(rows), ROWS=by.rows, COLUMNS=by.columns, DEPTH=by.depth,
            num_warps=by.warps, num_stages=by.stages,
        )  # fmt: skip
    return out


def grouped_mm_weight(
    grad: Tensor,
    rows: Tensor,
    counts: Sequence[int],
    *,
    out: Tensor,
    add: bool = False,
    grad_index_N: Tensor | None = None,
    index_N: Tensor | None = None,
    by: Tiles | None = None,
) -> Tensor:
    """`out[s] = grad[segment s].T @ rows[segment s]`, exact zeros for empty segments; with `add` added to `out`.

    Args:
        grad: (N, B) or, with `grad_index_N`, (P, B). rows: (N, A) or, with `index_N`, (P', A).
        out: (S, B, A), any strides and any floating dtype: what is added is rounded once.
        by: tiles, those of `rule.tiles` by default.

    Returns:
        `out`.
    """
    segments, b, a = out.shape
    if out.numel() == 0 or (add and sum(counts) == 0):
        return out
    product = Product(dtype=rows.dtype, rows=sum(counts), segments=segments, a=a, b=b)
    by = tiles(product, sums_rows=True) if by is None else by
    bounds = upload(np.concatenate(([0], np.cumsum(np.asarray(counts, dtype=np.int64)))), rows.device)
    with on(rows):
        _weights[(_programs(rows, segments * -(-b // by.rows) * -(-a // by.columns), by),)](
            grad, grad_index_N, rows, index_N, out, bounds, segments, a, b,
            *grad.stride(), *rows.stride(), *out.stride(),
            ADD=add, PRECISION=_precision(rows), WIDE=_wide(rows), ROWS=by.rows, COLUMNS=by.columns, DEPTH=by.depth,
            num_warps=by.warps, num_stages=by.stages,
        )  # fmt: skip
    return out


def row_tiles(counts: Sequence[int], size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Runs of at most `size` rows of one segment: int64 (tiles, 3), segment, first row and end row of each."""
    count_S = np.asarray(counts, dtype=np.int64)
    end_S = np.cumsum(count_S)
    tiles_S = -(-count_S // size)
    segment = np.repeat(np.arange(count_S.size), tiles_S)
    inside = np.arange(segment.size) - np.repeat(np.cumsum(tiles_S) - tiles_S, tiles_S)
    begin = (end_S - count_S)[segment] + inside * size
    return np.stack([segment, begin, np.minimum(begin + size, end_S[segment])], axis=1)


def _programs(like: Tensor, work: int, by: Tiles) -> int:
    """Programs that go through the tiles: as many as all processors of the device hold at a time."""
    if not like.is_cuda:
        return min(work, _INTERPRETED_PROGRAMS)
    return min(work, by.resident * torch.cuda.get_device_properties(like.device).multi_processor_count)


def _precision(like: Tensor) -> str:
    """How fp32 factors are multiplied: as torch's own products are allowed to."""
    return "tf32" if like.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _wide(like: Tensor) -> bool:
    """Whether factors are widened first: the interpreter multiplies the bits of bf16 as integers."""
    return like.dtype == torch.bfloat16 and interpreted()


@triton.jit(do_not_specialize=["tiles"])
def _rows(
    rows_ptr: tl.tensor,
    index_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    place_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    tiles: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    rows_n: tl.tensor,
    rows_a: tl.tensor,
    weight_s: tl.tensor,
    weight_a: tl.tensor,
    weight_b: tl.tensor,
    out_n: tl.tensor,
    out_b: tl.tensor,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Columns count fastest: programs that run together share rows and go through one segment's matrix."""
    across = tl.cdiv(b, COLUMNS)
    for number in range(tl.program_id(0), tiles * across, tl.num_programs(0)):
        entry_ptr = tile_ptr + 3 * (number // across)
        n = tl.load(entry_ptr + 1) + tl.arange(0, ROWS)
        inside = n < tl.load(entry_ptr + 2)
        column = (number % across) * COLUMNS + tl.arange(0, COLUMNS)
        read = n
        if index_ptr is not None:
            read = tl.load(index_ptr + n, mask=inside, other=0).to(tl.int64)
        depth = tl.arange(0, DEPTH)
        left_ptr = rows_ptr + read[:, None] * rows_n + depth[None, :] * rows_a
        right_ptr = weight_ptr + tl.load(entry_ptr) * weight_s
        right_ptr += depth[:, None] * weight_a + column[None, :] * weight_b
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for begin in range(0, a, DEPTH):
            deep = begin + depth < a
            left = tl.load(left_ptr, mask=inside[:, None] & deep[None, :], other=0.0)
            right = tl.load(right_ptr, mask=deep[:, None] & (column < b)[None, :], other=0.0)
            if WIDE:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision=PRECISION)
            left_ptr += DEPTH * rows_a
            right_ptr += DEPTH * weight_a
        write = n
        if place_ptr is not None:
            write = tl.load(place_ptr + n, mask=inside, other=0).to(tl.int64)
        to_ptr = out_ptr + write[:, None] * out_n + column[None, :] * out_b
        tl.store(to_ptr, total.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (column < b)[None, :])


@triton.jit(do_not_specialize=["segments"])
def _weights(
    grad_ptr: tl.tensor,
    grad_index_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    index_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    segments: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    grad_n: tl.tensor,
    grad_b: tl.tensor,
    rows_n: tl.tensor,
    rows_a: tl.tensor,
    out_s: tl.tensor,
    out_b: tl.tensor,
    out_a: tl.tensor,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Tiles of one segment follow each other, so that its rows are read from cache; empty segments get zeros."""
    across = tl.cdiv(a, COLUMNS)
    each = tl.cdiv(b, ROWS) * across
    for number in range(tl.program_id(0), segments * each, tl.num_programs(0)):
        segment = number // each
        row = (number % each) // across * ROWS + tl.arange(0, ROWS)
        column = number % across * COLUMNS + tl.arange(0, COLUMNS)
        end = tl.load(bound_ptr + segment + 1)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for begin in range(tl.load(bound_ptr + segment), end, DEPTH):
            n = begin + tl.arange(0, DEPTH)
            inside = n < end
            from_grad = n
            if grad_index_ptr is not None:
                from_grad = tl.load(grad_index_ptr + n, mask=inside, other=0).to(tl.int64)
            from_rows = n
            if index_ptr is not None:
                from_rows = tl.load(index_ptr + n, mask=inside, other=0).to(tl.int64)
            left_ptr = grad_ptr + from_grad[None, :] * grad_n + row[:, None] * grad_b
            right_ptr = rows_ptr + from_rows[:, None] * rows_n + column[None, :] * rows_a
            left = tl.load(left_ptr, mask=inside[None, :] & (row < b)[:, None], other=0.0)
            right = tl.load(right_ptr, mask=inside[:, None] & (column < a)[None, :], other=0.0)
            if WIDE:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        mask = (row < b)[:, None] & (column < a)[None, :]
        to_ptr = out_ptr + segment.to(tl.int64) * out_s + row[:, None] * out_b + column[None, :] * out_a
        if ADD:
            total += tl.load(to_ptr, mask=mask, other=0.0).to(tl.float32)
        tl.store(to_ptr, total.to(out_ptr.dtype.element_ty), mask=mask)
