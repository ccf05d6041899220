"""Tables of a run: one source for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table as RichTable

from lrmoe.report.data import Run, SystemRun

_NAME = 12  # letters


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of plain text.

    Attributes:
        title: what it shows.
        columns: headings; the first column names the row.
        rows: cells, one sequence per row.
        note: how to read it, or empty.
        text: whether cells are words rather than numbers, for alignment.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text: bool = False

    def rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(title=escape(self.title), caption=escape(self.note) or None)
        table.title_justify = table.caption_justify = "left"
        for i, column in enumerate(self.columns):
            table.add_column(
                escape(column),
                justify="right" if i and not self.text else "left",
                overflow="fold",
                no_wrap=i == 0 and self._short_names(),
            )
        for row in self.rows:
            table.add_row(*(escape(cell) for cell in row))
        return table

    def _short_names(self) -> bool:
        """Whether the first column holds names, which should stay in one piece."""
        return all(len(row[0]) <= _NAME for row in self.rows)


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


def seconds(value: float | None) -> str:
    """Seconds with four digits, "-" for None."""
    return "-" if value is None else f"{number(value, 4)} s"


def percent(value: float | None) -> str:
    """A share as a percentage, "-" for None."""
    return "-" if value is None else f"{100 * value:.1f}%"


def against(ours: float | None, baseline: float | None) -> str:
    """How ours compares with the baseline as a signed percentage, or empty where it cannot be said."""
    if ours is None or not baseline:
        return ""
    return f" ({100 * (ours / baseline - 1):+.1f}%)"


def headline(run: Run) -> Table:
    """The figures that decide: one row per system of a comparison, one row per figure of a training run."""
    return _compare_headline(run) if run.kind == "compare" else _train_headline(run)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _loss(value: float | None) -> str:
    return number(value, 4)


# row of the headline table, figure of summary.json, how it is written
_HEADLINE: Sequence[tuple[str, str, Callable[[float | None], str]]] = (
    ("steps", "steps", _count),
    ("MoE-layer time, critical path (modelled link)", "moe_time_critical_s", seconds),
    ("MoE-layer time, wall", "moe_time_wall_s", seconds),
    ("bytes on the wire", "wire_bytes", size),
    ("rows of the fullest rank, forward", "forward_peak_rows", _count),
    ("rows of the fullest rank, backward", "backward_peak_rows", _count),
    ("layer buffers, peak of a rank", "buffer_peak_bytes", size),
    ("pairs kept in backward", "kept_share", percent),
    ("loss of the last step", "final_loss", _loss),
)
_TRAIN: Sequence[tuple[str, str, Callable[[float | None], str]]] = (
    ("steps", "steps", _count),
    ("steps skipped, gradient not finite", "steps_skipped", _count),
    ("ranks", "world_size", _count),
    ("loss of the last step", "final_loss", _loss),
    ("last loss on held-out text", "eval_loss", _loss),
    ("time of all steps, wall", "train_time_s", seconds),
    ("MoE-layer time, wall", "moe_time_wall_s", seconds),
    ("tokens per second", "tokens_per_s", _count),
    ("pairs kept in backward", "kept_share", percent),
    ("peak / mean load, forward", "forward_peak", _ratio),
    ("peak / mean load, backward", "backward_peak", _ratio),
    ("bytes on the wire", "wire_bytes", size),
    ("layer buffers, peak of a rank", "buffer_peak_bytes", size),
)
PEAK_NOTE = (
    "Peak / mean load: rows of the most loaded rank over the mean load with nothing dropped, worst layer, mean over "
    "steps."
)
_HEADLINE_NOTE = "Rows of the fullest rank: mean over layer calls, exact warm-up steps included."
FIGURES = (*_TRAIN, *(row for row in _HEADLINE if row[1] not in {name for _, name, _ in _TRAIN}))
_COMPARED = frozenset(name for _, name, _ in _HEADLINE) - {"kept_share", "final_loss"}


def critical_path(run: Run) -> str:
    """What the critical path is, with the link speed that it was modelled with."""
    link = run.summary.get("link_bytes_per_s")
    if not link:
        return "No link speed was stated, so there is no critical path; wall is what the clock of this machine saw."
    return (
        "Critical path: per layer call and phase the largest thread CPU time of any rank, summed, plus the bytes of "
        f"the rank that sends most over a modelled link of {size(link)}/s, the same for all systems. Wall: what the "
        "clock of this machine saw on the slowest rank, nothing modelled."
    )


def _compare_headline(run: Run) -> Table:
    reached = ("target reached", *("yes" if s.figures.get("reached") else "NO" for s in run.systems))
    rows = [(title, *(_cell(run, s, name, write) for s in run.systems)) for title, name, write in _HEADLINE]
    return Table(
        title=f"Training to loss {number(run.target_loss)}",
        columns=("", *(system.name for system in run.systems)),
        rows=[reached, *rows],
        note=_headline_note(run),
    )


def _headline_note(run: Run) -> str:
    brackets = f"In brackets: against {run.baseline.name}. " if run.baseline and len(run.systems) > 1 else ""
    return f"{brackets}{critical_path(run)} {_HEADLINE_NOTE}"


def _cell(run: Run, system: SystemRun, name: str, write: Callable[[float | None], str]) -> str:
    value, base = system.number(name), run.baseline
    text = write(value)
    if name not in _COMPARED or base is None or base is system:
        return text
    both = base.figures.get("reached") and system.figures.get("reached")
    return text + against(value, base.number(name)) if both else text


def _train_headline(run: Run) -> Table:
    system = run.systems[0]
    rows = [
        (title, write(value)) for title, name, write in _TRAIN if (value := system.number(name)) is not None
    ]
    return Table(title="Figures of the run", columns=("", system.name), rows=rows, note=PEAK_NOTE)


def train_summary(run: Run) -> Table:
    """summary.json of a training run as it is, under its own names."""
    rows = [(name, plain(value)) for name, value in run.summary.items() if _is_plain(value)]
    return Table(title="summary.json", columns=("figure", "value"), rows=rows, text=True)


def fairness(run: Run) -> Table:
    """What each system was given: slots, bytes and budget, counts it plans from, estimator, activations."""
    keys = {key: None for system in run.systems for key in system.figures.get("fairness", {})}
    given = [system.figures.get("fairness", {}) for system in run.systems]
    return Table(
        title="Fairness: what each system was given",
        columns=("", *(system.name for system in run.systems)),
        rows=[(key.replace("_", " "), *(plain(entry.get(key)) for entry in given)) for key in keys],
        note="Same seed, data and initial weights; steps interleaved in the same processes, each leading in turn.",
        text=True,
    )


def settings(run: Run) -> Table:
    """The resolved configuration, one row per field; a row says which systems differ."""
    rows = [
        (f"{table}.{key}", plain(value))
        for table, fields in run.config.items()
        for key, value in _items(fields)
    ]
    return Table(title="Configuration", columns=("field", "value"), rows=rows, text=True)


def system_settings(run: Run) -> Table:
    """Every field of each system's LRMoEConfig."""
    names = {key: None for system in run.systems for key in system.config}
    rows = [(name, *(plain(system.config.get(name)) for system in run.systems)) for name in names]
    return Table(title="LRMoEConfig", columns=("field", *(s.name for s in run.systems)), rows=rows, text=True)


def environment(run: Run) -> Table:
    """Command, versions, hardware and date of a run."""
    rows = [row for key, value in run.summary.get("context", {}).items() for row in _flatten(str(key), value)]
    return Table(title="Environment", columns=("what", "value"), rows=rows, text=True)


def _flatten(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [row for key, inner in value.items() for row in _flatten(f"{name}.{key}", inner)]
    return [(name, plain(value))]


def _items(fields: Any) -> Sequence[tuple[str, Any]]:
    return list(fields.items()) if isinstance(fields, Mapping) else [("", fields)]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def plain(value: Any) -> str:
    """A value of a configuration or summary as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value, 6) if isinstance(value, float) else str(value)
