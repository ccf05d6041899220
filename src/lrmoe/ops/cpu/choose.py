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
    if found is None or not _fit(score_M, counts_L, quota_L):
        return None
    start, size, chance = _room(score_M, counts_L)
    failed = found.lrmoe_inclusion(
        *_asked(score_M, counts_L, quota_L, units),
        start.data_ptr(),
        size.data_ptr(),
        chance.data_ptr(),
        torch.get_num_threads(),
    )
    refuse(failed, score_M, counts_L)
    return chance


def keep(
    score_M: Tensor, counts_L: Tensor, quota_L: Tensor, offset_L: Tensor, units: Units
) -> tuple[Tensor, Tensor] | None:
    """The systematic sample, see `lrmoe.layer.selection.keep_sampled`.

    Args:
        score_M, counts_L, quota_L: as above. offset_L: int64, fixed-point uniform numbers in [0, 1).

    Returns:
        weights fp32 (M,), 1/pi of a kept row, else 0; costs fp64 (L, 4), see `lrmoe.layer.left_out.costs_of`.

    Raises:
        ValueError: the counts are not those of the rows.
    """
    found = library()
    if found is None or not _fit(score_M, counts_L, quota_L, offset_L):
        return None
    start, size, chance = _room(score_M, counts_L)
    weight_M, costs_L4 = torch.empty_like(score_M), chance.new_empty((counts_L.shape[0], 4))
    failed = found.lrmoe_keep(
        *_asked(score_M, counts_L, quota_L, units),
        start.data_ptr(),
        size.data_ptr(),
        chance.data_ptr(),
        offset_L.data_ptr(),
        units.unit_bits,
        weight_M.data_ptr(),
        costs_L4.data_ptr(),
        torch.get_num_threads(),
    )
    refuse(failed, score_M, counts_L)
    return weight_M, costs_L4


def _room(score_M: Tensor, counts_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An integer for every expert, and two fp64 numbers for every row."""
    size, chance = (torch.empty_like(score_M, dtype=torch.float64) for _ in range(2))
    return torch.empty_like(counts_L), size, chance


def _asked(
    score_M: Tensor, counts_L: Tensor, quota_L: Tensor, units: Units
) -> tuple[int, int, int, int, int, float, float, float, float]:
    """What both functions are given first."""
    return (
        score_M.data_ptr(),
        score_M.shape[0],
        counts_L.data_ptr(),
        quota_L.data_ptr(),
        counts_L.shape[0],
        float(2**units.unit_bits),
        float(2**units.score_bits),
        float(units.broken),
        units.floor,
    )


def _fit(score_M: Tensor, counts_L: Tensor, *given: Tensor) -> bool:
    """Whether these are plain contiguous CPU tensors of the dtypes that the library reads."""
    return listed(counts_L, *given) and listed(score_M, dtype=torch.float32)


def listed(*values: Tensor, dtype: torch.dtype = torch.int64) -> bool:
    """Whether these are vectors of one length and of that dtype, side by side in plain CPU memory."""
    return all(
        one.dtype == dtype
        and one.dim() == 1
        and one.shape == values[0].shape
        and one.is_contiguous()
        and plain(one)
        for one in values
    )


def refuse(failed: int, rows_M: Tensor, counts_L: Tensor) -> None:
    """Raise where the library found that counts do not fit."""
    if failed:
        raise ValueError(
            f"counts: {counts_L.tolist()} do not sum to {rows_M.shape[0]} rows; valid: one count >= 0 per expert"
        )
