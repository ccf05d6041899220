"""Tables of a run: one source for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table as RichTable

from lrmoe.report.data import Run, SystemRun
from lrmoe.report.numbers import against, even, number, percent, plain, seconds, size

_NAME = 16  # letters
_DESCRIBES = {"title", "acts", "moves"}  # rows of the fairness table that say what a system is


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


def headline(run: Run) -> Table:
    """The figures that decide: one row per system of a comparison, one row per figure of a training run."""
    return _compare_headline(run) if run.kind == "compare" else _train_headline(run)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _loss(value: float | None) -> str:
    return even(value, 4)


def _digits(value: float | None) -> str:
    return even(value, 4)


# row of the headline table, figure of summary.json, how it is written, heading where systems are rows
_HEADLINE: Sequence[tuple[str, str, Callable[[float | None], str], str]] = (
    ("steps", "steps", _count, "steps"),
    ("MoE-layer time, critical path (modelled link)", "moe_time_critical_s", seconds, "time, critical path"),
    ("MoE-layer time, wall", "moe_time_wall_s", seconds, "time, wall"),
    ("bytes on the wire", "wire_bytes", size, "wire"),
    ("of them weights, gradients, states", "replica_bytes", size, "of it experts"),
    ("bytes with one row per pair", "wire_bytes_row_per_pair", size, "row per pair"),
    ("rows of the fullest rank, forward", "forward_peak_rows", _count, "rows forward"),
    ("rows of the fullest rank, backward", "backward_peak_rows", _count, "rows backward"),
    ("layer buffers, peak of a rank", "buffer_peak_bytes", size, "buffers"),
    ("pairs kept in backward", "kept_share", percent, "kept"),
    ("loss of the last step", "final_loss", _loss, "last loss"),
    ("largest difference from the trainer, eps", "largest_difference_eps", number, "off by eps"),
    ("steps to the loss that all reached", "steps_to_common_loss", _count, "steps to it"),
    ("time to the loss that all reached", "critical_s_to_common_loss", seconds, "time to it"),
)
_OPTIONAL = {"largest_difference_eps", "replica_bytes"}  # rows that a run without any leaves out
_WITHOUT_TARGET = {"steps_to_common_loss", "critical_s_to_common_loss"}
_WIDE = 4  # systems; more are shown one a row
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
    ("cosine to the exact gradient, mean of the checks", "check_cosine", _digits),
    ("relative error of the gradient, mean of the checks", "check_error", even),
    ("bytes on the wire", "wire_bytes", size),
    ("layer buffers, peak of a rank", "buffer_peak_bytes", size),
)
PEAK_NOTE = (
    "Peak / mean load: rows of the most loaded rank over the mean load with nothing dropped, worst layer, mean over "
    "steps."
)
_HEADLINE_NOTE = "Rows of the fullest rank: mean over layer calls, exact warm-up steps included."
FIGURES = (*_TRAIN, *(row[:3] for row in _HEADLINE if row[1] not in {name for _, name, _ in _TRAIN}))
_COMPARED = frozenset(
    {
        "steps",
        "moe_time_critical_s",
        "moe_time_wall_s",
        "wire_bytes",
        "forward_peak_rows",
        "backward_peak_rows",
        "buffer_peak_bytes",
        "critical_s_to_common_loss",
    }
)
_COMPARED_WIDE = frozenset({"moe_time_critical_s", "critical_s_to_common_loss"})


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
    """One column per system, or where there are many one row per system, with shorter headings."""
    target, wide = run.target_loss, len(run.systems) > _WIDE
    arrived = "steps done" if target is None else "target reached"
    rows = [] if wide else [(arrived, *("yes" if s.figures.get("reached") else "NO" for s in run.systems))]
    for title, name, write, short in _HEADLINE:
        if _shown(run, name):
            cells = (_cell(run, s, name, write, _COMPARED_WIDE if wide else _COMPARED) for s in run.systems)
            rows.append((short if wide else title, *cells))
    columns: Sequence[str] = ("", *(system.name for system in run.systems))
    if wide:
        columns, *rows = zip(columns, *rows, strict=True)
    steps = max((s.number("steps") or 0 for s in run.systems), default=0)
    title = f"Training for {steps:.0f} steps" if target is None else f"Training to loss {number(target)}"
    return Table(title=title, columns=columns, rows=rows, note=_headline_note(run))


def _shown(run: Run, name: str) -> bool:
    if name in _WITHOUT_TARGET and run.target_loss is not None:
        return False
    if name == "wire_bytes_row_per_pair":
        return any(s.number(name) not in (None, s.number("wire_bytes")) for s in run.systems)
    return name not in _OPTIONAL | _WITHOUT_TARGET or any(s.number(name) for s in run.systems)


def _headline_note(run: Run) -> str:
    parts = []
    missed = [s.name for s in run.systems if not s.figures.get("reached")]
    if missed and len(run.systems) > _WIDE:
        parts.append(f"Not arrived: {', '.join(missed)}.")
    parts += [f"{s.name}: {s.figures['infeasible']}." for s in run.systems if s.figures.get("infeasible")]
    if run.baseline and len(run.systems) > 1:
        parts.append(f"In brackets: against {run.baseline.name}.")
    if any(s.figures.get("largest_difference_eps") is not None for s in run.systems):
        parts.append(
            "Systems with exact gradients share one training run: one trains, the others execute each of its layer "
            "calls, and their outputs and gradients were held equal to the trainer's; the loss is the shared one."
        )
    common = run.summary.get("common_loss")
    if run.target_loss is None and isinstance(common, int | float):
        parts.append(f"The loss that all reached: {number(common, 4)}, smoothed.")
    return " ".join([*parts, critical_path(run), _HEADLINE_NOTE])


def _cell(
    run: Run, system: SystemRun, name: str, write: Callable[[float | None], str], compared: frozenset[str]
) -> str:
    value, base = system.number(name), run.baseline
    text = write(value)
    if name not in compared or base is None or base is system:
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


def fairness(run: Run, *, brief: bool = False) -> Table:
    """What each system was given: slots, bytes and budget, counts it plans from, estimator, activations.

    Args:
        brief: leave out what only describes a system, for a terminal; only where there are many.
    """
    keys = list({key: None for system in run.systems for key in system.figures.get("fairness", {})})
    given = [system.figures.get("fairness", {}) for system in run.systems]
    rows = [(key.replace("_", " "), *(_given(key, entry.get(key)) for entry in given)) for key in keys]
    columns: Sequence[str] = ("", *(system.name for system in run.systems))
    note = (
        "Same seed, data and initial weights; steps interleaved in the same processes, each leading in turn."
    )
    if len(run.systems) > _WIDE:
        same = [row for row in rows if len(set(row[1:])) == 1]
        rows = [row for row in rows if row not in same and not (brief and row[0] in _DESCRIBES)]
        columns, *rows = zip(columns, *rows, strict=True)
        note += f" The same for all: {'; '.join(f'{row[0]}: {row[1]}' for row in same)}."
    return Table(
        title="Fairness: what each system was given", columns=columns, rows=rows, note=note, text=True
    )


def _given(key: str, value: Any) -> str:
    return size(value) if "bytes" in key and isinstance(value, int | float) else plain(value)


def differences(first: Mapping[str, Any], second: Mapping[str, Any], titles: Sequence[str]) -> Table:
    """What two runs do not share, of settings by name."""
    rows = [
        (key, plain(first.get(key)), plain(second.get(key)))
        for key in {**first, **second}
        if first.get(key) != second.get(key)
    ]
    return Table(title="What differs", columns=("setting", *titles), rows=rows, text=True)


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
