"""The display of many jobs: bars that stay in place on a terminal, a line per finished job elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lrmoe.experiments.terminal import REFRESH_S, duration, say


class Display:
    """Jobs done, those running with their step, and how long the rest will take. A context manager.

    Args:
        title: of the whole.
        jobs: how many there are, those done before included. steps: of the jobs that are to run.
        done: jobs that were done before.
    """

    def __init__(
        self, title: str, *, jobs: int, steps: int, done: int = 0, console: Console | None = None
    ) -> None:
        self._title, self._jobs, self._steps = title, jobs, steps
        self._done, self._failed = done, 0
        self._steps_done = 0
        self._running: Sequence[tuple[str, int, int]] = ()
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._start = self._drawn = time.monotonic()

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        elif self._done:
            self._say(f"{self._title}: {self._done} of {self._jobs} done before")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._drawing(), refresh=True)
            self._live.stop()

    def running(self, jobs: Sequence[tuple[str, int, int]]) -> None:
        """Show what is going on: (name, step, steps) of every running job."""
        self._running = jobs
        if self._live is not None and time.monotonic() - self._drawn >= REFRESH_S:
            self._drawn = time.monotonic()
            self._live.update(self._drawing(), refresh=True)

    def finished(self, name: str, steps: int, seconds: float, error: str | None) -> None:
        """A job is done, or failed with an error."""
        self._done += 1
        self._failed += error is not None
        self._steps_done += steps
        self._running = [job for job in self._running if job[0] != name]
        what = f"done, {seconds:.0f} s" if error is None else f"FAILED: {error}"
        left = f"; {self._left()}" if self._done < self._jobs else ""
        self._say(f"[{self._done}/{self._jobs}] {name} {what}{left}")

    def _say(self, text: str) -> None:
        console = self._console if self._live is None else self._live.console
        say(console, text)
        if self._live is None:
            sys.stderr.flush()

    def _left(self) -> str:
        """How long the rest will take, at the pace so far."""
        steps = self._steps_done + sum(step for _, step, _ in self._running)
        if not steps:
            return "time left unknown"
        seconds = (time.monotonic() - self._start) * max(self._steps - steps, 0) / steps
        return f"about {duration(seconds)} left"

    def _drawing(self) -> Group:
        failed = f", {self._failed} failed" if self._failed else ""
        head = Text(f"{self._title}: {self._done} of {self._jobs}{failed}, {self._left()}")
        table = Table.grid(padding=(0, 2))
        table.add_row(head, _bar(self._done, self._jobs), "")
        for name, step, steps in self._running:
            table.add_row(Text(f"  {name}"), _bar(step, steps), Text(f"step {step} of {steps}"))
        return Group(table)


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, width=30)
