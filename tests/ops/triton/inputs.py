"""Inputs of the kernels' tests: fresh random rows, poisoned destinations, and the device that takes them.

That is the CPU in triton's interpreter, which tests/conftest.py chooses; with `TRITON_INTERPRET=0` it is a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.ops.triton import interpreted

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cpu" if interpreted() else "cuda"


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def numbers(values: list[int]) -> Tensor:
    """An int64 table."""
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


class Poisoned:
    """A destination inside a larger buffer of NaN, rows apart, that tells what was written beside it."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        self._buffer = torch.full((rows + 4, width + 3), float("nan"), dtype=dtype, device=DEVICE)
        self.inside = self._buffer[2 : rows + 2, 1 : width + 1]

    def untouched(self) -> bool:
        """Whether all around is still NaN."""
        around = self._buffer.isnan()
        return (
            int(around.sum()) - int(self.inside.isnan().sum()) == self._buffer.numel() - self.inside.numel()
        )


def assert_close(found: Tensor, exact: Tensor, what: str = "") -> None:
    """Each entry within one unit in the last place of its dtype (1e-5 for fp32), and 2e-6 of the largest.

    The interpreter cuts bf16 where a GPU rounds: hence a whole unit, not half.
    """
    assert found.shape == exact.shape, f"{what}: {tuple(found.shape)} instead of {tuple(exact.shape)}"
    if not exact.numel():
        return
    unit = max(torch.finfo(found.dtype).eps, 1e-5)
    allowed = unit * exact.abs() + 2e-6 * exact.abs().max()
    off = (found.double() - exact.double()).abs()
    worst = (off / allowed.clamp_min(1e-30)).max()
    assert bool((off <= allowed).all()), f"{what}: {float(worst):.2f} of what is allowed"
