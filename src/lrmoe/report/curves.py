"""Plots of what happened step by step: peak load, kept share, energy and variance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lrmoe.report.data import Run, Series, SystemRun
from lrmoe.report.numbers import number, percent
from lrmoe.report.plot import Plot, colour, label, line, note
from lrmoe.report.tables import Table


def peaks(run: Run) -> Plot | None:
    """Most loaded rank over the mean load, step by step; a comparison's own page shows rows per rank instead."""
    systems = [system for system in run.systems if system.series.forward_peak]
    if not systems or run.kind == "compare":
        return None
    shown = ("forward", "backward") if len(systems) <= 2 else ("backward",)
    traces = [_peak_trace(system, side, len(systems) > 1) for system in systems for side in shown]
    rows = [
        (system.name, side, *_range(getattr(system.series, f"{side}_peak")))
        for system in systems
        for side in ("forward", "backward")
    ]
    ends = "; ".join(f"{row[0]} {row[1]} at most {row[4]}" for row in rows)
    return Plot(
        name="peaks",
        title=f"Peak load, {' and '.join(shown)}",
        caption="Rows of the most loaded rank over the mean load of the complete call, worst layer of the step."
        + (" Thin and dotted: forward." if len(systems) == 2 else ""),
        label=f"Peak over mean load: {ends}",
        traces=traces,
        layout={
            "xaxis": {"title": "optimizer step", "rangemode": "tozero"},
            "yaxis": {"title": "peak / mean", "rangemode": "tozero"},
        },
        table=Table(title="Peak over mean load", columns=("run", "pass", "mean", "least", "most"), rows=rows),
        height=260,
    )


def _peak_trace(system: SystemRun, side: str, several: bool) -> dict[str, Any]:
    """One side of one system: by colour of the side, or of the system where there are several."""
    stroke: dict[str, Any] = {"color": f"var(--{side})", "width": 2.5, "shape": "hv"}
    name = side
    if several:
        name = f"{label(system.name)}, {side}"
        thin = {"width": 1.25, "dash": "dot"} if side == "forward" else {"dash": system.dash}
        stroke |= {"color": system.colour, **thin}
    y = list(getattr(system.series, f"{side}_peak"))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(system.series.step),
        "y": y,
        "line": stroke,
    }


def _range(values: Sequence[float]) -> tuple[str, str, str]:
    return number(sum(values) / len(values)), number(min(values)), number(max(values))


def kept(run: Run) -> Plot | None:
    """Share of pairs that backward kept, step by step."""
    return _shares(
        run,
        name="kept",
        title="Pairs kept in backward",
        read=lambda series: series.kept_share,
        caption="Share of (token, expert) pairs whose gradient is computed. Warm-up steps are exact.",
        axis="kept share",
        layout={"range": [0, 1.05], "tickformat": ".0%"},
        whole="kept_share",
    )


def energy(run: Run) -> Plot | None:
    """Share of the scores' energy that left-out pairs held, step by step."""
    return _shares(
        run,
        name="energy",
        title="Energy of the pairs left out",
        read=lambda series: series.dropped_energy,
        caption="Sum of squared scores of the left-out pairs over that of all pairs: what topk loses for good; "
        "sampled makes up for it on average. Steps that drop nothing have no point.",
        axis="dropped energy",
        layout={"rangemode": "tozero", "tickformat": ".1%"},
    )


def variance(run: Run) -> Plot | None:
    """Variance that sampling added, step by step."""
    return _shares(
        run,
        name="variance",
        title="Variance added by sampling",
        read=lambda series: series.added_variance,
        caption="Sum over the candidates of (1/pi - 1) times the squared score, over the sum of all squared scores. "
        "Steps that drop nothing, and topk, add none.",
        axis="added variance",
        layout={"rangemode": "tozero", "tickformat": ".1%"},
    )


def limited(run: Run) -> Plot | None:
    """Added variance over the gradient's own, where a limit on it governed a training run."""
    found = [(s, s.config.get("max_added_variance")) for s in run.systems if any(s.series.variance_mean)]
    if not found:
        return None
    lines = (("running mean", "variance_mean", 2.5), ("predicted", "variance_predicted", 1.25))
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": label(f"{system.name}, {title}" if len(found) > 1 else title),
            "x": list(system.series.step),
            "y": list(getattr(system.series, name)),
            "line": {"color": colour(run, system), "width": width, "dash": "solid" if width > 2 else "dot"},
        }
        for system, _ in found
        for title, name, width in lines
    ]
    limits = dict.fromkeys(limit for _, limit in found if limit is not None)
    rows = [(s.name, number(limit), *_share_row(s.series.variance_mean, None)) for s, limit in found]
    columns = ("system", "limit", "first step", "least", "most", "last step", "mean")
    return Plot(
        name="limited",
        title="Added variance under its limit",
        caption="Variance that sampling added over the gradient's own, worst layer: the running mean is held to the "
        "limit (dashed); dotted is what the quotas were predicted to add.",
        label="Added variance over the gradient's own: "
        + "; ".join(f"{row[0]} at most {row[4]} of a limit {row[1]}" for row in rows),
        traces=traces,
        layout={
            "xaxis": {"title": "optimizer step", "rangemode": "tozero"},
            "yaxis": {"title": "added / own", "rangemode": "tozero"},
            "shapes": [line(limit) for limit in limits],
            "annotations": [note(limit, f"limit {number(limit)}") for limit in limits],
        },
        table=Table(title="Added variance under its limit", columns=columns, rows=rows),
        height=260,
    )


def _shares(
    run: Run,
    *,
    name: str,
    title: str,
    read: Callable[[Series], Sequence[float | None]],
    caption: str,
    axis: str,
    layout: Mapping[str, Any],
    whole: str = "",
) -> Plot | None:
    """A share of each step, one line per system that has it; None where it is nowhere above zero."""
    systems = [system for system in run.systems if any(read(system.series))]
    if not systems:
        return None
    traces = [
        {"type": "scatter", "mode": "lines", "name": label(system.name), "x": list(system.series.step)}
        | {
            "y": list(read(system.series)),
            "line": {"color": colour(run, system), "width": 2.5, "shape": "hv", "dash": system.dash},
        }
        for system in systems
    ]
    rows = [(s.name, *_share_row(read(s.series), s.number(whole) if whole else None)) for s in systems]
    ends = "; ".join(f"{row[0]} {row[4]}" for row in rows)
    columns = ("system", "first step", "least", "most", "last step", "whole run" if whole else "mean")
    return Plot(
        name=name,
        title=title,
        caption=caption,
        label=f"{title}, last step: {ends}",
        traces=traces,
        layout={
            "xaxis": {"title": "optimizer step", "rangemode": "tozero"},
            "yaxis": {"title": axis, **layout},
        },
        table=Table(title=title, columns=columns, rows=rows),
        height=260,
    )


def _share_row(values: Sequence[float | None], whole: float | None) -> tuple[str, ...]:
    """First, least, most and last of the steps that have one, and the whole run's or else their mean."""
    found = [value for value in values if value is not None]
    mean = sum(found) / len(found) if whole is None else whole
    return tuple(percent(v, 2) for v in (found[0], min(found), max(found), found[-1], mean))
