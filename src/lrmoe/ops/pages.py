"""New large CPU buffers whose memory the kernel may hand out in pages of 2 MiB.

First touches of a new buffer cost a fault for every page: at 4 KiB more than filling it does. Linux decides what it has
to give (`/sys/kernel/mm/transparent_hugepage/enabled`: "madvise" and "always" give, "never" does not).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_LARGE = 4 * 2**20  # bytes; two pages at least lie inside
_PAGE = 4096
_MADV_HUGEPAGE = 14


def empty(shape: tuple[int, ...], like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor on the device and, by default, in the dtype of `like`."""
    return in_large_pages(torch.empty(shape, dtype=dtype or like.dtype, device=like.device))


def in_large_pages(fresh: Tensor) -> Tensor:
    """Ask for large pages under a buffer that was not touched yet; returns the buffer."""
    if type(fresh) is Tensor and fresh.device.type == "cpu" and fresh.nbytes >= _LARGE:
        advise, address = _advise(), fresh.data_ptr()
        begin, end = -(-address // _PAGE) * _PAGE, (address + fresh.nbytes) // _PAGE * _PAGE
        if advise is not None:
            advise(begin, end - begin, _MADV_HUGEPAGE)  # a kernel that cannot says so, and nothing changes
    return fresh


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
