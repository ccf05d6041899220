"""Grouped matrix products over variable segments of rows: exact row counts, no padding, zeros for empty segments.

Rows lie segment after segment: segment s has `counts[s]` rows and belongs to matrix s of the weight stack. Counts are
host integers, so that no call reads a device. On CUDA `triton.rule` says who computes: torch's own grouped product
where it is exact and fast (bf16 with aligned operands), or a kernel. Elsewhere a loop over the segments with rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lrmoe.ops.host import upload
from lrmoe.ops.triton import usable
from lrmoe.ops.triton.rule import Product, Way, chosen

_ALIGNMENT = 16  # bytes, asked of base pointers and strides by the CUDA kernel
_MOST_ROWS = 2**31 - 1  # the CUDA kernel counts rows in 32 bits
_MOST_SEGMENTS = 1023  # of torch's grouped product on CUDA
_NOT_BY_INDEX = "rows are packed first where no kernel reads them by index"


def grouped_mm(
    rows_NA: Tensor,
    weight_SBA: Tensor,
    counts: Sequence[int],
    *,
    out: Tensor | None = None,
    index_N: Tensor | None = None,
) -> Tensor:
    """Forward: `out[segment s] = rows[segment s] @ weight[s].T`.

    Args:
        rows_NA: (N, A), N = sum(counts).
        weight_SBA: (S, B, A), one matrix per segment, same dtype as the rows.
        counts: S row counts.
        out: optional (N, B) destination, rows contiguous.
        index_N: row n is `rows[index[n]]`; only where `reads_by_index` agrees.

    Returns:
        (N, B), every row written.
    """
    return _product(rows_NA, weight_SBA.transpose(1, 2), counts, out, index_N)


def grouped_mm_input(
    grad_NB: Tensor, weight_SBA: Tensor, counts: Sequence[int], *, out: Tensor | None = None
) -> Tensor:
    """Input gradient: `out[segment s] = grad[segment s] @ weight[s]`, (N, B) -> (N, A)."""
    return _product(grad_NB, weight_SBA, counts, out)


def grouped_mm_weight(
    grad_NB: Tensor,
    rows_NA: Tensor,
    counts: Sequence[int],
    *,
    out: Tensor | None = None,
    add: bool = False,
    index_N: Tensor | None = None,
) -> Tensor:
    """Weight gradient: `out[s] = grad[segment s].T @ rows[segment s]`, (S, B, A); exact zeros for empty segments.

    With `add` the products are added to `out` instead, which may then be wider than the rows (fp32 over bf16).
    Row n is `rows[index[n]]` where an index is given, as `reads_by_index` must allow.
    """
    assert out is not None or not add, "nothing to add to"
    shape = (len(counts), grad_NB.shape[1], rows_NA.shape[1])
    way = _way(grad_NB, rows_NA, counts, shape[1:], sums_rows=True, gathered=index_N is not None)
    assert index_N is None or way == "triton", _NOT_BY_INDEX
    if way == "torch":
        found = _cuda_grouped(grad_NB.t(), rows_NA, counts)
        _zero_empty(found, counts)  # a kernel may leave them as they were
        if out is None:
            return found.contiguous()
        return out.add_(found) if add else out.copy_(found)
    if out is None:
        out = grad_NB.new_empty(shape)
    if way == "triton":
        by_kernel: Tensor = _kernels().grouped_mm_weight(
            grad_NB, rows_NA, counts, out=out, add=add, index_N=index_N
        )
        return by_kernel
    for s, begin, end in _segments(counts):
        _weight_product(grad_NB[begin:end].t(), rows_NA[begin:end], out[s], add)
    if not add:
        _zero_empty(out, counts)
    return out


def _zero_empty(stack: Tensor, counts: Sequence[int]) -> None:
    """Zeros into the matrices of segments without rows."""
    for s, count in enumerate(counts):
        if count == 0:
            stack[s].zero_()


def _weight_product(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    if out.dtype != left.dtype:
        found = torch.mm(left, right)
        out.add_(found) if add else out.copy_(found)
    elif add:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)


def reads_by_index(
    source: Tensor, other: Tensor, counts: Sequence[int], shape_BA: Sequence[int], *, sums_rows: bool = False
) -> bool:
    """Whether a product should read rows of `source` where they lie rather than be given a packed copy.

    Args:
        other: the weights (forward), or with `sums_rows` the gradient rows (weight gradient).
        shape_BA: of one matrix.
    """
    if not source.is_cuda:
        return False
    left, right = (other, source) if sums_rows else (source, other)
    return _way(left, right, counts, shape_BA, sums_rows=sums_rows, gathered=True) == "triton"


def _product(
    rows_NA: Tensor,
    weight_SAB: Tensor,
    counts: Sequence[int],
    out: Tensor | None,
    index_N: Tensor | None = None,
) -> Tensor:
    way = _way(rows_NA, weight_SAB, counts, weight_SAB.shape[:0:-1], gathered=index_N is not None)
    if way == "torch" and index_N is None:
        found = _cuda_grouped(rows_NA, weight_SAB, counts)
        return found.contiguous() if out is None else out.copy_(found)
    if out is None:
        out = rows_NA.new_empty((sum(counts), weight_SAB.shape[2]))
    if way == "triton":
        by_kernel: Tensor = _kernels().grouped_mm(rows_NA, weight_SAB, counts, out=out, index_N=index_N)
        return by_kernel
    assert index_N is None, _NOT_BY_INDEX
    for s, begin, end in _segments(counts):
        torch.mm(rows_NA[begin:end], weight_SAB[s], out=out[begin:end])
    return out


def _way(
    left: Tensor,
    right: Tensor,
    counts: Sequence[int],
    shape_BA: Sequence[int],
    *,
    sums_rows: bool = False,
    gathered: bool = False,
) -> Way:
    """Who computes a product; see `triton.rule.Product`."""
    if not left.is_cuda:
        return "loop"
    fits = _fast(left, right) and fits_offsets(counts) and len(counts) <= _MOST_SEGMENTS
    if sums_rows:
        fits = fits and (all(_row_after_row(t) for t in (left, right)) or _whole_tiles(counts))
    if usable(left, right) is not None:
        return "torch" if fits else "loop"
    b, a = shape_BA
    product = Product(
        dtype=left.dtype,
        rows=sum(counts),
        segments=len(counts),
        a=a,
        b=b,
        gathered=gathered,
        aligned=fits,
    )
    return chosen(product, torch.cuda.get_device_capability(left.device))


def _kernels() -> ModuleType:
    from lrmoe.ops.triton import grouped  # loads triton

    return grouped


def _row_after_row(rows: Tensor) -> bool:
    """Whether a row's entries lie together, so that every segment begins where a row does: aligned, as strides are."""
    return rows.stride(1) == 1 < rows.stride(0)


def _whole_tiles(counts: Sequence[int]) -> bool:
    """Whether segments begin at aligned rows also where a column's entries lie together."""
    return all(count % 8 == 0 for count in counts)


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
    ends = upload(np.fromiter(accumulate(counts), dtype=np.int32), left.device)
    return F.grouped_mm(left, right, offs=ends)
