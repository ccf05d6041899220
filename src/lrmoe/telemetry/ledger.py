"""Bytes that each part of a layer call really allocated, and the most that was alive at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

PARTS = ("weights", "grads", "replicas", "dispatched", "stash", "backward", "outputs")
_FORWARD = ("replicas", "dispatched", "stash", "outputs")
_BACKWARD = ("replicas", "dispatched", "stash", "backward")  # received inputs stay for weight gradients


class Ledger:
    """Counts the bytes of tensors, per part; the same memory under one part counts once.

    Attributes:
        sealed: whether the forward's bytes are booked and those of the backward are being added.
        current: bytes of booked storages that are alive, each counted once whatever parts it is booked under.
        peak: the most of `current`; on CUDA the most that the allocator had in use when something was booked, beyond
            what it had before the first booking.
    """

    def __init__(self) -> None:
        self.current = self.peak = 0
        self._base: int | None = None
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._bytes: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._seen: dict[tuple[str, int, int], weakref.ref[Any]] = {}
        self.sealed = False

    def add(self, part: str, *tensors: Tensor | None) -> None:
        """Book the bytes of `tensors` under a part of PARTS."""
        for tensor in tensors:
            if tensor is None or tensor.numel() == 0:
                continue
            key, storage = (part, tensor.data_ptr(), tensor.nbytes), tensor.untyped_storage()
            known = self._seen.get(key)
            if known is None or known() is not storage:  # a new one may lie where one that is gone has lain
                self._seen[key] = weakref.ref(storage)
                self._bytes[part] += tensor.nbytes
            self.follow(tensor)

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now until it is freed, under no part: scratch."""
        if tensor.is_cuda:
            used = torch.cuda.memory_allocated(tensor.device)
            self._base = used - tensor.nbytes if self._base is None else self._base
            self.current = used - self._base
        else:
            self._follow(tensor.untyped_storage())
        self.peak = max(self.peak, self.current)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive or not size:
            return
        self.current += size
        self._alive[key] = (size, weakref.ref(storage, lambda _: self._freed(key)))

    def _freed(self, key: int) -> None:
        self.current -= self._alive.pop(key)[0]

    def seal(self) -> None:
        """Forget addresses and keep the sums, between forward and backward: what stays is booked under both."""
        self._seen.clear()
        self.sealed = True

    def restart(self) -> None:
        """Forget everything: a checkpoint recompute allocates the forward's buffers anew."""
        self._bytes = dict.fromkeys(PARTS, 0)
        self._seen.clear()
        self.sealed = False
        self._alive.clear()
        self.current = self.peak = 0

    def read(self) -> dict[str, int]:
        """Bytes per part."""
        return dict(self._bytes)


def buffer_peak(parts: dict[str, int]) -> int:
    """Most bytes of token buffers alive at once: the larger of the forward's and the backward's."""
    return max(sum(parts.get(p, 0) for p in _FORWARD), sum(parts.get(p, 0) for p in _BACKWARD))
