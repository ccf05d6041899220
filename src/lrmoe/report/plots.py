"""The plots of a run as plain Plotly dictionaries, each with a caption, an accessible name and the table behind it.

Colours are names of CSS variables ("var(--series-1)"): the page resolves them, so that light, dark and print share one
description.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lrmoe.report.data import BASELINE, Run, Series, SystemRun
from lrmoe.report.tables import Table, number, percent

# Phases of a layer call, grouped for the eye; the table behind the plot shows each.
PHASE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "experts forward": ("experts",),
    "experts backward": ("experts_backward",),
    "rows packed and combined": ("pack", "dispatch", "combine", "exchange", "return", "replicas"),
    "planned, scored and selected": ("plan", "score", "select", "reroute"),
    "rows on the link": ("wire",),
}
_SERIES_COLOURS = 4
_TABLE_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure of the page.

    Attributes:
        name: identifier in the page.
        title, caption: heading and how to read it.
        label: accessible name: what a reader who cannot see the plot should know.
        traces, layout: Plotly's data and layout.
        table: the numbers behind the plot.
        height: of the plot area in CSS pixels.
    """

    name: str
    title: str
    caption: str
    label: str
    traces: Sequence[Mapping[str, Any]]
    table: Table
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 360


def plots(run: Run) -> list[Plot]:
    """All plots that the run has data for."""
    made = (loss_against_time(run), loss_against_steps(run), load(run), phases(run), kept(run))
    return [plot for plot in made if plot is not None]


def label(text: str) -> str:
    """Text as Plotly shows it literally: Plotly reads a little HTML in labels."""
    return html.escape(text, quote=False)


def colour(run: Run, system: SystemRun) -> str:
    """The baseline is always grey; the others take the series colours in order."""
    if system.name == BASELINE:
        return "var(--series-0)"
    others = [s for s in run.systems if s.name != BASELINE]
    return f"var(--series-{1 + others.index(system) % _SERIES_COLOURS})"


def loss_against_time(run: Run) -> Plot | None:
    """Training loss against the MoE-layer time spent so far."""
    critical = all(system.series.critical_s for system in run.systems)
    times: Callable[[Series], Sequence[float]] = (lambda s: s.critical_s) if critical else (lambda s: s.wall_s)
    kind = "critical path" if critical else "wall"
    caption = f"Lines: smoothed loss; faint: every step. Time is spent in the MoE layers only ({kind})."
    return _loss_plot(run, "loss-time", "Loss against MoE-layer time", f"MoE-layer time, {kind} (s)", times, caption)


def loss_against_steps(run: Run) -> Plot | None:
    """Training loss against optimizer steps."""
    caption = "The same losses, step by step: what pruning costs in progress per step, if anything."
    return _loss_plot(run, "loss-steps", "Loss against steps", "optimizer step", lambda s: s.step, caption)


def _loss_plot(
    run: Run, name: str, title: str, axis: str, xs: Callable[[Series], Sequence[float]], caption: str
) -> Plot | None:
    if not any(xs(system.series) for system in run.systems):
        return None
    traces = [trace for system in run.systems for trace in _loss_traces(run, system, xs(system.series))]
    layout: dict[str, Any] = {"xaxis": {"title": axis, "rangemode": "tozero"}, "yaxis": {"title": "training loss"}}
    if run.target_loss is not None:
        layout["shapes"] = [_line(run.target_loss)]
        layout["annotations"] = [_note(run.target_loss, f"target {number(run.target_loss)}")]
    rows = [row for system in run.systems for row in _loss_rows(system, xs(system.series))]
    table = Table(title=title, columns=("system", axis, "loss", "smoothed loss"), rows=rows, note=_thinned(run))
    return Plot(
        name=name, title=title, caption=caption, label=_loss_label(run, title), traces=traces, layout=layout, table=table
    )


def _loss_traces(run: Run, system: SystemRun, x: Sequence[float]) -> list[dict[str, Any]]:
    line = {"color": colour(run, system), "width": 2.5}
    name = label(system.name)
    common = {"type": "scatter", "x": list(x), "name": name, "legendgroup": name}
    traces: list[dict[str, Any]] = [
        {**common, "y": list(system.series.loss), "mode": "lines", "line": {**line, "width": 1}, "opacity": 0.3}
        | {"showlegend": False, "hoverinfo": "skip"},
        {**common, "y": list(system.series.smoothed), "mode": "lines", "line": line},
    ]
    if system.figures.get("reached") and x:
        end = {"x": [x[-1]], "y": [system.series.smoothed[-1]], "mode": "markers", "showlegend": False}
        traces.append({**common, **end, "marker": {"color": colour(run, system), "size": 9}})
    return traces


