"""Two runs side by side: one run made of both, a table with both columns and the ratio, and what they differ in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lrmoe.errors import ConfigError
from lrmoe.report import tables
from lrmoe.report.data import BASELINE, Run, SystemRun
from lrmoe.report.names import DASHES
from lrmoe.report.numbers import number, seconds, size
from lrmoe.report.tables import Table

_UNTOLD = ("train.name", "train.runs", "context.command", "context.date")  # always differ and explain nothing


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs as one.

    Attributes:
        titles: what each run is called; different also where their folders' names are the same.
        runs: the runs as they were loaded.
        matched: systems of the first and the second run that belong together, named after their runs.
        both: a run of kind "pair" with all matched systems, over one link, for the plots.
    """

    titles: tuple[str, str]
    runs: tuple[Run, Run]
    matched: Sequence[tuple[SystemRun, SystemRun]]
    both: Run


def pair(left: Run, right: Run) -> Pair:
    """Put two runs side by side.

    Systems of two comparisons belong together by name, lrmoe's before the baseline's; otherwise the one system of a
    training run meets the one that its comparison is about.

    Raises:
        ConfigError: one is a simulation, which trains nothing, and the other is not.
    """
    if "simulate" in (left.kind, right.kind):
        raise ConfigError(
            f"runs: {left.name!r} is of `{left.kind}` and {right.name!r} of `{right.kind}`; two that were trained, or "
            "two simulations, can stand side by side"
        )
    titles = call(left, right)
    link = _link(left, right)
    matched = [
        (_drawn(left, a, titles[0], 1, i, link), _drawn(right, b, titles[1], 2, i, link))
        for i, (a, b) in enumerate(_match(left, right))
    ]
    summary: dict[str, Any] = {"link_bytes_per_s": link}
    if left.target_loss is not None and left.target_loss == right.target_loss:
        summary["target_loss"] = left.target_loss
    systems = tuple(system for both in matched for system in both)
    both = Run(name=" and ".join(titles), kind="pair", summary=summary, config={}, systems=systems)
    return Pair(titles=titles, runs=(left, right), matched=matched, both=both)


def call(left: Run, right: Run) -> tuple[str, str]:
    """What to call each run; different also where their folders' names are the same."""
    if left.name == right.name:
        return f"{left.name} (first)", f"{right.name} (second)"
    return left.name, right.name


def _match(left: Run, right: Run) -> list[tuple[SystemRun, SystemRun]]:
    named = {system.name: system for system in right.systems}
    if left.kind == right.kind == "compare":
        shared = [(system, named[system.name]) for system in left.systems if system.name in named]
        if shared:
            return sorted(shared, key=lambda both: both[0].name == BASELINE)
    return [(_chief(left), _chief(right))]


def _chief(run: Run) -> SystemRun:
    """The system that a run is about: the first that is not the baseline."""
    return next((system for system in run.systems if system is not run.baseline), run.systems[0])


def _link(left: Run, right: Run) -> float | None:
    """The link that both are put on: the first run's, where both have a critical path."""
    first, second = (run.summary.get("link_bytes_per_s") for run in (left, right))
    return float(first) if first and second else None


def _drawn(run: Run, system: SystemRun, title: str, colour: int, index: int, link: float | None) -> SystemRun:
    """The system under its run's name and colour, on the common link."""
    figures = {"world_size": run.summary.get("world_size"), **system.figures}
    moved = replace(
        system,
        name=title if run.kind == "train" else f"{title}: {system.name}",
        figures=figures,
        colour=f"var(--series-{colour})",
        dash=DASHES[index % len(DASHES)],
    )
    return _at_link(moved, run.summary.get("link_bytes_per_s"), link)


def _at_link(system: SystemRun, old: float | None, new: float | None) -> SystemRun:
    """The system with its modelled times over another link; without them where there is no common one."""
    if old is None or new is None:
        phases = {name: ms for name, ms in system.phase_ms.items() if name != "wire"}
        figures = {**system.figures, "moe_time_critical_s": None}
        return replace(system, figures=figures, phase_ms=phases, series=replace(system.series, critical_s=()))
    change = 1 / new - 1 / old
    series = system.series
    critical = tuple(s + b * change for s, b in zip(series.critical_s, series.critical_bytes, strict=True))
    phases = {name: ms * (old / new if name == "wire" else 1) for name, ms in system.phase_ms.items()}
    figures = {**system.figures, "moe_time_critical_s": critical[-1] if critical else None}
    return replace(system, figures=figures, phase_ms=phases, series=replace(series, critical_s=critical))


