"""Bytes that each part of a layer call really allocated."""

from __future__ import annotations

from torch import Tensor

PARTS = ("weights", "grads", "replicas", "dispatched", "stash", "backward", "outputs")
_FORWARD = ("replicas", "dispatched", "stash", "outputs")
_BACKWARD = ("replicas", "dispatched", "stash", "backward")  # received inputs stay for weight gradients


class Ledger:
    """Counts the bytes of tensors, per part; the same memory under one part counts once.

    Attributes:
        sealed: whether the forward's bytes are booked and those of the backward are being added.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._seen: set[tuple[str, int, int]] = set()
        self.sealed = False

    def add(self, part: str, *tensors: Tensor | None) -> None:
        """Book the bytes of `tensors` under a part of PARTS."""
        for tensor in tensors:
            if tensor is None or tensor.numel() == 0:
                continue
            key = (part, tensor.data_ptr(), tensor.nbytes)
            if key not in self._seen:
                self._seen.add(key)
                self._bytes[part] += tensor.nbytes

    def seal(self) -> None:
        """Forget addresses (they may be used again) and keep the sums: between forward and backward."""
        self._seen.clear()
        self.sealed = True

    def restart(self) -> None:
        """Forget everything: a checkpoint recompute allocates the forward's buffers anew."""
        self._bytes = dict.fromkeys(PARTS, 0)
        self._seen.clear()
        self.sealed = False

    def read(self) -> dict[str, int]:
        """Bytes per part."""
        return dict(self._bytes)


def buffer_peak(parts: dict[str, int]) -> int:
    """Most bytes of token buffers alive at once: the larger of the forward's and the backward's."""
    return max(sum(parts.get(p, 0) for p in _FORWARD), sum(parts.get(p, 0) for p in _BACKWARD))
