"""Memory that nobody has written yet, filled with a NaN that can be told from one that was computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# dtype -> the integers of its width, and a quiet NaN with a payload that no operation makes by itself.
_MARKS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF8_DEB6_C0DE_DEB6),
    torch.float32: (torch.int32, 0x7FC0_DEB6),
    torch.bfloat16: (torch.int16, 0x7FEB),
    torch.float16: (torch.int16, 0x7EEB),
}
_MAKERS: frozenset[Callable[..., Any]] = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
)


def poison(tensor: Tensor) -> None:
    """Fill with the mark (floats), with the largest value (integers); other dtypes stay as they are."""
    if tensor.dtype in _MARKS:
        kind, mark = _MARKS[tensor.dtype]
        tensor.detach().view(kind).fill_(mark)
    elif not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def poisoned(tensor: Tensor) -> Tensor:
    """Where the mark stands, bool in the shape of `tensor`."""
    if tensor.dtype not in _MARKS:
        return torch.zeros_like(tensor, dtype=torch.bool)
    kind, mark = _MARKS[tensor.dtype]
    return tensor.detach().view(kind) == mark


class PoisonEmpty(TorchFunctionMode):
    """Within, every tensor that this thread allocates without filling it is poisoned."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`; fill what it made."""
        made = func(*args, **(kwargs or {}))
        if func in _MAKERS:
            poison(made)
        return made
