"""The HTML page of one or two runs: one file that loads nothing from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from operator import itemgetter
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError, require_extra
from lrmoe.report import pair, replay, simulation, simulation_pair, simulation_plots, tables
from lrmoe.report.bars import load, phases
from lrmoe.report.curves import kept, loss_against_steps, loss_against_time, peaks
from lrmoe.report.data import Run, SystemRun
from lrmoe.report.plot import Plot

MOST_NAMED = 3  # systems in one sentence


@dataclass(frozen=True, kw_only=True)
class Section:
    """One run on the page, or two side by side: the sentence, tiles, plots and tables."""

    anchor: str
    kicker: str
    title: str
    verdict: str
    tiles: Sequence[tuple[str, str, str]]
    headline: tables.Table
    plots: Sequence[Plot]
    fairness: tables.Table | None
    method: str
    details: Sequence[tables.Table]
    further: Sequence[tables.Table] = ()


def check_installed() -> None:
    """Raise MissingExtraError now if a page could not be rendered later."""
    require_extra("jinja2", "report")
    require_extra("plotly.offline", "report")


def render(runs: Sequence[Run]) -> str:
    """The page of one run, or of two side by side.

    Raises:
        ConfigError: no run, more than two, or two of which only one is a simulation.
        MissingExtraError: jinja2 or plotly is not installed.
    """
    if not 1 <= len(runs) <= 2:
        raise ConfigError(f"runs: {len(runs)} given; a report shows one or two")
    jinja2, plotly = require_extra("jinja2", "report"), require_extra("plotly.offline", "report")
    env = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    sections = _sections(runs)
    # Markup is text of this package or escaped by _script_json; everything that a run names goes through autoescape.
    return str(
        env.from_string(_asset("report.html.j2")).render(
            title=" and ".join(section.title for section in sections),
            sections=sections,
            css=env.filters["safe"](_asset("report.css")),
            js=env.filters["safe"](_asset("report.js")),
            plotly=env.filters["safe"](plotly.get_plotlyjs()),
            plots_json=env.filters["safe"](_script_json(_drawn(sections))),
        )
    )


def write(runs: Sequence[Run], path: Path) -> Path:
    """Render the page and write it to `path`."""
    path.write_text(render(runs), encoding="utf-8")
    return path


def _asset(name: str) -> str:
    return (resources.files("lrmoe.report") / "templates" / name).read_text(encoding="utf-8")


def _drawn(sections: Sequence[Section]) -> dict[str, Any]:
    return {
        f"{section.anchor}-{plot.name}": {"data": list(plot.traces), "layout": dict(plot.layout)}
        for section in sections
        for plot in section.plots
    }


def _script_json(value: Any) -> str:
    """JSON that may stand inside a script element: no "<", ">" or "&", and null where a number is not finite."""
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def _sections(runs: Sequence[Run]) -> list[Section]:
    if len(runs) == 2:
        if any(run.kind == "replay" for run in runs):
            raise ConfigError("runs: a replay has a page of its own; give its folder alone")
        simulated = all(run.kind == "simulate" for run in runs)
        return [_simulated_pair(*runs) if simulated else _paired(pair.pair(*runs))]
    (run,) = runs
    if run.kind == "replay":
        return [_replayed(run, "run0")]
    return [_simulated(run, "run0") if run.kind == "simulate" else _trained(run, "run0")]


def _paired(both: pair.Pair) -> Section:
    first, *others = pair.headlines(both)
    details = [
        replace(tables.settings(run), title=f"Configuration of {title}")
        for title, run in zip(both.titles, both.runs, strict=True)
    ]
    differences = pair.differences(both)
    return Section(
        anchor="pair",
        kicker="lrmoe report, two runs",
        title=both.both.name,
        verdict=pair.verdict(both),
        tiles=[],
        headline=first,
        further=[*others, *([differences] if differences.rows else [])],
        plots=plots(both.both),
        fairness=None,
        method=pair.method(both),
        details=[table for table in details if table.rows],
    )


def _simulated_pair(left: Run, right: Run) -> Section:
    titles = pair.call(left, right)
    first, *others = simulation_pair.tables(left, right, titles)
    details = [
        replace(table, title=f"{table.title} ({title})")
        for title, run in zip(titles, (left, right), strict=True)
        for table in (*simulation.tables(run), simulation.fairness(run))
    ]
    return Section(
        anchor="pair",
        kicker="lrmoe report, two simulations",
        title=" and ".join(titles),
        verdict=simulation_pair.verdict(left, right, titles),
        tiles=[],
        headline=first,
        further=[table for table in others if table.rows],
        plots=simulation_pair.plots(left, right, titles),
        fairness=None,
        method=" ".join(
            f"{title}: {simulation.method(run)}" for title, run in zip(titles, (left, right), strict=True)
        ),
        details=details,
    )


def _simulated(run: Run, anchor: str) -> Section:
    first, *others = simulation.tables(run)
    return Section(
        anchor=anchor,
        kicker=f"lrmoe {run.kind}",
        title=run.name,
        verdict=simulation.verdict(run),
        tiles=[],
        headline=first,
        further=others,
        plots=simulation_plots.plots(run),
        fairness=simulation.fairness(run),
        method=simulation.method(run),
        details=[tables.environment(run)],
    )


def _replayed(run: Run, anchor: str) -> Section:
    first, *others = replay.tables(run)
    return Section(
        anchor=anchor,
        kicker="lrmoe replay",
        title=run.name,
        verdict=replay.verdict(run),
        tiles=[],
        headline=first,
        further=others,
        plots=[],
        fairness=None,
        method=replay.method(run),
        details=[tables.environment(run)],
    )


def _trained(run: Run, anchor: str) -> Section:
    details = [tables.system_settings(run), tables.settings(run), tables.environment(run)]
    if run.kind == "train":
        details.insert(0, tables.train_summary(run))
    fairness = tables.fairness(run)
    return Section(
        anchor=anchor,
        kicker=f"lrmoe {run.kind}",
        title=run.name,
        verdict=verdict(run),
        tiles=tiles(run),
        headline=tables.headline(run),
        plots=plots(run),
        fairness=fairness if fairness.rows else None,
        method=method(run),
        details=[table for table in details if table.rows],
    )


def plots(run: Run) -> list[Plot]:
    """All plots that the run has data for, in the page's order."""
    bars = () if run.kind == "pair" else (load,)
    made = (draw(run) for draw in (loss_against_time, loss_against_steps, *bars, peaks, phases, kept))
    return [plot for plot in made if plot is not None]


