"""Choosing rows by compiled code, expert after expert; None, and nothing done, where the library cannot serve.

Shape letters: M rows, L experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.ops.cpu.library import library, plain
from lrmoe.ops.units import Units


def inclusion(score_M: Tensor, counts_L: Tensor, quota_L: Tensor, units: Units) -> Tensor | None:
    """Inclusion probabilities, whole fp64 (M,), see `lrmoe.layer.selection.inclusion`.

    Args:
        score_M: fp32, expert after expert. counts_L, quota_L: int64, rows of each and how many to keep.

    Raises:
        ValueError: the counts are not those of the rows.
    """
    found = library()
    if found is None or not _fit(score_M, torch.float32, counts_L, quota_L):
        return None
    start = torch.empty_like(counts_L)
    size, chance = (torch.empty(score_M.shape, dtype=torch.float64) for _ in range(2))
    failed = found.lrmoe_inclusion(
        score_M.data_ptr(),
        score_M.shape[0],
        counts_L.data_ptr(),
        quota_L.data_ptr(),
        counts_L.shape[0],
        float(2**units.unit_bits),
        float(2**units.score_bits),
        float(units.broken),
        units.floor,
        start.data_ptr(),
        size.data_ptr(),
        chance.data_ptr(),
        torch.get_num_threads(),
    )
    return _unless(failed, chance, counts_L)


def sample(chance_M: Tensor, counts_L: Tensor, offset_L: Tensor, units: Units) -> Tensor | None:
    """Systematic sample, fp64 (M,), 1 where a row is taken, see `lrmoe.layer.selection.systematic`.

    Args:
        chance_M: what `inclusion` gave. offset_L: int64, fixed-point uniform numbers in [0, 1).
    """
    found = library()
    if found is None or not _fit(chance_M, torch.float64, counts_L, offset_L):
        return None
    start, kept = torch.empty_like(counts_L), torch.empty_like(chance_M)
    failed = found.lrmoe_sample(
        chance_M.data_ptr(),
        chance_M.shape[0],
        counts_L.data_ptr(),
        offset_L.data_ptr(),
        counts_L.shape[0],
        units.unit_bits,
        start.data_ptr(),
        kept.data_ptr(),
        torch.get_num_threads(),
    )
    return _unless(failed, kept, counts_L)


def _fit(value_M: Tensor, dtype: torch.dtype, counts_L: Tensor, given_L: Tensor) -> bool:
    """Whether these are plain contiguous CPU tensors of the dtypes that the library reads."""
    whole = counts_L.dtype == given_L.dtype == torch.int64 and counts_L.shape == given_L.shape
    lies = all(one.is_contiguous() and plain(one) for one in (value_M, counts_L, given_L))
    return whole and lies and value_M.dtype == dtype and value_M.dim() == counts_L.dim() == 1


def _unless(failed: int, found: Tensor, counts_L: Tensor) -> Tensor:
    if failed:
        raise ValueError(
            f"counts: {counts_L.tolist()} do not sum to {found.shape[0]} rows; valid: one count >= 0 per expert"
        )
    return found
