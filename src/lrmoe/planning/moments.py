"""A call's memory as it walks: what is taken and given back, in order, on all ranks (and parts of a pass) at once.

    moments = Moments()
    rows = moments.take("dispatched", rows_R * row_bytes)      as the runtime allocates
    ...
    moments.free(rows)                                          as it gives back

Shape letters: R ranks, P parts of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lrmoe.planning.problem import IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """Bytes of one buffer, int64 (R,) or (P, R) or one number for all, and the part it belongs to."""

    part: str
    size: Any


class Moments:
    """Bytes in use, the largest moment, and the largest of each part; a part exists once something was taken for it."""

    def __init__(self) -> None:
        self._now: Any = np.int64(0)
        self._peak: Any = np.int64(0)
        self._parts: dict[str, Any] = {}
        self._part_peaks: dict[str, Any] = {}

    def take(self, part: str, size: IntArray | int) -> Held:
        """Allocate bytes: int64 (R,), (P, R), or the same everywhere."""
        now = self._parts[part] = self._parts.get(part, 0) + size
        self._part_peaks[part] = np.maximum(self._part_peaks.get(part, 0), now)
        self._now = self._now + size
        self._peak = np.maximum(self._peak, self._now)
        return Held(part=part, size=size)

    def free(self, *buffers: Held | None) -> None:
        """Give buffers back; None is a buffer that the call never had."""
        for held in buffers:
            if held is not None:
                self._parts[held.part] = self._parts[held.part] - held.size
                self._now = self._now - held.size

    def brief(self, part: str, size: IntArray | int) -> None:
        """Take and give back at once: scratch of one step."""
        self.free(self.take(part, size))

    def mark(self) -> None:
        """Start new peaks at what is in use now: between forward and backward."""
        self._peak = self._now
        self._part_peaks = dict(self._parts)

    def fold(self) -> None:
        """The parts of a pass are done: what is in use is the same after each, and the largest moment is any's."""
        self._now, self._peak = _folded(self._now), _folded(self._peak)
        self._parts = {part: _folded(size) for part, size in self._parts.items()}
        self._part_peaks = {part: _folded(size) for part, size in self._part_peaks.items()}

    def now(self, ranks: int) -> IntArray:
        """Bytes in use, int64 (R,)."""
        return _by_rank(self._now, ranks)

    def peaks(self, ranks: int) -> tuple[IntArray, dict[str, IntArray]]:
        """Most bytes at once since the start or the last mark, of everything and of each part, int64 (R,) each."""
        return _by_rank(self._peak, ranks), {
            part: _by_rank(size, ranks) for part, size in self._part_peaks.items()
        }


def _folded(size: Any) -> Any:
    return size.max(axis=0) if np.ndim(size) == 2 else size


def _by_rank(size: Any, ranks: int) -> IntArray:
    return np.array(np.broadcast_to(_folded(size), (ranks,)), dtype=np.int64)
