"""Measured milliseconds of every rank, pass and phase of a replayed system."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lrmoe.telemetry.clock import PhaseClock

# Parts of a phase that are timed apart: at other moments, or at the source and at the home.
_PHASE_OF = {
    "sort": "plan",
    "plan_layout": "plan",
    "order": "pack",
    "layout": "reroute",
    "layout_again": "pack",
    "columns": "exchange",
}


def clock_kind(device: torch.device) -> str:
    """What is read: "events" on CUDA, "thread CPU" elsewhere (of the one thread that a rank's work has)."""
    return "events" if device.type == "cuda" else "thread CPU"


def warm_ups(device: torch.device) -> int:
    """Runs before those that are timed: on CUDA, where kernels are compiled and loaded when they first run, one."""
    return int(device.type == "cuda")


class Times:
    """Samples of one system. A phase's sample is one run of one rank's part in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: dict[tuple[str, int, str], list[float]] = defaultdict(list)

    @contextmanager
    def phase(self, side: str, rank: int, name: str) -> Iterator[None]:
        """Time the enclosed work as one sample of a phase, or of a part of one."""
        clock = PhaseClock(self._device)
        with clock.phase(name):
            yield
        self.add(side, rank, name, clock.read()[0][name])

    def add(self, side: str, rank: int, name: str, ms: float) -> None:
        """One more sample."""
        self._samples[side, rank, name].append(ms)

    def by_phase(self, side: str) -> dict[str, dict[int, float]]:
        """Phase -> rank -> ms: the sum over the phase's parts of the median of their samples."""
        found: dict[str, dict[int, float]] = {}
        for (where, rank, name), samples in self._samples.items():
            if where == side:
                phase = found.setdefault(_PHASE_OF.get(name, name), {})
                phase[rank] = phase.get(rank, 0.0) + statistics.median(samples)
        return found

    def slowest(self, side: str) -> dict[str, float]:
        """Phase -> ms of its slowest rank."""
        return {name: max(ranks.values()) for name, ranks in self.by_phase(side).items()}

    def mean(self, side: str, ranks: int) -> float:
        """All phases of a pass, mean over the ranks: what they would take if the work were even."""
        return sum(sum(by_rank.values()) for by_rank in self.by_phase(side).values()) / ranks
