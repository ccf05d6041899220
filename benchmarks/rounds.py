"""Variants that take turns, round after round: their times, and how far a ratio of two of them can be trusted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Times = Mapping[str, Sequence[float]]


class Rounds:
    """Progress on stderr: on a terminal a bar over rounds x variants, else a line every few rounds."""

    def __init__(self, title: str, rounds: int, variants: int) -> None:
        console = Console(stderr=True)
        self._title, self._rounds = title, rounds
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
        self._bar = Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=rounds * variants)

    def __enter__(self) -> Rounds:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, what: str, quiet: bool = False) -> None:
        """What begins now; `quiet` leaves out the line where there is no terminal. Never called inside a timing."""
        self._bar.update(self._task, description=f"{self._title}: {what}", refresh=True)
        if not self._console.is_terminal and not quiet:
            self._console.print(f"{self._title}: {what}", highlight=False, soft_wrap=True)

    def start(self, done: int) -> None:
        """Round number `done` begins."""
        self.say(f"round {done + 1} of {self._rounds}", quiet=done % -(-self._rounds // 4) != 0)

    def advance(self) -> None:
        """One variant of the round is done; drawn between timings, by this thread alone."""
        self._bar.update(self._task, advance=1, refresh=True)


def measure(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    title: str,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds of every variant in every round by `clock`, variants taking turns; progress on stderr."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    with Rounds(title, rounds, len(runs)) as progress:
        for name, run in runs.items():
            progress.say(f"warm-up, {name}")
            run()
            run()
        for done in range(rounds):
            progress.start(done)
            for name, run in runs.items():
                begin = clock()
                run()
                times[name].append((clock() - begin) * 1e3)
                progress.advance()
    return times


def ratios(times: Times, name: str, *others: str) -> list[float]:
    """By round, `name` over the faster of `others` (by their medians)."""
    best = min(others, key=lambda other: statistics.median(times[other]))
    return [a / b for a, b in zip(times[name], times[best], strict=True)]


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles over the median: what a median of as many rounds may be off by, with room.

    tools/compare_bench.py allows a figure that much where it finds it as `context.spread`.
    """
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / abs(middle) if middle else 0.0
