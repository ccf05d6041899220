"""Plots of the loss: against MoE-layer time, and against steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lrmoe.report.data import Run, Series, SystemRun
from lrmoe.report.numbers import number
from lrmoe.report.plot import Plot, colour, label, line, note
from lrmoe.report.tables import Table

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
