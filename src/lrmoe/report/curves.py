"""Plots of what happened step by step: loss, peak load, kept share, energy and variance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lrmoe.report.data import Run, Series, SystemRun
from lrmoe.report.plot import Plot, colour, label, line, note
from lrmoe.report.tables import Table, number, percent

_TABLE_ROWS = 40


def loss_against_time(run: Run) -> Plot | None:
    """Training loss against the MoE-layer time spent so far."""
    critical = all(system.series.critical_s for system in run.systems)
    times: Callable[[Series], Sequence[float]] = (
        (lambda s: s.critical_s) if critical else (lambda s: s.wall_s)
    )
    kind = "critical path" if critical else "wall"
    caption = f"{_loss_caption(run)} Time in MoE layers only, {kind}."
    return _loss_plot(
        run, "loss-time", "Loss against MoE-layer time", f"MoE-layer time, {kind} (s)", times, caption
    )


def loss_against_steps(run: Run) -> Plot | None:
    """Training loss against optimizer steps."""
    caption = f"{_loss_caption(run)} Progress per step: what pruning costs in it, if anything."
    return _loss_plot(run, "loss-steps", "Loss against steps", "optimizer step", lambda s: s.step, caption)


def _loss_plot(
    run: Run, name: str, title: str, axis: str, xs: Callable[[Series], Sequence[float]], caption: str
) -> Plot | None:
    if not any(xs(system.series) for system in run.systems):
        return None
    traces = [trace for system in run.systems for trace in _loss_traces(run, system, xs(system.series))]
    layout: dict[str, Any] = {
        "xaxis": {"title": axis, "rangemode": "tozero"},
        "yaxis": {"title": "training loss", **_loss_range(run)},
    }
    if run.target_loss is not None:
        layout["shapes"] = [line(run.target_loss)]
        layout["annotations"] = [note(run.target_loss, f"target {number(run.target_loss)}")]
    rows = [row for system in run.systems for row in _loss_rows(system, xs(system.series))]
    table = Table(
        title=title,
        columns=("system", axis, "loss", "smoothed loss", "held-out loss"),
        rows=rows,
        note=_thinned(run),
    )
    return Plot(
        name=name,
        title=title,
        caption=caption,
        label=_loss_label(run, title),
        traces=traces,
        layout=layout,
        table=table,
    )


def _loss_range(run: Run) -> dict[str, Any]:
    """A comparison cuts off the first steps' steep fall, which would flatten what follows; a double click shows it."""
    if run.kind != "compare":
        return {}
    curves = [[v for v in system.series.smoothed if v is not None] for system in run.systems]
    curves = [curve for curve in curves if curve]
    if not curves:
        return {}
    seen = [loss for system in run.systems for loss in system.series.loss if loss is not None]
    bottom = min([*seen, run.target_loss] if run.target_loss is not None else seen)
    top = max(curve[len(curve) // 20] for curve in curves)
    margin = 0.05 * (top - bottom)
    return {"range": [bottom - margin, top + margin]}


def _loss_traces(run: Run, system: SystemRun, x: Sequence[float]) -> list[dict[str, Any]]:
    stroke = {"color": colour(run, system), "width": 2.5, "dash": system.dash}
    name = label(system.name)
    common = {"type": "scatter", "x": list(x), "name": name, "legendgroup": name}
    traces: list[dict[str, Any]] = [
        {
            **common,
            "y": list(system.series.loss),
            "mode": "lines",
            "line": {**stroke, "width": 1.25, "dash": "solid"},
            "opacity": 0.55,
        }
        | {"showlegend": False, "hoverinfo": "skip"},
        {**common, "y": list(system.series.smoothed), "mode": "lines", "line": stroke},
    ]
    if system.figures.get("reached") and x:
        end = {"x": [x[-1]], "y": [system.series.smoothed[-1]], "mode": "markers", "showlegend": False}
        traces.append({**common, **end, "marker": {"color": colour(run, system), "size": 9}})
    return traces + _eval_traces(run, system, common)


def _eval_traces(run: Run, system: SystemRun, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Losses on held-out text, where there are any, as marked points."""
    losses = system.series.eval_loss
    points = [(x, y) for x, y in zip(common["x"], losses, strict=bool(losses)) if y is not None]
    if not points:
        return []
    name = f"{common['name']}, held-out text"
    shade = colour(run, system) if len(run.systems) > 1 else "var(--series-2)"
    style = {"mode": "lines+markers", "line": {"color": shade, "width": 1.5, "dash": "dot"}}
    xs, ys = ([point[i] for point in points] for i in (0, 1))
    return [{**common, **style, "name": name, "x": xs, "y": ys, "marker": {"size": 7, "symbol": "diamond"}}]


def _loss_caption(run: Run) -> str:
    text = "Lines: smoothed loss; faint: every step"
    if run.kind == "compare":
        text += " (the first ones lie above; a double click shows them)"
    evaluated = any(v is not None for system in run.systems for v in system.series.eval_loss)
    return text + ("; diamonds: loss on held-out text." if evaluated else ".")


def _loss_rows(system: SystemRun, x: Sequence[float]) -> list[tuple[str, ...]]:
    series = system.series
    every = max(1, -(-len(series.step) // _TABLE_ROWS))
    evaluated = {i for i, loss in enumerate(series.eval_loss) if loss is not None}
    picked = [i for i in range(len(x)) if i % every == 0 or i == len(x) - 1 or i in evaluated]
    evals = series.eval_loss or (None,) * len(x)
    return [
        (system.name, *(number(v, 4) for v in (x[i], series.loss[i], series.smoothed[i], evals[i])))
        for i in picked
    ]


def _thinned(run: Run) -> str:
    longest = max((len(system.series.step) for system in run.systems), default=0)
    every = -(-longest // _TABLE_ROWS)
    return f"Every {every} steps, the last, and those with an evaluation." if every > 1 else ""


def _loss_label(run: Run, title: str) -> str:
    ends = [
        f"{s.name} ends at loss {number(s.number('final_loss'), 4)}" for s in run.systems if s.series.step
    ]
    return f"{title}: " + "; ".join(ends)


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
