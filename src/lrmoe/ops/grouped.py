"""Grouped matrix products over variable segments of rows: exact row counts, no padding, zeros for empty segments.

Rows lie segment after segment: segment s has `counts[s]` rows and belongs to matrix s of the weight stack. Counts are
host integers, so that no call reads a device. torch's own grouped product serves where it is exact and fast (bf16 on
CUDA with aligned operands); elsewhere a loop over the segments that hold rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 16  # bytes, asked of base pointers and strides by the CUDA kernel
_MOST_ROWS = 2**31 - 1  # the CUDA kernel counts rows in 32 bits


def grouped_mm(
    rows_NA: Tensor, weight_SBA: Tensor, counts: Sequence[int], *, out: Tensor | None = None
) -> Tensor:
    """Forward: `out[segment s] = rows[segment s] @ weight[s].T`.

    Args:
        rows_NA: (N, A), N = sum(counts).
        weight_SBA: (S, B, A), one matrix per segment, same dtype as the rows.
        counts: S row counts.
        out: optional (N, B) destination, rows contiguous.

    Returns:
        (N, B), every row written.
    """
    return _product(rows_NA, weight_SBA.transpose(1, 2), counts, out)


def grouped_mm_input(
    grad_NB: Tensor, weight_SBA: Tensor, counts: Sequence[int], *, out: Tensor | None = None
) -> Tensor:
    """Input gradient: `out[segment s] = grad[segment s] @ weight[s]`, (N, B) -> (N, A)."""
    return _product(grad_NB, weight_SBA, counts, out)


def grouped_mm_weight(
    grad_NB: Tensor, rows_NA: Tensor, counts: Sequence[int], *, out: Tensor, add: bool = False
) -> Tensor:
    """Weight gradient: `out[s] = grad[segment s].T @ rows[segment s]`, (S, B, A); exact zeros for empty segments.

    With `add` the products are added to `out` instead, which may then be wider than the rows (fp32 over bf16).
    """
    if _fast(grad_NB, rows_NA) and fits_offsets(counts) and all(count % 8 == 0 for count in counts):
        found = _cuda_grouped(grad_NB.t(), rows_NA, counts)
        out.add_(found) if add else out.copy_(found)
    else:
        for s, begin, end in _segments(counts):
            _weight_product(grad_NB[begin:end].t(), rows_NA[begin:end], out[s], add)
    if not add:
        for s, count in enumerate(counts):
            if count == 0:
                out[s].zero_()
    return out


def _weight_product(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    if out.dtype != left.dtype:
        found = torch.mm(left, right)
        out.add_(found) if add else out.copy_(found)
    elif add:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)


def _product(rows_NA: Tensor, weight_SAB: Tensor, counts: Sequence[int], out: Tensor | None) -> Tensor:
    if out is None:
        out = rows_NA.new_empty((rows_NA.shape[0], weight_SAB.shape[2]))
    if _fast(rows_NA, weight_SAB) and fits_offsets(counts):
        return out.copy_(_cuda_grouped(rows_NA, weight_SAB, counts))
    for s, begin, end in _segments(counts):
        torch.mm(rows_NA[begin:end], weight_SAB[s], out=out[begin:end])
    return out


def fits_offsets(counts: Sequence[int]) -> bool:
    """Whether row numbers of these segments fit the offsets of torch's grouped product; more rows run in a loop."""
    return sum(counts) <= _MOST_ROWS


def _segments(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(segment, first row, end row) of every segment that holds rows."""
    end = 0
    for s, count in enumerate(counts):
        begin, end = end, end + count
        if count:
            yield s, begin, end


def _fast(*operands: Tensor) -> bool:
    return all(
        t.is_cuda
        and t.dtype == torch.bfloat16
        and t.numel() > 0
        and t.data_ptr() % _ALIGNMENT == 0
        and _strides_fit(t)
        for t in operands
    )


def _strides_fit(t: Tensor) -> bool:
    inner = [stride for stride in t.stride() if stride != 1]
    return 1 in t.stride() and all(
        stride > 0 and stride * t.element_size() % _ALIGNMENT == 0 for stride in inner
    )


def _cuda_grouped(left: Tensor, right: Tensor, counts: Sequence[int]) -> Tensor:
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(left.device, non_blocking=True)
    return F.grouped_mm(left, right, offs=ends)
