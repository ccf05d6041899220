"""Which kernel computes what on CUDA, and the tiles of grouped products: functions of shapes, without triton.

Nothing here has been measured: rates are those that published kernels reach on Hopper, and `benchmarks/gpu_check.py`
times both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Way = Literal["torch", "triton", "loop"]

SELECT_ROWS = 2**18  # rows to choose from, beyond which one expert could keep one processor busy for too long

_HOPPER = (9, 0)
_HBM_BYTES = 4.0e12  # a second, of a copy of rows
_GROUPED_FLOPS = 6.5e14  # a second, of torch's grouped product in bf16, whose loads are the hardware's own
_GATHERED_FLOPS = 4.5e14  # a second, of a product whose rows are loaded by address
_LAUNCH_S = 4e-6
_LOOP_ROWS = 64  # rows of a segment from which on one fp32 product of the vendor's library fills the device


@dataclass(frozen=True, kw_only=True)
class Product:
    """A grouped product as far as the choice depends on it.

    Attributes:
        rows: of all segments. a, b: widths of the operands' other dimensions; summed over are a (or the rows).
        gathered: rows of one operand are read by index.
        aligned: operands fit torch's grouped product (see `ops.grouped`).
    """

    dtype: torch.dtype
    rows: int
    segments: int
    a: int
    b: int
    gathered: bool = False
    aligned: bool = True

    @property
    def rows_each(self) -> int:
        """Rows of an average segment, at least 1."""
        return max(1, -(-self.rows // max(self.segments, 1)))


def chosen(product: Product, capability: tuple[int, int]) -> Way:
    """Who computes a product where Triton's kernels are usable.

    bf16 on Hopper goes to torch, packed first where rows are read by index, unless packing costs more than the slower
    loads of the kernel that gathers. fp32 goes segment by segment where segments are long.
    """
    if product.dtype == torch.float64:
        return "loop"
    if product.dtype == torch.float32:
        return "loop" if product.rows_each >= _LOOP_ROWS else "triton"
    if product.dtype != torch.bfloat16 or not product.aligned or capability[0] != _HOPPER[0]:
        return "triton"
    return "triton" if product.gathered and _gather_pays(product) else "torch"


def _gather_pays(product: Product) -> bool:
    """Whether writing packed rows and reading them again takes longer than what slower loads add."""
    packing = _LAUNCH_S + 2 * product.rows * product.a * product.dtype.itemsize / _HBM_BYTES
    flops = 2 * product.rows * product.a * product.b
    return packing > flops * (1 / _GATHERED_FLOPS - 1 / _GROUPED_FLOPS)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One program's part of a grouped product: rows x columns of the result, `depth` of the sum at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def resident(self) -> int:
        """Programs that a processor holds at a time, by registers: as compiled for Hopper."""
        return 1 if self.warps == 8 else 3


def tiles(product: Product, *, sums_rows: bool = False) -> Tiles:
    """Tiles of a product: as large as registers hold, no larger than segments are long or operands wide.

    Args:
        sums_rows: a weight gradient, whose tiles lie in (b, a).
    """
    wide = product.dtype == torch.float32
    if sums_rows:
        rows, columns, depth = product.b, product.a, product.rows_each
    else:
        rows, columns, depth = product.rows_each, product.b, product.a
    most = (64, 64, 32) if wide else (128, 128, 64)
    found = [_fit(size, limit) for size, limit in zip((rows, columns, depth), most, strict=True)]
    large = found[0] * found[1] >= 128 * 128
    return Tiles(
        rows=found[0], columns=found[1], depth=found[2], warps=8 if large else 4, stages=2 if wide else 3
    )


def _fit(size: int, most: int) -> int:
    """The power of two that holds so many, from 16 (the least that a tensor core takes) to `most`."""
    return min(most, max(16, 1 << max(size - 1, 0).bit_length()))
