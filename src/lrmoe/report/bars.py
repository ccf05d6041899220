"""Plots of one layer call: rows per rank, and time by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.report.data import LayerRows, Run, SystemRun
from lrmoe.report.numbers import even, number, seconds, size
from lrmoe.report.plot import Plot, label, line
from lrmoe.report.tables import Table

# Phases of a layer call, grouped for the eye; the table behind the plot shows each.
PHASE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "experts forward": ("experts",),
    "experts backward": ("experts_backward",),
    "rows packed and combined": ("pack", "dispatch", "combine", "exchange", "return"),
    "planned, scored and selected": ("plan", "score", "select", "reroute"),
    "bytes on the link (modelled)": ("wire",),
    "experts' weights and gradients moved": ("replicas",),
}

_PANELS = 4  # systems with a panel each
_NAMED = 4  # systems in one sentence
_SIDES: Mapping[str, str] = {"forward": "forward_R", "backward": "backward_R"}
_TITLE = "Load per rank, forward and backward"
_WHICH = "Mean rows of a step per rank and layer, over the steps with a pruned backward."


def load(run: Run) -> Plot | None:
    """Rows per rank before (forward) and after (backward) pruning: a panel per system, or of many a row each."""
    systems = [system for system in run.systems if system.loads]
    if not systems or len(systems[0].loads[0].forward_R) == 1:  # one rank has all rows, always
        return None
    if len(systems) > _PANELS:
        return _squares(systems)
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"barmode": "group", "bargap": 0.25, "shapes": [], "annotations": []}
    layout["margin"] = {"l": 8, "r": 12, "t": 68, "b": 8}  # legend above the first panel's title
    layout["grid"] = {"rows": len(systems), "columns": 1, "pattern": "independent", "ygap": 0.35}
    top = max(max(r.forward_R + r.backward_R) for system in systems for r in system.loads)
    for i, system in enumerate(systems):
        suffix = "" if i == 0 else str(i + 1)
        traces += _load_traces(system, suffix, first=i == 0)
        mean = sum(rows.mean for rows in system.loads) / len(system.loads)
        layout["shapes"].append(line(mean, f"x{suffix} domain", f"y{suffix}"))
        layout["annotations"].append(_panel_title(system.name, f"x{suffix} domain", f"y{suffix} domain"))
        layout[f"yaxis{suffix}"] = {"title": "rows", "range": [0, top * 1.1]}
        layout[f"xaxis{suffix}"] = {"type": "multicategory", "tickangle": 0, "title": "rank"}
    return Plot(
        name="load",
        title=_TITLE,
        caption=f"{_WHICH} Dashed: the mean load with nothing dropped. A synchronous step waits for the tallest bar.",
        label=_load_label(systems),
        traces=traces,
        layout=layout,
        table=_load_table(systems),
        height=130 + 200 * len(systems),
    )


def _squares(systems: Sequence[SystemRun]) -> Plot:
    """Load over mean load of every system, rank and layer: forward above, backward below."""
    layers = [f"layer {rows.layer}" for rows in systems[0].loads for _ in rows.forward_R]
    ranks = [str(r) for rows in systems[0].loads for r in range(len(rows.forward_R))]
    values = {
        side: [[_over(v, rows) for rows in system.loads for v in getattr(rows, part)] for system in systems]
        for side, part in _SIDES.items()
    }
    top = max(v for found in values.values() for row in found for v in row)
    traces = [
        {
            "type": "heatmap",
            "name": side,
            "x": [layers, ranks],
            "y": [label(system.name) for system in systems],
            "z": found,
            "zmin": 0,
            "zmax": top,
            "colorscale": [[i / 3, f"var(--heat-{i})"] for i in range(4)],
            "showscale": i == 0,
            "colorbar": {"thickness": 10, "outlinewidth": 0},
            "xgap": 1,
            "ygap": 1,
            "yaxis": "y" if i == 0 else "y2",
            "hovertemplate": f"%{{y}}, {side}: %{{z:.2f}} mean loads<extra></extra>",
        }
        for i, (side, found) in enumerate(values.items())
    ]
    panel: dict[str, Any] = {"autorange": "reversed", "showgrid": False, "type": "category"}
    return Plot(
        name="load",
        title=_TITLE,
        caption=f"{_WHICH} Squares: load of a rank over the mean load with nothing dropped; the strongest is what a "
        "step waits for.",
        label=_load_label(systems),
        traces=traces,
        layout={
            "xaxis": {
                "type": "multicategory",
                "title": "rank",
                "tickangle": 0,
                "anchor": "y2",
                "showgrid": False,
            },
            "yaxis": {**panel, "domain": [0.55, 1]},
            "yaxis2": {**panel, "domain": [0, 0.45]},
            "annotations": [
                _panel_title(side, "x domain", f"{axis} domain")
                for side, axis in (("forward", "y"), ("backward", "y2"))
            ],
        },
        table=_load_table(systems),
        height=140 + 40 * len(systems),
    )


def _over(value: float, rows: LayerRows) -> float:
    return value / rows.mean if rows.mean else 0.0


def _load_traces(system: SystemRun, suffix: str, first: bool) -> list[dict[str, Any]]:
    layers = [f"layer {rows.layer}" for rows in system.loads for _ in rows.forward_R]
    ranks = [str(r) for rows in system.loads for r in range(len(rows.forward_R))]
    common = {
        "type": "bar",
        "x": [layers, ranks],
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "showlegend": False,
    }
    return [
        {
            **common,
            "name": side,
            "legendgroup": side,
            "showlegend": first,
            "marker": {"color": f"var(--{side})"},
        }
        | {"y": [value for rows in system.loads for value in getattr(rows, part)]}
        for side, part in _SIDES.items()
    ]


def _load_label(systems: Sequence[SystemRun]) -> str:
    parts = []
    for system in systems:
        forward = max(max(rows.forward_R) / rows.mean for rows in system.loads if rows.mean)
        backward = max(max(rows.backward_R) / rows.mean for rows in system.loads if rows.mean)
        parts.append(
            f"{system.name}: most loaded rank {forward:.2f} mean loads forward, {backward:.2f} backward"
        )
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


def _panel_title(text: str, xref: str, yref: str) -> dict[str, Any]:
    place = {"xref": xref, "yref": yref, "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
    return {**place, "text": f"<b>{label(text)}</b>", "showarrow": False}


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
        if any(name in system.phase_ms for system in systems for name in names)
    ]
    layout = {"barmode": "stack", "xaxis": {"title": "ms per layer call", "rangemode": "tozero"}}
    layout["yaxis"] = {"autorange": "reversed", "automargin": True, "showgrid": False}
    totals = "; ".join(f"{s.name} {number(sum(s.phase_ms.values()))} ms per call" for s in systems)
    return Plot(
        name="phases",
        title="Phases of a layer call",
        caption=_phase_caption(run),
        label=f"Phases of a layer call: {totals}",
        traces=traces,
        layout=layout,
        table=_phase_table(systems),
        height=190 + 56 * len(systems),
    )


def _phase_caption(run: Run) -> str:
    text = "Forward and backward of one MoE layer call, mean over the run: per phase the slowest rank."
    walls = [
        f"{system.name} {seconds(wall)}"
        for system in run.systems
        if (wall := system.number("moe_time_wall_s"))
    ]
    if run.kind != "compare" and not run.summary.get("link_bytes_per_s"):
        return text
    link = run.summary.get("link_bytes_per_s")
    text += f" Bytes over a modelled link of {size(link)}/s." if link else ""
    return text if len(walls) > _NAMED else f"{text} Wall, whole run: {', '.join(walls)}."


def _phase_table(systems: Sequence[SystemRun]) -> Table:
    names = {name: None for system in systems for name in system.phase_ms}
    rows = [(name, *(even(system.phase_ms.get(name)) for system in systems)) for name in names]
    rows.append(("all", *(even(sum(system.phase_ms.values()), 4) for system in systems)))
    return Table(title="Phases, ms per layer call", columns=("phase", *(s.name for s in systems)), rows=rows)
