"""What commands say to people: tables and sentences on a console, and times as people say them. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

REFRESH_S = 0.25  # between two drawings of a display that stays in place
SAY_EVERY_S = 5.0  # between lines where there is no terminal
_FILE_WIDTH = 240  # characters


def open_console(as_json: bool) -> Console:
    """Where a command's tables go: stdout, or stderr where stdout is for JSON lines."""
    from rich.console import Console

    console = Console(stderr=as_json)
    if not console.is_terminal:  # a file or a pipe has no width: words of wide tables stay whole
        console = Console(stderr=as_json, width=_FILE_WIDTH)
    return console


def say(console: Console, text: str) -> None:
    """A line as it is: square brackets are no markup, and it is not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Takes (text, done, total): a bar on a terminal; elsewhere a line now and then, so that short runs say nothing."""
    from rich.console import Console

    errors = Console(stderr=True)
    if errors.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=errors, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)
        return
    last = time.monotonic()

    def tell(text: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SAY_EVERY_S:
            last = time.monotonic()
            say(errors, f"{done}/{total}  {text}")

    yield tell
