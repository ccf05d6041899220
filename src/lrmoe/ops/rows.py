"""Moving rows: gather by index, put back by index, weighted sum per token. No atomics: results repeat."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lrmoe.ops import fused

_MIXED_BLOCK = 512  # tokens per block where routing weights are wider than the rows


def gather_rows(source: Tensor, index_N: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`source[index]` as one contiguous (N, width) buffer; `source` may have any strides."""
    if out is None:
        out = source.new_empty((index_N.shape[0], source.shape[1]))
    moved = fused.move(source, index_N, out, scatter=False)
    return torch.index_select(source, 0, index_N, out=out) if moved is None else moved


def place_rows(target: Tensor, index_N: Tensor, rows: Tensor) -> Tensor:
    """`target[index] = rows` in place; the indices must be distinct."""
    if fused.move(rows, index_N, target, scatter=True) is None:
        words = _in_words(target, rows)
        if words is None:
            target.index_copy_(0, index_N, rows)
        else:
            words[0].index_copy_(0, index_N, words[1])
    return target


def _in_words(target: Tensor, rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same memory in words of 32 bits, where CPU tensors have 16: torch places those in half the time."""
    both = (target, rows)
    fit = all(
        t.device.type == "cpu"
        and t.dtype in (torch.bfloat16, torch.float16)
        and t.dim() == 2
        and t.stride(1) == 1
        and not any(n % 2 for n in (t.shape[1], t.stride(0), t.storage_offset()))
        and not t.requires_grad
        for t in both
    )
    return (target.view(torch.int32), rows.view(torch.int32)) if fit and target.dtype == rows.dtype else None


def combine(rows_NH: Tensor, index_M: Tensor, ends_T: Tensor, weight_M: Tensor | None = None) -> Tensor:
    """Sum of rows per token, in the given order and accumulated in at least fp32.

    Args:
        rows_NH: (N, H).
        index_M: int64 (M,), rows to add, all of token 0 first, then token 1, and so on.
        ends_T: int64 (T,), end of each token's entries in `index_M`; a token without entries gets zeros.
        weight_M: (M,) or None, factor of each entry; where it is wider than the rows (fp32 over bf16) it is applied
            in its own dtype.

    Returns:
        (T, H) in the dtype of the rows.
    """
    tokens, hidden = ends_T.shape[0], rows_NH.shape[1]
    if tokens == 0 or index_M.shape[0] == 0:
        return rows_NH.new_zeros((tokens, hidden))
    found = fused.combine(rows_NH, index_M, ends_T, weight_M)
    return _plain_combine(rows_NH, index_M, ends_T, weight_M) if found is None else found


def _plain_combine(rows_NH: Tensor, index_M: Tensor, ends_T: Tensor, weight_M: Tensor | None) -> Tensor:
    starts_T = F.pad(ends_T[:-1], (1, 0))
    if weight_M is not None and weight_M.element_size() < rows_NH.element_size():
        weight_M = weight_M.to(rows_NH.dtype)
    if weight_M is None or weight_M.dtype == rows_NH.dtype:
        return F.embedding_bag(index_M, rows_NH, starts_T, mode="sum", per_sample_weights=weight_M)
    return _combine_mixed(rows_NH, index_M, ends_T, weight_M)


def _combine_mixed(rows_NH: Tensor, index_M: Tensor, ends_T: Tensor, weight_M: Tensor) -> Tensor:
    """Blocks of tokens, their rows widened to the dtype of the weights: the whole is never widened at once."""
    tokens = ends_T.shape[0]
    out = rows_NH.new_empty((tokens, rows_NH.shape[1]))
    bounds = ends_T[_MIXED_BLOCK - 1 :: _MIXED_BLOCK].tolist()
    bounds += [index_M.shape[0]] if tokens % _MIXED_BLOCK else []
    begin = 0
    for block, end in enumerate(bounds):
        first = block * _MIXED_BLOCK
        ends = ends_T[first : first + _MIXED_BLOCK] - begin
        out[first : first + _MIXED_BLOCK] = _widened(rows_NH, index_M[begin:end], ends, weight_M[begin:end])
        begin = end
    return out


def _widened(rows_NH: Tensor, index_M: Tensor, ends_T: Tensor, weight_M: Tensor) -> Tensor:
    """Weighted sums of one block in the dtype of the weights; its rows end here."""
    wide = rows_NH.index_select(0, index_M).to(weight_M.dtype)
    return combine(wide, torch.arange(wide.shape[0], device=wide.device), ends_T, weight_M)


def row_norms(rows: Tensor) -> Tensor:
    """Euclidean norm of each row, fp32 (N,), computed in fp32 so that half-precision squares cannot overflow."""
    found = fused.norms(rows)
    if found is not None:
        return found
    return torch.linalg.vector_norm(
        rows, dim=1, dtype=torch.float32 if rows.dtype != torch.float64 else None
    ).float()


def abs_sums(rows: Tensor) -> Tensor:
    """Sum of absolute values of each row, fp32 (N,)."""
    found = fused.sums(rows)
    if found is not None:
        return found
    return torch.linalg.vector_norm(
        rows, ord=1, dim=1, dtype=torch.float32 if rows.dtype != torch.float64 else None
    ).float()
