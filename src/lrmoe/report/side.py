"""Two runs of the same kind whose figures have names: those that both have, in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lrmoe.errors import ConfigError
from lrmoe.report import tables
from lrmoe.report.data import Run
from lrmoe.report.figures import figures
from lrmoe.report.numbers import number
from lrmoe.report.tables import Table


def _values(run: Run) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in figures(run)}


def table(left: Run, right: Run, titles: Sequence[str]) -> Table:
    """Every figure that both have, and the ratio.

    Raises:
        ConfigError: they have no figure in common.
    """
    ours, theirs = _values(left), _values(right)
    rows = [
        (name, number(value, 4), number(theirs[name], 4), f"{theirs[name] / value:.3f}" if value else "-")
        for name, value in ours.items()
        if name in theirs
    ]
    if not rows:
        raise ConfigError(
            f"runs: {left.name!r} and {right.name!r}, both of `{left.kind}`, have no figure in common; give each alone"
        )
    only = len(ours) + len(theirs) - 2 * len(rows)
    note = f"{only} figures that only one of them has are on its own part of the page." if only else ""
    return Table(title="Figures of both", columns=("figure", *titles, "second / first"), rows=rows, note=note)


def differences(left: Run, right: Run, titles: Sequence[str]) -> Table:
    """Settings and environment that they do not share."""
    ours, theirs = (dict(_flat(_about(run))) for run in (left, right))
    return tables.differences(ours, theirs, titles)


def _about(run: Run) -> Mapping[str, Any]:
    return {"settings": run.summary.get("settings", {}), "context": run.summary.get("context", {})}


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, str | int | float | bool):
            yield f"{prefix}{key}", value


def verdict(left: Run, right: Run, titles: Sequence[str]) -> str:
    """What stands side by side."""
    rows = table(left, right, titles).rows
    same = sum(row[1] == row[2] for row in rows)
    return f"{titles[0]} and {titles[1]} have {len(rows)} figures in common; {same} are the same in both."
