"""The compiled CPU passes: found, checked and loaded once; or why they are not.

Without them everything works on torch's own operators, in more passes over memory.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lrmoe.ops.cpu.build import LIBRARY, SOURCES, checksum

log = logging.getLogger(__name__)

FORMATS = {torch.float32: 0, torch.bfloat16: 1}
LEVELS = ("any processor", "AVX2", "AVX-512")
_WIDEST = len(LEVELS) - 1
_PATH = SOURCES / LIBRARY

_lock = threading.Lock()
_level: int | None = _WIDEST  # None: switched off


@cache
def _load(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """The library, and what was found: the instruction set in use, or why there is no library.

    One that is there and cannot be used is told of in a log line: it was fast before.
    """
    if not path.exists():
        return None, "not built: the installation found no GCC (python -m lrmoe.ops.cpu tries again)"
    found, text = _open(path)
    if found is None:
        log.warning("the compiled CPU passes are not used, torch computes instead: %s", text)
    return found, text


def _open(path: Path) -> tuple[ctypes.CDLL | None, str]:
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"cannot be loaded: {error}"
    found.lrmoe_sources.restype = ctypes.c_char_p
    if found.lrmoe_sources() != checksum().encode():
        return None, "built from other sources (python -m lrmoe.ops.cpu builds anew)"
    _declare(found)
    return found, LEVELS[found.lrmoe_choose(_WIDEST)]


def _declare(found: ctypes.CDLL) -> None:
    """Types of arguments: without them addresses would be cut to 32 bits."""
    number, address, whole = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
    rows = (address, whole)  # data, distance of rows in bytes
    nothing = None
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "lrmoe_choose": (number, (number,)),
        "lrmoe_gate": (nothing, (number, number, *rows, *rows, address, whole, whole, number)),
        "lrmoe_gate_backward": (
            number,
            (number, number, *rows, *rows, whole, address, address, *rows, address, whole, whole, number),
        ),
        "lrmoe_norms": (nothing, (number, *rows, address, whole, whole, number)),
        "lrmoe_combine": (
            number,
            (number, *rows, whole, address, whole, address, address, *rows, whole, whole, number),
        ),
    }
    real = ctypes.c_double
    # Values, rows, counts, quotas, experts, units of four kinds, room.
    choice = (address, whole, address, address, whole, real, real, real, real, address, address, address)
    signatures |= {
        "lrmoe_inclusion": (number, (*choice, number)),
        "lrmoe_keep": (number, (*choice, address, number, address, address, number)),
        "lrmoe_score_sums": (
            number,
            (address, whole, address, *(whole,) * 4, address, real, address, address, number),
        ),
        "lrmoe_token_entries": (number, (address, whole, whole, whole, address, address, address, address)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments


def library() -> ctypes.CDLL | None:
    """The loaded library, None where there is none or it is switched off."""
    return None if _level is None else _load(_PATH)[0]


def state() -> tuple[bool, str]:
    """Whether the compiled passes serve here; the instruction set they use, or why they do not."""
    found, text = _load(_PATH)
    return found is not None, text


def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the passes between products of such rows are compiled, and so need no temporaries."""
    return device.type == "cpu" and dtype in FORMATS and library() is not None


@contextmanager
def limited(level: int | None) -> Iterator[None]:
    """Within, in the whole process: passes for LEVELS[level] at most; None: torch's operators.

    For tests and comparisons; not while a call is running in another thread.
    """
    before = _level
    _use(level)
    try:
        yield
    finally:
        _use(before)


def _use(level: int | None) -> None:
    global _level
    with _lock:
        _level = level
        found = library()
        if found is not None and level is not None:
            found.lrmoe_choose(level)


def serves(*tensors: Tensor) -> bool:
    """Whether rows of these tensors can be given to the library: plain CPU tensors of one dtype that it knows."""
    first = tensors[0].dtype
    return first in FORMATS and plain(*tensors) and all(t.dtype == first for t in tensors)


def plain(*tensors: Tensor) -> bool:
    """Whether the memory of these tensors can be read row by row: each row in one piece, none with a gradient due.

    Not while `torch.jit.trace` records: it would not see what is written.
    """
    return not torch._C._is_tracing() and all(
        type(t) in (Tensor, Parameter)
        and t.is_cpu
        and t.layout == torch.strided
        and _holds_its_numbers(t)
        and (t.dim() < 2 or t.stride(1) == 1 or t.shape[1] < 2)
        and not (t.requires_grad and torch.is_grad_enabled())
        for t in tensors
    )


def _holds_its_numbers(tensor: Tensor) -> bool:
    """Whether its memory is there and holds what the tensor says: no wrapper of torch.func, zeros or signs put off."""
    return not (
        torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor() or tensor.is_neg()
    )
