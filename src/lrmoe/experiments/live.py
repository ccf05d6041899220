"""Progress of a comparison: a table that stays in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from lrmoe.experiments.lane import Lane

REFRESH_S = 0.25
_ONE_LINE = 3  # lanes; more get a line each


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
    ) -> None:
        self._lanes = lanes
        self._target_loss = target_loss
        self._max_steps = max_steps
        self._every = every
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
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
        self._link = link_bytes_per_s
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
            self._say(f"step {step}, {self._elapsed():.0f} s:{text}")

    @property
    def _arrived(self) -> str:
        return "done" if self._target_loss is None else "reached"

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _words(self, lane: Lane, link: float | None) -> str:
        _, loss, kept, _, critical = self._cells(lane, link)
        reached = f", {self._arrived} in {len(lane.lines)} steps" if lane.reached else ""
        return f"{lane.system.name} loss {loss}, kept {kept}, MoE {critical}{reached}"

    def _table(self, link: float | None) -> Table:
        aim = f"{self._max_steps} steps"
        if self._target_loss is not None:
            aim = f"to loss {self._target_loss:g}, at most {aim}"
        table = Table(title=f"{aim}, {self._elapsed():.0f} s", title_justify="left")
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
