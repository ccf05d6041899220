"""How far a replay is, told to whoever asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

Progress = Callable[[str, int, int], None]


class Told:
    """Counts units of work for a progress callback, whatever threads they run in.

    Args:
        progress: told a text, units done and units in all. ranks: of a replay. repeats: runs of every system, warm-ups
            that nobody times left out; one more unit a rank is the replay's own warm-up.
    """

    def __init__(self, progress: Progress | None, ranks: int, repeats: Sequence[int]) -> None:
        runs = sum(repeats)
        self._progress, self._done, self._lock = progress, 0, threading.Lock()
        self._total = ranks * (1 + runs) + runs

    def one(self, text: str) -> None:
        """One more unit begins."""
        with self._lock:
            self._done += 1
            if self._progress is not None:
                self._progress(text, self._done, self._total)
