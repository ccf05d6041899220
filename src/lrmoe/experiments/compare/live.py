"""Progress of a comparison: a table that stays in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from lrmoe.experiments.compare.lane import Lane
from lrmoe.experiments.terminal import REFRESH_S, duration, say

_ONE_LINE = 3  # lanes; more get a line each


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of several comparisons runs, and what is known of the time that they take.

    Attributes:
        number: from 1. of: how many there are. name: of this one.
        left: how many must still be run after it. took_s: seconds of those that were run before it.
    """

    number: int
    of: int
    name: str
    left: int = 0
    took_s: tuple[float, ...] = ()

    @property
    def words(self) -> str:
        """Its number and name."""
        return f"cell {self.number} of {self.of}, {self.name}"

    def remaining(self, step: int, max_steps: int, elapsed_s: float) -> str:
        """Time left of all, from the mean of those before, or from this one's steps if it takes all of them."""
        if self.took_s:
            each, word = sum(self.took_s) / len(self.took_s), "about"
        elif step:
            each, word = elapsed_s / step * max_steps, "at most"
        else:
            return "time left not known yet"
        return f"{word} {duration(self.left * each + max(0.0, each - elapsed_s))} left"


class Progress:
    """Shows every lane's step, loss, kept share and MoE-layer time. A context manager; used by rank 0 only."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        target_loss: float | None,
        max_steps: int,
        every: int,
        console: Console | None = None,
        place: Place | None = None,
    ) -> None:
        self._place, self._step = place, 0
        self._lanes = lanes
        self._target_loss = target_loss
        self._max_steps = max_steps
        self._every = every
        self._console = console or Console(stderr=True)
        # One of several leaves the screen to the next; its results are tables of all of them.
        show = Live(console=self._console, auto_refresh=False, transient=place is not None)
        self._live = show if self._console.is_terminal else None
        self._link: float | None = None
        self._start = self._drawn = time.monotonic()

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._table(self._link), refresh=True)
            self._live.stop()

    def update(self, step: int, link_bytes_per_s: float | None) -> None:
        """Show the lanes after a round in which `step` was done."""
        self._link, self._step = link_bytes_per_s, step
        if self._live is not None:
            if time.monotonic() - self._drawn >= REFRESH_S:
                self._drawn = time.monotonic()
                self._live.update(self._table(link_bytes_per_s), refresh=True)
        elif step % self._every == 0 or all(lane.reached for lane in self._lanes):
            words = [self._words(lane, link_bytes_per_s) for lane in self._lanes]
            text = (
                f" {'; '.join(words)}"
                if len(words) <= _ONE_LINE
                else "".join(f"\n  {text}" for text in words)
            )
            self._say(f"{self._head()}step {step}, {self._elapsed():.0f} s{self._left()}:{text}")

    def _head(self) -> str:
        return "" if self._place is None else f"[{self._place.number}/{self._place.of} {self._place.name}] "

    def _left(self) -> str:
        if self._place is None:
            return ""
        return f", {self._place.remaining(self._step, self._max_steps, self._elapsed())}"

    @property
    def _arrived(self) -> str:
        return "done" if self._target_loss is None else "reached"

    def _say(self, text: str) -> None:
        say(self._console, text)

    def _words(self, lane: Lane, link: float | None) -> str:
        _, loss, kept, _, critical = self._cells(lane, link)
        reached = f", {self._arrived} in {len(lane.lines)} steps" if lane.reached else ""
        return f"{lane.system.name} loss {loss}, kept {kept}, MoE {critical}{reached}"

    def _table(self, link: float | None) -> Table:
        aim = f"{self._max_steps} steps"
        if self._target_loss is not None:
            aim = f"to loss {self._target_loss:g}, at most {aim}"
        title = f"{aim}, {self._elapsed():.0f} s"
        if self._place is not None:
            title = f"{self._place.words}{self._left()}\n{title}"
        table = Table(title=escape(title), title_justify="left")
        for i, column in enumerate(
            ("system", "step", "loss", "kept", "MoE time, wall", "MoE time, critical path")
        ):
            table.add_column(column, justify="right" if i else "left")
        for lane in self._lanes:
            step, *cells = self._cells(lane, link)
            table.add_row(
                escape(lane.system.name), f"{step} {self._arrived}" if lane.reached else step, *cells
            )
        return table

    @staticmethod
    def _cells(lane: Lane, link: float | None) -> tuple[str, str, str, str, str]:
        """Step, loss, kept share, wall and critical time as text."""
        if not lane.lines:
            return "0", "-", "-", "-", "-"
        last = lane.lines[-1]
        wall = sum(line.cost.wall_ms for line in lane.lines) / 1e3
        critical = f"{lane.critical_s(link):.2f} s" if link else "-"
        loss = last.loss if last.smoothed_loss is None else last.smoothed_loss
        return str(last.step), f"{loss:.3f}", f"{last.cost.kept_share:.0%}", f"{wall:.2f} s", critical

    def _elapsed(self) -> float:
        return time.monotonic() - self._start
