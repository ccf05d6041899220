"""Bytes that a replayed rank really has allocated: what it holds by part, and everything, scratch included."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Held:
    """Tensors that a rank holds, by part, and the most bytes held at once.

    Attributes:
        most: largest sum so far. parts: bytes of each part at that moment.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[Tensor]] = {}
        self.most = 0
        self.parts: Mapping[str, int] = {}

    def add(self, part: str, *tensors: Tensor) -> None:
        """The rank holds more."""
        self._held.setdefault(part, []).extend(tensors)
        self._look()

    def replace(self, part: str, *tensors: Tensor) -> None:
        """The rank holds these under a part, and no others."""
        self._held[part] = list(tensors)
        self._look()

    def drop(self, part: str) -> None:
        """The rank gives a part back."""
        self._held.pop(part, None)

    def size(self, *parts: str) -> int:
        """Bytes held now under some parts."""
        return sum(t.nbytes for part in parts for t in self._held.get(part, ()))

    def restart(self) -> None:
        """Forget the peak, not what is held: between forward and backward."""
        self.most = 0
        self._look()

    def _look(self) -> None:
        parts = {part: sum(t.nbytes for t in tensors) for part, tensors in self._held.items()}
        if sum(parts.values()) > self.most:
            self.most, self.parts = sum(parts.values()), parts


class Allocated(TorchDispatchMode):
    """Bytes of all storages made by operations inside, and the most alive at once; on the CPU.

    Attributes:
        now: alive. most: the largest so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._book(tensor.untyped_storage(), given)
        return result

    def restart(self) -> None:
        """Forget the peak, not what is alive."""
        self.most = self.now

    def _book(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in given or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


class DeviceAllocated:
    """The same from the statistics of the CUDA allocator: bytes above those at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def most(self) -> int:
        """The largest since the last restart."""
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def restart(self) -> None:
        """Forget the peak, not what is alive."""
        torch.cuda.reset_peak_memory_stats(self._device)


@contextmanager
def allocations(device: torch.device) -> Iterator[Allocated | DeviceAllocated]:
    """Count what is allocated inside."""
    if device.type == "cuda":
        yield DeviceAllocated(device)
        return
    with Allocated() as counted:
        yield counted
