"""Sums and lists over pairs by compiled code; None, and nothing done, where the library cannot serve.

Shape letters: M rows, X experts, F columns, N pairs, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.ops.cpu.choose import listed, refuse
from lrmoe.ops.cpu.library import library, plain

_MOST = 2**31 - 1


def score_sums(
    score_M: Tensor,
    counts_X: Tensor,
    *,
    most: int,
    bins: int,
    lowest: int,
    past_XF: Tensor | None = None,
    decay: float = 0.0,
) -> Tensor | None:
    """Sums over scores of each expert, fp64 (X, F), F = 3 + 2 * bins, see `lrmoe.layer.learned.score_sums`.

    Args:
        score_M: fp32, expert after expert. counts_X: int64, rows of each.
        most: rows of an expert that are read: of more every k-th, counted k times.
        bins, lowest: see `lrmoe.planning.score_bins`.
        past_XF: fp64, sums of before: theirs times `decay` are added, or they stay where no score is positive.

    Raises:
        ValueError: the counts are not those of the rows.
    """
    found = library()
    if found is None or not (listed(counts_X) and listed(score_M, dtype=torch.float32)):
        return None
    shape = (counts_X.shape[0], 3 + 2 * bins)
    if past_XF is not None and not _table(past_XF, shape):
        return None
    start, sums_XF = torch.empty_like(counts_X), score_M.new_empty(shape, dtype=torch.float64)
    failed = found.lrmoe_score_sums(
        score_M.data_ptr(),
        score_M.shape[0],
        counts_X.data_ptr(),
        counts_X.shape[0],
        most,
        bins,
        lowest,
        None if past_XF is None else past_XF.data_ptr(),
        decay,
        start.data_ptr(),
        sums_XF.data_ptr(),
        torch.get_num_threads(),
    )
    refuse(failed, score_M, counts_X)
    return sums_XF


def _table(past_XF: Tensor, shape: tuple[int, int]) -> bool:
    """Whether these are fp64 numbers of that shape, side by side in plain CPU memory."""
    fits = past_XF.dtype == torch.float64 and past_XF.shape == shape
    return fits and past_XF.is_contiguous() and plain(past_XF)


def token_entries(pair_N: Tensor, tokens: int, slots: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Pairs sorted by (token, slot): rows int64 (N,), flat pair ids int64 (N,), end of each token's int64 (T,).

    Args:
        pair_N: int64, flat pair id of each row, no pair twice.

    Raises:
        IndexError: a pair is out of range or comes twice.
    """
    found = library()
    if found is None or tokens * slots > _MOST or not listed(pair_N):
        return None
    place = pair_N.new_empty(tokens * slots, dtype=torch.int32)
    row_N, sorted_N = torch.empty_like(pair_N), torch.empty_like(pair_N)
    ends_T = pair_N.new_empty(tokens)
    failed = found.lrmoe_token_entries(
        pair_N.data_ptr(),
        pair_N.shape[0],
        tokens,
        slots,
        place.data_ptr(),
        row_N.data_ptr(),
        sorted_N.data_ptr(),
        ends_T.data_ptr(),
    )
    if failed:
        raise IndexError(f"token_entries: a pair is out of [0, {tokens * slots}) or comes twice")
    return row_N, sorted_N, ends_T
