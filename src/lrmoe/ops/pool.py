"""Large CPU buffers that come back when their last tensor dies, whoever held it, and serve the next call.

What autograd saves between forward and backward cannot be scratch: it lives until backward lets go of it. But a fresh
large buffer costs a page fault per 4 KiB, since the allocator gives memory of that size back to the system at once.
A tensor of this pool lies on a numpy array that nothing else holds: when the tensor's storage dies so does the array,
and its memory returns to the pool.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from lrmoe.ops.pages import empty

_SMALLEST_BYTES = 8 * 2**20  # smaller blocks stay with the allocator when they are freed
_KEEP_BYTES = 256 * 2**20  # most that waits for another call


class Pool:
    """Buffers of all threads; at most `keep_bytes` of them wait unused.

    Args:
        keep_bytes: most bytes that wait. smallest_bytes: smaller tensors are plain ones.
    """

    def __init__(self, keep_bytes: int = _KEEP_BYTES, smallest_bytes: int = _SMALLEST_BYTES) -> None:
        self._keep_bytes, self._smallest_bytes = keep_bytes, smallest_bytes
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[weakref.ref[Any], Tensor]] = {}
        self._back: deque[int] = deque()  # what died and is not taken back yet
        self._free: list[Tensor] = []  # the longest unused first

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor in the dtype and on the device of `like`, the caller's to keep."""
        size = math.prod(shape) * like.element_size()
        if like.device.type != "cpu" or size < self._smallest_bytes:
            return empty(shape, like)
        with self._lock:
            self._collect()
            base = self._fitting(size)
        return self._lend(base, size).view(like.dtype).view(shape)

    def release(self) -> None:
        """Give back to the system what waits."""
        with self._lock:
            self._collect()
            self._free.clear()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for another call."""
        with self._lock:
            self._collect()
            return sum(base.numel() for base in self._free)

    def _fitting(self, size: int) -> Tensor:
        """The smallest that waits and is neither too small nor more than twice what is asked for, or a new one."""
        fitting = [n for n, base in enumerate(self._free) if size <= base.numel() <= 2 * size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda n: self._free[n].numel()))
        with torch.inference_mode(False):  # a buffer made for an evaluation must serve training too
            return empty((size,), torch.empty(0, dtype=torch.uint8))

    def _lend(self, base: Tensor, size: int) -> Tensor:
        """A tensor on an array of its own over `base`, (size,) uint8."""
        array = base.numpy()[:size]
        key = id(base)
        self._lent[key] = weakref.ref(array, lambda _: self._died(key)), base
        return torch.from_numpy(array)

    def _died(self, key: int) -> None:
        """Take a buffer back, at once: a backward pass only frees, and what is beyond the limit is to go meanwhile.

        Runs wherever the last reference ends, even within `take`, so it may not wait: who has the lock sees to it then.
        """
        self._back.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Take back what died since, and let go of what has waited longest beyond the limit."""
        while self._back:
            self._free.append(self._lent.pop(self._back.popleft())[1])
        over = sum(base.numel() for base in self._free) - self._keep_bytes
        while over > 0:
            over -= self._free.pop(0).numel()
