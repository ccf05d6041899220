"""Scratch buffers that one layer call uses and the next one may overwrite.

A fresh large CPU buffer costs a page fault per 4 KiB: more than the gather that fills it. Scratch is therefore kept,
per thread, up to a fixed size for each name and dtype. On CUDA the caching allocator does this already and nothing is
kept here.

What outlives a call's forward comes from a pool that all threads share, see `lrmoe.ops.pool`.

Under a byte budget nothing is kept either: what is alive is then what is used, whatever ran before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lrmoe.ops.pages import empty
from lrmoe.ops.pool import Pool

_KEEP_BYTES = 128 * 2**20
_lasting = Pool()


class Workspace(threading.local):
    """Named scratch buffers of one thread.

    Args:
        taken: called with every buffer that is handed out.
    """

    def __init__(self, taken: Callable[[Tensor], None] | None = None) -> None:
        self._taken = taken
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._keep = True
        self._book: Callable[[Tensor], None] | None = None

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor in the dtype and on the device of `like`.

        Valid until the same name is taken again in this thread; never to be returned or saved.
        """
        buffer = self._take(name, shape, like)
        if self._taken is not None:
            self._taken(buffer)
        return buffer

    def _take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = math.prod(shape)
        if not self._keep or like.device.type != "cpu" or size * like.element_size() > _KEEP_BYTES:
            fresh = empty(shape, like)
            if self._book is not None:
                self._book(fresh)
            return fresh
        key = (name, like.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # a buffer made for an evaluation must serve training too
                buffer = empty((size,), like)
            self._buffers[key] = buffer
        if len(shape) == 2:
            return buffer.as_strided(shape, (shape[1], 1))  # a quarter of the time of a slice and a view
        return buffer[:size].view(shape)

    def place(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """`take` for a product's result; None on CUDA, where torch's grouped product brings its own memory."""
        return None if like.is_cuda else self.take(name, shape, like)

    def note(self, buffer: Tensor) -> Tensor:
        """Book, where buffers are booked, scratch that a product brought; one that was taken here is booked already."""
        if self._book is not None and buffer.is_cuda:
            self._book(buffer)
        return buffer

    def lasting(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor like those of `take`, but the caller's as long as it is held."""
        return _lasting.take(shape, like) if self._keep else empty(shape, like)

    @contextmanager
    def fresh(self, wanted: bool = True, book: Callable[[Tensor], None] | None = None) -> Iterator[None]:
        """Within, where `wanted`, every buffer is new and goes with its last user; what was kept is given back.

        Args:
            book: called with every new buffer.
        """
        before = self._keep, self._book
        if wanted:
            self.release()
            self._keep, self._book = False, book
        try:
            yield
        finally:
            self._keep, self._book = before

    def release(self) -> None:
        """Give all scratch of this thread back, and what no call holds of the pool."""
        self._buffers.clear()
        _lasting.release()
