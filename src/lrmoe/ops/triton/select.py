"""Kept rows of every expert in one launch: no sort, no host read. Twin: `lrmoe.layer.selection`, bit for bit.

One program per expert walks over its rows a block at a time. Scores are compared and summed as integers, and what is
not an integer is one multiplication or division in fp64, rounded as IEEE says: there is nothing to round differently.

    topk      threshold by radix: a histogram of 8 bits of the key, four times; then mark, ties in order
    sampled   largest score, floor, then rounds that fix what reaches probability 1; then prefix sums

Rows lie expert after expert. A long expert keeps one program busy for long, so that rows have a limit
(`rule.SELECT_ROWS`).

Shape letters: M rows, L experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.ops.triton import select_sampled, select_top
from lrmoe.ops.triton.launch import on
from lrmoe.ops.units import Units

_BLOCKS = (512, 2048)  # rows of a block, least (experts differ, and idle lanes cost little) and most


def keep_top(score_M: Tensor, counts_L: Tensor, quota_L: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of highest score of each expert, non-finite ones first, the earlier of equals.

    Args:
        score_M: fp32 (M,). counts_L, quota_L: int64 (L,), rows of each expert, and how many to keep.

    Returns:
        weights fp32 (M,), 1 or 0; costs fp64 (L, 4): energy, what is left out of it, 0, non-finite scores.
    """
    weight, costs = torch.empty_like(score_M, dtype=torch.float32), _costs(counts_L)
    if score_M.shape[0]:
        block = block_rows(score_M.shape[0], counts_L.shape[0])
        with on(score_M):
            select_top.keep_top[(counts_L.shape[0],)](
                score_M.contiguous(), counts_L.cumsum(0), counts_L, quota_L, weight, costs,
                BLOCK=block, num_warps=warps(block),
            )  # fmt: skip
    return weight, costs


def keep_sampled(
    score_M: Tensor, counts_L: Tensor, quota_L: Tensor, offset_L: Tensor, units: Units
) -> tuple[Tensor, Tensor]:
    """Exactly the quota of each expert by systematic sampling.

    Args:
        score_M, counts_L, quota_L: as above. offset_L: int64 (L,), uniform numbers in units.

    Returns:
        weights fp32 (M,), 1/pi or 0; costs fp64 (L, 4): energy, what is left out of it, added variance, non-finite
        scores.
    """
    weight, costs = torch.empty_like(score_M, dtype=torch.float32), _costs(counts_L)
    _sample(score_M, counts_L, quota_L, offset_L, None, weight, costs, units)
    return weight, costs


def inclusion(score_M: Tensor, counts_L: Tensor, quota_L: Tensor, units: Units) -> Tensor:
    """Inclusion probabilities, int64 (M,) in units; inside each expert they sum to its quota exactly."""
    chance = torch.empty_like(score_M, dtype=torch.int64)
    _sample(score_M, counts_L, quota_L, None, chance, None, None, units)
    return chance


def block_rows(rows: int, experts: int) -> int:
    """Rows of a block: an average expert's in one, within limits; a power of two."""
    least, most = _BLOCKS
    return min(most, max(least, 1 << max(-(-rows // experts) - 1, 0).bit_length()))


def warps(block: int) -> int:
    """Warps of a program: at most 8 rows a thread, whose fp64 and int64 values stay in registers."""
    return min(8, max(1, block // 256))


def _costs(counts_L: Tensor) -> Tensor:
    return torch.zeros((counts_L.shape[0], 4), dtype=torch.float64, device=counts_L.device)


def _sample(
    score_M: Tensor,
    counts_L: Tensor,
    quota_L: Tensor,
    offset_L: Tensor | None,
    chance: Tensor | None,
    weight: Tensor | None,
    costs: Tensor | None,
    units: Units,
) -> None:
    if not score_M.shape[0]:
        return
    block = block_rows(score_M.shape[0], counts_L.shape[0])
    with on(score_M):
        select_sampled.keep_sampled[(counts_L.shape[0],)](
            score_M.contiguous(), counts_L.cumsum(0), counts_L, quota_L, offset_L, chance, weight, costs,
            UNIT_BITS=units.unit_bits, SCORE_BITS=units.score_bits, BROKEN=units.broken, FLOOR=units.floor,
            BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
