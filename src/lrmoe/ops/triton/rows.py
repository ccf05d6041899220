"""Kernels that move rows, sum them per token, and take their norms. Twins: `lrmoe.ops.rows`.

Offsets are 64-bit. Indices are not checked: they come from the plan, and a wrong one reads or writes elsewhere. Nothing
is compiled anew for another number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrmoe.ops.triton.launch import on, tile


def gather_rows(
    source: Tensor, index_N: Tensor, *, out: Tensor | None = None, scale_N: Tensor | None = None
) -> Tensor:
    """`source[index]`, each row times its `scale_N` where given (product in fp32); `source` may have any strides."""
    if out is None:
        out = source.new_empty((index_N.shape[0], source.shape[1]))
    _launch_move(source, out, index_N, scale_N, gather=True)
    return out


def place_rows(target: Tensor, index_N: Tensor, rows: Tensor) -> Tensor:
    """`target[index] = rows` in place; the indices must be distinct."""
    _launch_move(rows, target, index_N, None, gather=False)
    return target


def combine(rows_NH: Tensor, index_M: Tensor, ends_T: Tensor, weight_M: Tensor | None = None) -> Tensor:
    """Sum of rows per token, one after the other in the given order, in fp32; as `lrmoe.ops.combine`."""
    tokens, hidden = ends_T.shape[0], rows_NH.shape[1]
    out = rows_NH.new_empty((tokens, hidden))
    if out.numel() == 0:
        return out
    block = tile(hidden, rows=1)
    with on(rows_NH):
        _combine[(tokens, block.parts(hidden))](
            rows_NH, index_M.contiguous(), ends_T.contiguous(),
            None if weight_M is None else weight_M.contiguous(), out,
            hidden, rows_NH.stride(0), rows_NH.stride(1),
            COLUMNS=block.columns, num_warps=block.warps(rows_NH.dtype),
        )  # fmt: skip
    return out


def row_norms(rows: Tensor) -> Tensor:
    """Euclidean norm of each row, fp32 (N,), computed in fp32."""
    return _reduced(rows, squares=True)


def abs_sums(rows: Tensor) -> Tensor:
    """Sum of absolute values of each row, fp32 (N,)."""
    return _reduced(rows, squares=False)


def _launch_move(
    source: Tensor, out: Tensor, index_N: Tensor, scale_N: Tensor | None, *, gather: bool
) -> None:
    rows, width = index_N.shape[0], source.shape[1]
    assert source.dtype == out.dtype, f"rows are {source.dtype}, their destination {out.dtype}"
    if rows == 0 or width == 0:
        return
    block = tile(width)
    with on(source):
        _move[(block.programs(rows), block.parts(width))](
            source, out, index_N.contiguous(), None if scale_N is None else scale_N.contiguous(),
            rows, width, source.stride(0), source.stride(1), out.stride(0), out.stride(1),
            GATHER=gather, ROWS=block.rows, COLUMNS=block.columns, num_warps=block.warps(source.dtype),
        )  # fmt: skip


def _reduced(rows: Tensor, *, squares: bool) -> Tensor:
    count, width = rows.shape
    out = torch.empty(count, dtype=torch.float32, device=rows.device)
    if count == 0:
        return out
    block = tile(width)
    with on(rows):
        _reduce[(block.programs(count),)](
            rows, out, count, width, rows.stride(0), rows.stride(1),
            SQUARES=squares, ROWS=block.rows, COLUMNS=block.columns, num_warps=block.warps(rows.dtype),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _move(
    source_ptr: tl.tensor,
    out_ptr: tl.tensor,
    index_ptr: tl.tensor,
    scale_ptr: tl.tensor | None,
    rows: tl.tensor,
    width: tl.tensor,
    source_row: tl.tensor,
    source_column: tl.tensor,
    out_row: tl.tensor,
    out_column: tl.tensor,
    GATHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile: row numbers of one side lie in `index`, the other side's count on."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = row < rows
    mask = here[:, None] & (column < width)[None, :]
    named = tl.load(index_ptr + row, mask=here, other=0).to(tl.int64)
    if GATHER:
        read = named
        write = row
    else:
        read = row
        write = named
    value = tl.load(source_ptr + read[:, None] * source_row + column[None, :] * source_column, mask=mask)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row, mask=here, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + write[:, None] * out_row + column[None, :] * out_column, value, mask=mask)


@triton.jit
def _combine(
    rows_ptr: tl.tensor,
    index_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    weight_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    width: tl.tensor,
    rows_row: tl.tensor,
    rows_column: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """One token's columns. The next row's number is on its way while a row is added."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    begin = tl.load(ends_ptr + token - 1, mask=token > 0, other=0)
    end = tl.load(ends_ptr + token)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    row = tl.load(index_ptr + begin, mask=begin < end, other=0).to(tl.int64)
    for entry in range(begin, end):
        value = tl.load(rows_ptr + row * rows_row + column * rows_column, mask=mask, other=0.0)
        row = tl.load(index_ptr + entry + 1, mask=entry + 1 < end, other=0).to(tl.int64)
        value = value.to(tl.float32)
        if weight_ptr is not None:
            value *= tl.load(weight_ptr + entry).to(tl.float32)
        total += value
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _reduce(
    rows_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    rows_row: tl.tensor,
    rows_column: tl.tensor,
    SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Whole rows, a tile of columns after the other: lanes add up apart and meet once at the end."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    begin_ptr = rows_ptr + row[:, None] * rows_row
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS).to(tl.int64)
        mask = here[:, None] & (column < width)[None, :]
        value = tl.load(begin_ptr + column[None, :] * rows_column, mask=mask, other=0.0).to(tl.float32)
        if SQUARES:
            total += value * value
        else:
            total += tl.abs(value)
    found = tl.sum(total, axis=1)
    if SQUARES:
        found = tl.sqrt_rn(found)
    tl.store(out_ptr + row, found, mask=here)
