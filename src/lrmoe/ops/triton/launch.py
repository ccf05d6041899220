"""When Triton kernels are used, on which device they are launched, and how large their tiles are.

Loads no triton before a CUDA tensor asks for a kernel.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_CAPABILITY = (8, 0)  # of the GPU: below, bf16 is not in hardware
_LEAST_COLUMNS, _MOST_COLUMNS = 16, 1024
_MOST_ROWS = 32
_WARP_BYTES = 32 * 16


@functools.cache
def missing() -> str | None:
    """Why triton cannot be imported, or None."""
    try:
        importlib.import_module("triton")
    except Exception as error:  # a broken installation fails in ways of its own
        return f"triton cannot be imported ({type(error).__name__}: {str(error).splitlines()[0]})"
    return None


def interpreted() -> bool:
    """Whether kernels run in triton's interpreter, which takes CPU tensors; imports triton."""
    return missing() is None and bool(importlib.import_module("triton").knobs.runtime.interpret)


class _Switch:
    """Whether kernels may be used: by every thread, because backward runs in threads of autograd's."""

    def __init__(self) -> None:
        self.on = True


_switch = _Switch()


@contextmanager
def off() -> Iterator[None]:
    """Within, torch computes everything, in every thread of this process: to compare, or to rule kernels out."""
    before, _switch.on = _switch.on, False
    try:
        yield
    finally:
        _switch.on = before


def usable(*tensors: Tensor) -> str | None:
    """Why kernels are not used for these tensors, or None where they are.

    The first CUDA tensor of a device tries a kernel on it: one that does not compile or gives wrong numbers there is
    named in a log line once, and that device stays with torch.
    """
    for tensor in tensors:
        if not tensor.is_cuda:
            return f"tensors are on {tensor.device.type}, kernels need cuda"
        if isinstance(tensor, Tensor) and type(tensor) not in (Tensor, Parameter):
            return f"kernels read memory, which a {type(tensor).__name__} may not have"
        if tensor.dtype not in DTYPES:
            return f"no kernel for {str(tensor.dtype).removeprefix('torch.')}"
        if tensor.requires_grad and torch.is_grad_enabled():
            return "kernels are not differentiable, and a gradient is asked for"
    if not _switch.on:
        return "switched off"
    return missing() or next(filter(None, map(_device_trouble, {t.device for t in tensors})), None)


@functools.cache
def _device_trouble(device: torch.device) -> str | None:
    """Why no kernel runs on a CUDA device, or None: tried with one row."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    trouble = _trial(device)
    if trouble is not None:
        log.warning("no Triton kernels on %s, torch computes instead: %s", device, trouble)
    return trouble


def _trial(device: torch.device) -> str | None:
    """Compile and run a kernel; needs a C compiler, which triton builds its launcher with."""
    try:
        kernels = importlib.import_module("lrmoe.ops.triton.rows")
        found = float(kernels.row_norms(torch.full((1, 9), 2.0, device=device)))
    except Exception as error:  # whatever the compiler, its absence, or the driver says
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return None if abs(found - 6.0) < 1e-4 else f"wrong numbers ({found} instead of 6.0)"


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one: triton launches on the current device and its stream."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows and columns one program works on at a time, both powers of two."""

    rows: int
    columns: int

    def programs(self, rows: int) -> int:
        """Programs that cover so many rows."""
        return -(-rows // self.rows)

    def parts(self, width: int) -> int:
        """Tiles that cover so many columns."""
        return -(-width // self.columns)

    def warps(self, dtype: torch.dtype) -> int:
        """Warps of a program: each thread has at least 16 bytes of the tile, one load, until there are four."""
        return max(1, min(4, self.rows * self.columns * dtype.itemsize // _WARP_BYTES))


@functools.lru_cache(maxsize=256)
def tile(width: int, *, rows: int = _MOST_ROWS, elements: int = 4096) -> Tile:
    """The tile for rows of this width: at most so many rows, and so many elements.

    A function of the width alone, so that a row's sums are added in one order whatever rows lie beside it. Columns are
    the largest power of two that leaves at most one lane in eight idle: 256 for a width of 768, not 1024.
    """
    whole = 1 << max(width - 1, 0).bit_length()
    largest = min(whole, _MOST_COLUMNS)
    choices = [largest] + [c for c in (largest // 2, largest // 4, largest // 8) if c >= _LEAST_COLUMNS]
    spread = {columns: -(-width // columns) * columns for columns in choices}
    columns = next((c for c in choices if 8 * spread[c] <= 9 * width), min(choices, key=spread.__getitem__))
    return Tile(rows=max(1, min(rows, elements // columns)), columns=columns)