def _loss_rows(system: SystemRun, x: Sequence[float]) -> list[tuple[str, ...]]:
    series = system.series
    every = max(1, -(-len(series.step) // _TABLE_ROWS))
    picked = [i for i in range(len(x)) if i % every == 0 or i == len(x) - 1]
    return [(system.name, number(x[i], 4), number(series.loss[i], 4), number(series.smoothed[i], 4)) for i in picked]


def _thinned(run: Run) -> str:
    longest = max((len(system.series.step) for system in run.systems), default=0)
    every = -(-longest // _TABLE_ROWS)
    return f"Every {every} steps and the last." if every > 1 else ""


def _loss_label(run: Run, title: str) -> str:
    ends = [f"{s.name} ends at loss {number(s.number('final_loss'), 4)}" for s in run.systems if s.series.step]
    return f"{title}: " + "; ".join(ends)


def load(run: Run) -> Plot | None:
    """Rows per rank before (forward) and after (backward) pruning, one panel per system."""
    systems = [system for system in run.systems if system.loads]
    if not systems:
        return None
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"barmode": "group", "bargap": 0.25, "shapes": [], "annotations": []}
    layout["grid"] = {"rows": len(systems), "columns": 1, "pattern": "independent", "ygap": 0.35}
    top = max(max(r.forward_R + r.backward_R) for system in systems for r in system.loads)
    for i, system in enumerate(systems):
        suffix = "" if i == 0 else str(i + 1)
        traces += _load_traces(run, system, suffix, first=i == 0)
        mean = sum(rows.mean for rows in system.loads) / len(system.loads)
        layout["shapes"].append(_line(mean, f"x{suffix} domain", f"y{suffix}"))
        layout["annotations"].append(_panel_title(system.name, f"x{suffix} domain", f"y{suffix} domain"))
        layout[f"yaxis{suffix}"] = {"title": "rows", "range": [0, top * 1.1]}
        layout[f"xaxis{suffix}"] = {"type": "multicategory", "tickangle": 0}
    caption = "Mean rows of a step per rank and layer, over the steps with a pruned backward. Dashed: the mean load with"
    caption += " nothing dropped. A synchronous step waits for the tallest bar."
    return Plot(
        name="load",
        title="Load per rank, forward and backward",
        caption=caption,
        label=_load_label(systems),
        traces=traces,
        layout=layout,
        table=_load_table(systems),
        height=130 + 200 * len(systems),
    )


def _load_traces(run: Run, system: SystemRun, suffix: str, first: bool) -> list[dict[str, Any]]:
    layers = [f"layer {rows.layer}" for rows in system.loads for _ in rows.forward_R]
    ranks = [f"rank {r}" for rows in system.loads for r in range(len(rows.forward_R))]
    common = {"type": "bar", "x": [layers, ranks], "xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "showlegend": False}
    sides = (("forward", "var(--forward)", "forward_R"), ("backward", "var(--backward)", "backward_R"))
    return [
        {**common, "name": name, "legendgroup": name, "showlegend": first, "marker": {"color": fill}}
        | {"y": [value for rows in system.loads for value in getattr(rows, part)]}
        for name, fill, part in sides
    ]


def _load_label(systems: Sequence[SystemRun]) -> str:
    parts = []
    for system in systems:
        forward = max(max(rows.forward_R) / rows.mean for rows in system.loads if rows.mean)
        backward = max(max(rows.backward_R) / rows.mean for rows in system.loads if rows.mean)
        parts.append(f"{system.name}: most loaded rank {forward:.2f} mean loads forward, {backward:.2f} backward")
    return "Load per rank. " + "; ".join(parts)


def _load_table(systems: Sequence[SystemRun]) -> Table:
    rows = [
        (system.name, str(layer.layer), str(rank), number(ahead, 5), number(back, 5), number(layer.mean, 5))
        for system in systems
        for layer in system.loads
        for rank, (ahead, back) in enumerate(zip(layer.forward_R, layer.backward_R, strict=True))
    ]
    columns = ("system", "layer", "rank", "rows forward", "rows backward", "mean load")
    return Table(title="Load per rank", columns=columns, rows=rows)


def phases(run: Run) -> Plot | None:
    """Milliseconds of a layer call by phase, one stacked bar per system."""
    systems = [system for system in run.systems if system.phase_ms]
    if not systems:
        return None
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": group,
            "y": [label(system.name) for system in systems],
            "x": [sum(system.phase_ms.get(name, 0.0) for name in names) for system in systems],
            "marker": {"color": f"var(--phase-{i})", "line": {"color": "var(--page)", "width": 1}},
            "hovertemplate": "%{x:.3f} ms<extra>" + group + "</extra>",
        }
        for i, (group, names) in enumerate(PHASE_GROUPS.items())
    ]
    layout = {"barmode": "stack", "xaxis": {"title": "ms per layer call", "rangemode": "tozero"}}
    layout["yaxis"] = {"autorange": "reversed", "automargin": True, "showgrid": False}
    totals = "; ".join(f"{s.name} {number(sum(s.phase_ms.values()))} ms per call" for s in systems)
    return Plot(
        name="phases",
        title="Phases of a layer call",
        caption="Forward and backward of one MoE layer call, mean over the run: per phase the slowest rank.",
        label=f"Phases of a layer call: {totals}",
        traces=traces,
        layout=layout,
        table=_phase_table(systems),
        height=170 + 56 * len(systems),
    )


def _phase_table(systems: Sequence[SystemRun]) -> Table:
    names = {name: None for system in systems for name in system.phase_ms}
    rows = [(name, *(number(system.phase_ms.get(name)) for system in systems)) for name in names]
    rows.append(("all", *(number(sum(system.phase_ms.values()), 4) for system in systems)))
    return Table(title="Phases, ms per layer call", columns=("phase", *(s.name for s in systems)), rows=rows)


def kept(run: Run) -> Plot | None:
    """Share of pairs that backward kept, step by step."""
    systems = [system for system in run.systems if any(v is not None for v in system.series.kept_share)]
    if not systems:
        return None
    traces = [
        {"type": "scatter", "mode": "lines", "name": label(system.name), "x": list(system.series.step)}
        | {"y": list(system.series.kept_share), "line": {"color": colour(run, system), "width": 2.5, "shape": "hv"}}
        for system in systems
    ]
    layout = {"xaxis": {"title": "optimizer step", "rangemode": "tozero"}}
    layout["yaxis"] = {"title": "kept share", "range": [0, 1.05], "tickformat": ".0%"}
    rows = [(s.name, *_kept_row(s)) for s in systems]
    ends = "; ".join(f"{s.name} {percent(s.series.kept_share[-1])}" for s in systems)
    columns = ("system", "first step", "least", "last step", "whole run")
    return Plot(
        name="kept",
        title="Pairs kept in backward",
        caption="Share of (token, expert) pairs whose gradient is computed. Warm-up steps are exact.",
        label=f"Share of pairs kept in backward, last step: {ends}",
        traces=traces,
        layout=layout,
        table=Table(title="Kept share", columns=columns, rows=rows),
        height=260,
    )


def _kept_row(system: SystemRun) -> tuple[str, ...]:
    shares = [share for share in system.series.kept_share if share is not None]
    whole = system.number("kept_share")
    return percent(shares[0]), percent(min(shares)), percent(shares[-1]), percent(whole)


def _line(y: float, xref: str = "paper", yref: str = "y") -> dict[str, Any]:
    dash = {"color": "var(--ink-soft)", "width": 1.5, "dash": "dash"}
    return {"type": "line", "xref": xref, "yref": yref, "x0": 0, "x1": 1, "y0": y, "y1": y, "line": dash}


def _note(y: float, text: str) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "y", "x": 1, "y": y, "xanchor": "right", "yanchor": "bottom"}
    return {**place, "text": label(text), "showarrow": False}


def _panel_title(text: str, xref: str, yref: str) -> dict[str, Any]:
    place = {"xref": xref, "yref": yref, "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
    return {**place, "text": f"<b>{label(text)}</b>", "showarrow": False}
