"""The HTML page of one or two runs: one file that loads nothing from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError, require_extra
from lrmoe.report import simulation, simulation_plots, tables
from lrmoe.report.bars import load, phases
from lrmoe.report.curves import kept, loss_against_steps, loss_against_time, peaks
from lrmoe.report.data import Run, SystemRun
from lrmoe.report.plot import Plot


@dataclass(frozen=True, kw_only=True)
class Section:
    """One run on the page: its sentence, tiles, plots and tables."""

    anchor: str
    run: Run
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
    """The page of one or two runs.

    Raises:
        ConfigError: no run, or more than two.
        MissingExtraError: jinja2 or plotly is not installed.
    """
    if not 1 <= len(runs) <= 2:
        raise ConfigError(f"runs: {len(runs)} given; a report shows one or two")
    jinja2, plotly = require_extra("jinja2", "report"), require_extra("plotly.offline", "report")
    env = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    sections = [_section(run, f"run{i}") for i, run in enumerate(runs)]
    # Markup is text of this package or escaped by _script_json; everything that a run names goes through autoescape.
    return str(
        env.from_string(_asset("report.html.j2")).render(
            title=" and ".join(run.name for run in runs),
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


def _section(run: Run, anchor: str) -> Section:
    return _simulated(run, anchor) if run.kind == "simulate" else _trained(run, anchor)


def _simulated(run: Run, anchor: str) -> Section:
    first, *others = simulation.tables(run)
    return Section(
        anchor=anchor,
        run=run,
        verdict=simulation.verdict(run),
        tiles=[],
        headline=first,
        further=others,
        plots=simulation_plots.plots(run),
        fairness=simulation.fairness(run),
        method=simulation.method(run),
        details=[tables.environment(run)],
    )


def _trained(run: Run, anchor: str) -> Section:
    details = [tables.system_settings(run), tables.settings(run), tables.environment(run)]
    if run.kind == "train":
        details.insert(0, tables.train_summary(run))
    fairness = tables.fairness(run)
    return Section(
        anchor=anchor,
        run=run,
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
    made = (draw(run) for draw in (loss_against_time, loss_against_steps, load, peaks, phases, kept))
    return [plot for plot in made if plot is not None]


def verdict(run: Run) -> str:
    """One sentence: what the run showed, or that it did not reach its target."""
    if run.kind == "train":
        return f"One training run, final loss {tables.number(run.systems[0].number('final_loss'), 4)}."
    missed = [system.name for system in run.systems if not system.figures.get("reached")]
    target = tables.number(run.target_loss)
    if missed:
        return f"Target loss {target} was not reached by {', '.join(missed)}; times are not comparable."
    if run.baseline is None or len(run.systems) == 1:
        return f"Every system reached training loss {target}."
    others = [s for s in run.systems if s is not run.baseline]
    parts = [_needed(system, run.baseline) for system in others]
    return f"Every system reached loss {target}. MoE-layer time to it: {'; '.join(parts)}."


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
    names = (
        ("MoE-layer time", "moe_time_critical_s", "critical path, modelled link, to the target loss"),
        ("MoE-layer time, wall", "moe_time_wall_s", "as the clock on this machine saw it"),
        ("bytes on the wire", "wire_bytes", "all ranks, whole run"),
        ("layer buffers", "buffer_peak_bytes", "peak of the most loaded rank"),
        ("steps", "steps", "optimizer steps to the target loss"),
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