def verdict(run: Run) -> str:
    """One sentence: what the run showed, or that it did not reach its target."""
    if run.kind == "train":
        return f"One training run, final loss {tables.number(run.systems[0].number('final_loss'), 4)}."
    missed = [system.name for system in run.systems if not system.figures.get("reached")]
    if run.target_loss is None:
        return _verdict_of_steps(run, missed)
    target = tables.number(run.target_loss)
    if missed:
        return f"Target loss {target} was not reached by {', '.join(missed)}; times are not comparable."
    if run.baseline is None or len(run.systems) == 1:
        return f"Every system reached training loss {target}."
    others = [s for s in run.systems if s is not run.baseline]
    parts = [_needed(system, run.baseline) for system in others]
    return f"Every system reached loss {target}. MoE-layer time to it: {'; '.join(parts)}."


def _verdict_of_steps(run: Run, missed: Sequence[str]) -> str:
    """The verdict of a comparison that ends after a number of steps."""
    steps = max((system.number("steps") or 0 for system in run.systems), default=0)
    if missed:
        return f"{', '.join(missed)} did not do all {steps:.0f} steps with a finite loss."
    if run.baseline is None or len(run.systems) == 1:
        return f"Every system did {steps:.0f} steps."
    others = [system for system in run.systems if system is not run.baseline]
    if len(others) > MOST_NAMED:
        ratios = [(_ratio(system, run.baseline, "moe_time_critical_s"), system) for system in others]
        others = [
            system for _, system in sorted(((r, s) for r, s in ratios if r is not None), key=itemgetter(0))
        ]
        others = others[:MOST_NAMED]
    parts = [_needed(system, run.baseline) for system in others]
    first = "" if len(others) == len(run.systems) - 1 else ", the shortest"
    return f"Every system did {steps:.0f} steps. MoE-layer time for them{first}: {'; '.join(parts)}."


def _needed(system: SystemRun, base: SystemRun) -> str:
    """The modelled ratio with the wall ratio beside it, or the wall ratio alone where no link is stated."""
    critical, wall = (_ratio(system, base, name) for name in ("moe_time_critical_s", "moe_time_wall_s"))
    first, kind = (wall, "wall") if critical is None else (critical, "critical path, modelled link")
    beside = "" if critical is None else f"; wall {tables.number(wall)}"
    return f"{system.name} needed {tables.number(first)} of {base.name}'s time ({kind}{beside})"


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """(figure, value, explanation) of the first system beside the baseline, where both reached the target."""
    base = run.baseline
    ours = next((s for s in run.systems if s is not base), None)
    if base is None or ours is None or not (base.figures.get("reached") and ours.figures.get("reached")):
        return []
    end = "in all steps" if run.target_loss is None else "to the target loss"
    names = (
        ("MoE-layer time", "moe_time_critical_s", f"critical path, modelled link, {end}"),
        ("MoE-layer time, wall", "moe_time_wall_s", "as the clock on this machine saw it"),
        ("bytes on the wire", "wire_bytes", "all ranks, whole run"),
        ("layer buffers", "buffer_peak_bytes", "peak of the most loaded rank"),
        ("steps", "steps", f"optimizer steps {end}"),
    )
    return [
        (title, f"{ratio:.2f}", f"{explanation}, {ours.name} / {base.name}")
        for title, name, explanation in names
        if (ratio := _ratio(ours, base, name)) is not None
    ]


def method(run: Run) -> str:
    """How the times were taken, with the link speed that was stated."""
    if run.kind == "train":
        return "MoE-layer time is wall time of the layer on the slowest rank."
    smoothing = run.summary.get("smoothing", {})
    parts = [
        tables.critical_path(run),
        str(run.summary.get("link_rule", "")),
        f"Smoothed loss: mean of the last {smoothing.get('steps', '?')} steps.",
        f"World size {run.summary.get('world_size', '?')}, seed {run.summary.get('seed', '?')}.",
    ]
    return " ".join(part for part in parts if part)


def _ratio(ours: SystemRun, base: SystemRun, name: str) -> float | None:
    value, other = ours.number(name), base.number(name)
    return value / other if value is not None and other else None
