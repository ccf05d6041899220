"""Tables of a run: one source for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table as RichTable

from lrmoe.report.data import Run, SystemRun



@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of plain text.

    Attributes:
        title: what it shows.
        columns: headings; the first column names the row.
        rows: cells, one sequence per row.
        note: how to read it, or empty.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(title=escape(self.title), caption=escape(self.note) or None, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(escape(column), justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(escape(cell) for cell in row))
        return table


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def size(value: float | None) -> str:
    """Bytes with a binary unit, "-" for None."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def percent(value: float | None) -> str:
    """A share as a percentage, "-" for None."""
    return "-" if value is None else f"{100 * value:.1f} %"


def against(ours: float | None, baseline: float | None) -> str:
    """How ours compares with the baseline as a signed percentage, or empty where it cannot be said."""
    if ours is None or not baseline:
        return ""
    return f" ({100 * (ours / baseline - 1):+.1f} %)"


def headline(run: Run) -> Table:
    """The figures that decide: one row per system of a comparison, one row per figure of a training run."""
    return _compare_headline(run) if run.kind == "compare" else _train_headline(run)


def _compare_headline(run: Run) -> Table:
    columns = ("system", "target reached", "steps", "MoE time, critical path", "MoE time, wall", "bytes on the wire")
    columns += ("peak rows fwd / bwd", "layer buffers", "kept")
    return Table(
        title=f"Training to loss {number(run.target_loss)}",
        columns=columns,
        rows=[_compare_row(system, run.baseline) for system in run.systems],
        note=f"In brackets: against {run.baseline.name}." if run.baseline and len(run.systems) > 1 else "",
    )


def _compare_row(system: SystemRun, baseline: SystemRun | None) -> tuple[str, ...]:
    def cell(name: str, text: str) -> str:
        other = baseline.number(name) if baseline and baseline is not system else None
        comparable = bool(baseline) and bool(system.figures.get("reached")) and bool(baseline.figures.get("reached"))
        return text + (against(system.number(name), other) if comparable else "")

    critical, wall = system.number("moe_time_critical_s"), system.number("moe_time_wall_s")
    peaks = f"{number(system.number('forward_peak_rows'), 6)} / {number(system.number('backward_peak_rows'), 6)}"
    return (
        system.name,
        "yes" if system.figures.get("reached") else f"no, loss {number(system.number('final_loss'))}",
        cell("steps", number(system.number("steps"), 6)),
        cell("moe_time_critical_s", f"{number(critical, 4)} s"),
        cell("moe_time_wall_s", f"{number(wall, 4)} s"),
        cell("wire_bytes", size(system.number("wire_bytes"))),
        peaks,
        cell("buffer_peak_bytes", size(system.number("buffer_peak_bytes"))),
        percent(system.number("kept_share")),
    )


def _train_headline(run: Run) -> Table:
    system = run.systems[0]
    rows = [(name.replace("_", " "), _plain(value)) for name, value in system.figures.items() if _is_plain(value)]
    return Table(title="Figures", columns=("figure", "value"), rows=rows)


def fairness(run: Run) -> Table:
    """What each system was given: slots, bytes and budget, counts it plans from, estimator, activations."""
    keys = {key: None for system in run.systems for key in system.figures.get("fairness", {})}
    rows = [(s.name, *(_plain(s.figures.get("fairness", {}).get(key)) for key in keys)) for s in run.systems]
    return Table(
        title="Fairness: what each system was given",
        columns=("system", *(key.replace("_", " ") for key in keys)),
        rows=rows if keys else [],
        note="Same seed, data and initial weights; steps interleaved in the same processes, each leading in turn.",
    )


def settings(run: Run) -> Table:
    """The resolved configuration, one row per field; a row says which systems differ."""
    rows = [(f"{table}.{key}", _plain(value)) for table, fields in run.config.items() for key, value in _items(fields)]
    return Table(title="Configuration", columns=("field", "value"), rows=rows)


def system_settings(run: Run) -> Table:
    """Every field of each system's LRMoEConfig."""
    names = {key: None for system in run.systems for key in system.config}
    rows = [(name, *(_plain(system.config.get(name)) for system in run.systems)) for name in names]
    return Table(title="LRMoEConfig", columns=("field", *(s.name for s in run.systems)), rows=rows)


def environment(run: Run) -> Table:
    """Command, versions, hardware and date of a run."""
    rows = [row for key, value in run.summary.get("context", {}).items() for row in _flatten(str(key), value)]
    return Table(title="Environment", columns=("what", "value"), rows=rows)


def _flatten(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [row for key, inner in value.items() for row in _flatten(f"{name}.{key}", inner)]
    return [(name, _plain(value))]


def _items(fields: Any) -> Sequence[tuple[str, Any]]:
    return list(fields.items()) if isinstance(fields, Mapping) else [("", fields)]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value, 6) if isinstance(value, float) else str(value)
