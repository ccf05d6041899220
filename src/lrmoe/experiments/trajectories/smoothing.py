"""Smoothed training loss, and the first step at which it reaches a target."""

from __future__ import annotations

import math
from collections import deque


class LossWindow:
    """Mean of the last `width` global training losses; undefined until `width` of them are in.

    A loss that is not finite makes the mean not finite until it has left the window, so a diverged run never counts
    as having reached its target.
    """

    def __init__(self, width: int) -> None:
        if width < 1:
            raise ValueError(f"width={width}: the smoothing window must hold at least 1 step")
        self._losses: deque[float] = deque(maxlen=width)

    def add(self, loss: float) -> float | None:
        """Take one step's loss and return the mean, or None while the window is not full."""
        self._losses.append(loss)
        if len(self._losses) < (self._losses.maxlen or 1):
            return None
        return (
            math.fsum(self._losses) / len(self._losses) if all(map(math.isfinite, self._losses)) else math.nan
        )

    @staticmethod
    def reaches(mean: float | None, target: float | None) -> bool:
        """Whether a mean that `add` returned is at or below the target; never without one."""
        return mean is not None and target is not None and math.isfinite(mean) and mean <= target
