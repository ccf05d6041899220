"""Finding what is not finite, and marks of rows that cross.

Shape letters: N rows, W numbers of a row, R ranks, S stretches of rows, M rows of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lrmoe.debug._poison import poisoned

_BLOCK = 1024  # rows
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def not_finite(
    rows_NW: Tensor, index: Tensor | None, label: Callable[[int], str], *, unwritten_only: bool = False
) -> str | None:
    """What is wrong with the first bad row, None where all are well.

    Args:
        index: int64, the rows to look at; None: all.
        label: names a row.
        unwritten_only: look for memory that was never written, and let other numbers be.
    """
    if rows_NW.numel() == 0 or _sum_is_finite(rows_NW):
        return None
    values = rows_NW if index is None else rows_NW[index]
    bad_NW = poisoned(values) if unwritten_only else ~torch.isfinite(values)
    at = bad_NW.any(dim=1).nonzero().squeeze(1)
    if at.numel() == 0:
        return None
    first = int(at[0])
    value = values[first][bad_NW[first]][:1]
    what = "was never written" if bool(poisoned(value)) else f"holds {float(value)}"
    more = f" (the first of {at.numel()})" if at.numel() > 1 else ""
    return f"{label(first if index is None else int(index[first]))} {what}{more}"


def _sum_is_finite(rows: Tensor) -> bool:
    """One pass and no copy; an overflow of the sum only means to look again."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return math.isfinite(float(rows.sum(dtype=wide)))


def expert_of_row(index_M: Tensor | None, experts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Expert of each row of a buffer, int64 (M,), from the stretches of (seat, source) order and where its rows lie."""
    device = torch.device("cpu") if index_M is None else index_M.device
    owner_M = torch.tensor(list(experts), device=device).repeat_interleave(
        torch.tensor(list(counts), device=device)
    )
    return owner_M if index_M is None else torch.zeros_like(owner_M).index_copy_(0, index_M, owner_M)


def digests(rows: Tensor, counts_R: Sequence[int]) -> list[int]:
    """A number for the bits of each rank's stretch of rows, which other rows or another order of them change."""
    if rows.numel() == 0:
        return [0] * len(counts_R)
    bits = rows.detach().reshape(rows.shape[0], -1).contiguous().view(_INTEGERS[rows.element_size()])
    place = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    # A block at a time: widened, the whole would be several times the rows.
    sum_N = torch.cat([(block.long() * place).sum(dim=1) for block in bits.split(_BLOCK)])
    return [
        int((part * torch.arange(1, part.shape[0] + 1, device=part.device)).sum())
        for part in sum_N.split(list(counts_R))
    ]