def headlines(pair: Pair) -> list[Table]:
    """Both columns and the ratio, one table per matched pair of systems."""
    return [_headline(pair, left, right) for left, right in pair.matched]


def _headline(pair: Pair, left: SystemRun, right: SystemRun) -> Table:
    rows = [
        (title, write(left.number(name)), write(right.number(name)), ratio(left, right, name))
        for title, name, write in tables.FIGURES
        if left.number(name) is not None or right.number(name) is not None
    ]
    if "reached" in left.figures or "reached" in right.figures:
        rows.insert(0, ("target reached", _reached(left), _reached(right), "-"))
    note = [tables.critical_path(pair.both)] if pair.both.summary["link_bytes_per_s"] else []
    note += [tables.PEAK_NOTE] if any("forward_peak" in system.figures for system in (left, right)) else []
    title = (
        "Both runs"
        if len(pair.matched) == 1
        else f"Both runs: {left.name.removeprefix(pair.titles[0] + ': ')}"
    )
    columns = ("", left.name, right.name, "second / first")
    return Table(title=title, columns=columns, rows=rows, note=" ".join(note))


def _reached(system: SystemRun) -> str:
    return {True: "yes", False: "NO"}.get(system.figures.get("reached", ""), "-")


def ratio(left: SystemRun, right: SystemRun, name: str) -> str:
    """Second over first of a figure, "-" where one is missing or the first is zero."""
    first, second = left.number(name), right.number(name)
    return f"{second / first:.3f}" if first and second is not None else "-"


def differences(pair: Pair) -> Table:
    """Every setting, version and machine that the two runs do not share."""
    first, second = ({**_settings(run)} for run in pair.runs)
    for (left, right), mark in zip(pair.matched, _marks(pair), strict=True):
        first |= {f"{mark}{key}": value for key, value in left.config.items()}
        second |= {f"{mark}{key}": value for key, value in right.config.items()}
    ours, theirs = ({key: given[key] for key in given if key not in _UNTOLD} for given in (first, second))
    return tables.differences(ours, theirs, pair.titles)


def _marks(pair: Pair) -> list[str]:
    """What goes before the name of a system's setting; nothing where there is one pair of systems."""
    if len(pair.matched) == 1:
        return ["lrmoe."]
    return [f"{left.name.removeprefix(pair.titles[0] + ': ')}: lrmoe." for left, _ in pair.matched]


def _settings(run: Run) -> dict[str, Any]:
    tables_of = {name: fields for name, fields in run.config.items() if name != "lrmoe"}
    return dict(_flat({**tables_of, "context": run.summary.get("context", {})}))


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def verdict(pair: Pair) -> str:
    """The ends of both runs, and whether their times may be compared."""
    left, right = pair.matched[0]
    key, kind = "moe_time_critical_s", "critical path, modelled link"
    if left.number(key) is None or right.number(key) is None:
        key, kind = "moe_time_wall_s", "wall"
    text = f"{left.name} ends at loss {_loss(left)}, {right.name} at {_loss(right)}. "
    text += f"MoE-layer time, {kind}: {seconds(left.number(key))} and {seconds(right.number(key))}, "
    text += f"ratio {ratio(left, right, key)}."
    return text + _caution(pair, left, right)


def _loss(system: SystemRun) -> str:
    return number(system.number("final_loss"), 4)


def _caution(pair: Pair, left: SystemRun, right: SystemRun) -> str:
    if pair.both.target_loss is not None and left.figures.get("reached") and right.figures.get("reached"):
        return f" Both reached loss {number(pair.both.target_loss)}."
    return " They did not stop at the same loss, so times alone do not say which is better: see the curves."


def method(pair: Pair) -> str:
    """How far two separate runs can be compared."""
    kinds = " and ".join(
        f"{title} by `lrmoe {run.kind}`" for title, run in zip(pair.titles, pair.runs, strict=True)
    )
    text = f"Made by two commands, {kinds}, at different times: other work on a machine changes wall times. "
    if pair.both.summary["link_bytes_per_s"]:
        text += tables.critical_path(pair.both)
        links = [run.summary["link_bytes_per_s"] for run in pair.runs]
        if links[0] != links[1]:
            text += f" That is the first run's link; the second was recorded with {size(links[1])}/s."
    return text
