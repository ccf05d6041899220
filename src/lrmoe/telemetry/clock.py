"""Time per phase of a layer call.

On CPU a phase is charged with the CPU time of its thread, because wall time of ranks that share a core says nothing
about the slowest rank; wall time is kept beside it. On CUDA both are the time between two events on the stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lrmoe.planning.calibration import PHASES

if TYPE_CHECKING:
    from lrmoe.telemetry.record import CallRecord

__all__ = ["PHASES", "PhaseClock", "critical_path_ms"]


class PhaseClock:
    """Accumulates milliseconds per phase; a phase inside another one interrupts it.

    Attributes:
        latest: the phase that was begun or resumed last.
    """

    def __init__(self, device: torch.device) -> None:
        self.latest = ""
        self._cuda = device.type == "cuda"
        self._busy: dict[str, float] = {}
        self._wall: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: str | None = None
        self._since = (0.0, 0.0)
        self._event: torch.cuda.Event | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the enclosed work to a phase of PHASES."""
        outer = self._open
        self._switch(name)
        yield
        self._switch(outer)

    def _switch(self, name: str | None) -> None:
        """Charge what has passed to the open phase, and open another one, or none."""
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
            if self._open is not None and self._event is not None:
                self._events.append((self._open, self._event, now))
            self._event = now
        else:
            wall, busy = time.perf_counter(), time.thread_time()
            if self._open is not None:
                since = self._since
                self._wall[self._open] = self._wall.get(self._open, 0.0) + (wall - since[0]) * 1e3
                self._busy[self._open] = self._busy.get(self._open, 0.0) + (busy - since[1]) * 1e3
            self._since = (wall, busy)
        self._open = name
        if name is not None:
            self.latest = name

    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return all(end.query() for _, _, end in self._events)

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """(thread or event milliseconds, wall milliseconds) per phase. On CUDA this waits for the events."""
        for name, begin, end in self._events:
            end.synchronize()
            elapsed = begin.elapsed_time(end)
            self._busy[name] = self._busy.get(name, 0.0) + elapsed
            self._wall[name] = self._wall.get(name, 0.0) + elapsed
        self._events.clear()
        return dict(self._busy), dict(self._wall)


def critical_path_ms(records_by_rank: Sequence[Sequence[CallRecord]], link_bytes_per_s: float) -> float:
    """Time of a sequence of layer calls if every rank had a core (or device) of its own and a stated link.

    Per call and phase the slowest rank counts, and the bytes of the rank that sends most take bytes / link.

    Args:
        records_by_rank: for each rank its records; records at one position belong to one call.
        link_bytes_per_s: speed of each rank's link, in bytes per second; infinite leaves exchange out.

    Returns:
        milliseconds, summed over calls.
    """
    total = 0.0
    for call in zip(*records_by_rank, strict=True):
        for name in PHASES:
            total += max(record.ms.get(name, 0.0) for record in call)
            total += max(record.bytes.get(name, 0) for record in call) / link_bytes_per_s * 1e3
    return total
