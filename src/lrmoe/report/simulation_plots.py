"""Plots of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.report.data import Run
from lrmoe.report.names import styles
from lrmoe.report.numbers import number, percent
from lrmoe.report.plot import Plot, label
from lrmoe.report.simulation import OURS, milliseconds, pressures, scenarios, where
from lrmoe.report.tables import Table

_Figures = Mapping[str, Any]


def plots(run: Run) -> list[Plot]:
    """Peak by system, peak by ranks where there are several clusters, throughput by pressure, layer time."""
    first = scenarios(run)[0]
    made = [peaks(first), by_ranks(run), pressure(first), layer_time(first)]
    return [plot for plot in made if plot is not None]


def _planned(scenario: _Figures) -> dict[str, _Figures]:
    return {name: f for name, f in scenario["systems"].items() if f["calls"]}


def peaks(scenario: _Figures) -> Plot | None:
    """Forward and backward peak of every system."""
    systems = _planned(scenario)
    if not systems:
        return None
    names = [label(name) for name in systems]
    sides = (("forward", "var(--forward)"), ("backward", "var(--backward)"))
    traces = [
        {"type": "bar", "name": side, "x": names, "y": [f[f"{side}_peak"] for f in systems.values()]}
        | {"marker": {"color": fill}}
        for side, fill in sides
    ]
    rows = [
        (n, number(f["forward_peak"], 4), number(f["backward_peak"], 4), number(f["peak_worst"], 4))
        for n, f in systems.items()
    ]
    ends = "; ".join(f"{row[0]} {row[1]} forward, {row[2]} backward" for row in rows)
    columns = ("system", "forward", "backward", "worst call")
    return Plot(
        name="peak",
        title=f"Peak load by system, {where(scenario)}",
        caption="Rows of the most loaded rank over the mean load with nothing dropped, mean over calls. 1 is even.",
        label=f"Peak over mean load: {ends}",
        traces=traces,
        layout={"barmode": "group", "yaxis": {"title": "peak / mean", "rangemode": "tozero"}},
        table=Table(title="Peak load", columns=columns, rows=rows),
    )


def _lines(series: Mapping[str, Sequence[float]], x: Sequence[Any]) -> list[dict[str, Any]]:
    """A line per system in its own colour and dash, lrmoe's thicker."""
    drawn = styles(series)
    return [
        {"type": "scatter", "mode": "lines+markers", "name": label(name), "x": list(x), "y": list(values)}
        | {"line": {"color": drawn[name][0], "dash": drawn[name][1], "width": 4 if name == OURS else 2}}
        for name, values in series.items()
    ]


def by_ranks(run: Run) -> Plot | None:
    """Larger peak of both passes over the number of ranks, where there are several."""
    found = scenarios(run)
    systems = [n for n in found[0]["systems"] if all(n in _planned(s) for s in found)]
    if len(found) < 2 or not systems:
        return None
    ranks = [s["ranks"] for s in found]
    series = {n: [s["systems"][n]["peak"] for s in found] for n in systems}
    rows = [(n, *(number(v, 4) for v in values)) for n, values in series.items()]
    ends = "; ".join(f"{row[0]} {row[-1]} at {ranks[-1]} ranks" for row in rows)
    return Plot(
        name="ranks",
        title="Peak load by number of ranks",
        caption="The larger of forward and backward peak. Logarithmic axes.",
        label=f"Peak over mean load: {ends}",
        traces=_lines(series, ranks),
        layout={
            "xaxis": {"title": "ranks", "type": "log", "tickvals": ranks},
            "yaxis": {"title": "peak / mean", "type": "log"},
        },
        table=Table(title="Peak by ranks", columns=("system", *(str(r) for r in ranks)), rows=rows),
    )


def pressure(scenario: _Figures) -> Plot | None:
    """Effective throughput over batch pressure."""
    tried = pressures(scenario)
    if not tried:
        return None
    series = {
        n: [f["throughput"][p] for p in tried] for n, f in _planned(scenario).items() if "throughput" in f
    }
    rows = [(n, *(percent(v) for v in values)) for n, values in series.items()]
    ends = "; ".join(f"{row[0]} {row[-1]}" for row in rows)
    return Plot(
        name="pressure",
        title="Effective throughput under pressure",
        caption="Part of the backward rows of the fullest rank that fits its memory when the batch grows. Pairs that "
        "backward leaves out on purpose are in the table of balance, not in here.",
        label=f"Effective throughput at {tried[-1]} times the batch: {ends}",
        traces=_lines(series, [float(p) for p in tried]),
        layout={
            "xaxis": {"title": "batch, times", "rangemode": "tozero"},
            "yaxis": {"title": "effective throughput", "range": [0, 1.05], "tickformat": ".0%"},
        },
        table=Table(title="Effective throughput", columns=("system", *(f"{p}x" for p in tried)), rows=rows),
    )


def layer_time(scenario: _Figures) -> Plot | None:
    """Modelled milliseconds of a layer call."""
    systems = _planned(scenario)
    if not systems:
        return None
    names = [label(name) for name in systems]
    traces = [
        {"type": "bar", "orientation": "h", "name": side, "y": names}
        | {"x": [f[f"{side}_ms"] for f in systems.values()], "marker": {"color": fill}}
        for side, fill in (("forward", "var(--forward)"), ("backward", "var(--backward)"))
    ]
    rows = [
        (n, milliseconds(f["forward_ms"]), milliseconds(f["backward_ms"]), milliseconds(f["layer_ms"]))
        for n, f in systems.items()
    ]
    ends = "; ".join(f"{row[0]} {row[3]} ms" for row in rows)
    return Plot(
        name="time",
        title="Modelled time of a layer call",
        caption="Phases one after another, the slowest rank each; no overlap of weights or exchange with compute.",
        label=f"Modelled time of a layer call: {ends}",
        traces=traces,
        layout={
            "barmode": "stack",
            "xaxis": {"title": "ms", "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "showgrid": False},
        },
        table=Table(title="Layer time, ms", columns=("system", "forward", "backward", "both"), rows=rows),
        height=160 + 32 * len(systems),
    )
