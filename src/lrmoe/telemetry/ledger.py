"""Bytes that each part of a layer call really allocated."""

from __future__ import annotations

from torch import Tensor

PARTS = ("weights", "grads", "replicas", "dispatched", "stash", "backward", "outputs")
_FORWARD = ("replicas", "dispatched", "stash", "outputs")
_BACKWARD = ("replicas", "stash", "backward")


class Ledger:
    """Counts the storage behind tensors, per part; two views of one storage count once."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._seen: set[tuple[str, int]] = set()

    def add(self, part: str, *tensors: Tensor | None) -> None:
        """Book the storage of `tensors` under a part of PARTS."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            key = (part, storage.data_ptr())
            if storage.nbytes() and key not in self._seen:
                self._seen.add(key)
                self._bytes[part] += storage.nbytes()

    def seal(self) -> None:
        """Forget addresses (they may be used again) and keep the sums: between forward and backward."""
        self._seen.clear()

    def read(self) -> dict[str, int]:
        """Bytes per part."""
        return dict(self._bytes)


def buffer_peak(parts: dict[str, int]) -> int:
    """Most bytes of token buffers alive at once: the larger of the forward's and the backward's."""
    return max(sum(parts.get(p, 0) for p in _FORWARD), sum(parts.get(p, 0) for p in _BACKWARD))
