"""Debug mode: checks inside every layer call, for a test run or for finding out what went wrong.

    with lrmoe.debug.checked():
        loss = model(...).loss
        loss.backward()

or `lrmoe.debug.enable()` once, or `lrmoe train --checked`. On every rank alike: ranks exchange what they check. A check
that fails raises `lrmoe.CheckError` on every rank of the group, with what each rank found. Results do not change by a
bit. docs/debug.md says what is checked and what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lrmoe.debug._checks import Checks
from lrmoe.distributed import probe

__all__ = ["Checks", "checked", "checked_rank", "disable", "enable"]

_enabled: list[Checks] = []


@contextmanager
def checked(
    *, poison: bool = True, plans: bool = True, rows: bool = True, finite: bool = True
) -> Iterator[Checks]:
    """Check every layer call of this process within the context. Every rank enters it, with the same arguments.

    Args:
        poison: fill memory that a call allocates with marked NaN, so that what was never written shows.
        plans: compare every rank's plan of a call.
        rows: every row that is sent arrives as it was, every kept pair is within its quota.
        finite: name the first input, weight, expert or gradient that is not finite. Switch it off where overflows are
            expected, as under a `GradScaler`.

    Yields:
        The checks, with how many of each kind were made.
    """
    checks = Checks(poison=poison, plans=plans, rows=rows, finite=finite)
    probe.install(checks)
    try:
        yield checks
    finally:
        probe.remove(checks)


def enable(*, poison: bool = True, plans: bool = True, rows: bool = True, finite: bool = True) -> Checks:
    """Check every layer call of this process from now on, until `disable`. Arguments and ranks as in `checked`."""
    disable()
    _enabled.append(Checks(poison=poison, plans=plans, rows=rows, finite=finite))
    probe.install(_enabled[-1])
    return _enabled[-1]


def disable() -> None:
    """Undo `enable`; nothing happens where it was not called."""
    while _enabled:
        probe.remove(_enabled.pop())


def checked_rank(*arguments: Any) -> Any:
    """`lrmoe.training.run.run_rank` under all checks: what `lrmoe train --checked` runs on every rank."""
    from lrmoe.training.run import run_rank

    with checked():
        return run_rank(*arguments)
