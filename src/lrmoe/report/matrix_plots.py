"""Plots of a comparison of several cells: ratios by case, and steps against time of every seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lrmoe.report.data import Run
from lrmoe.report.matrix_cases import called, cases, point
from lrmoe.report.names import styles
from lrmoe.report.numbers import number
from lrmoe.report.plot import Plot, label, upright, whiskers
from lrmoe.report.tables import Table


def plots(run: Run) -> list[Plot]:
    """Ratios (or times) by case, and steps against time of every seed."""
    return [plot for plot in (_bars(run), _scatter(run)) if plot is not None]


def _bars(run: Run) -> Plot | None:
    base, found, names = run.summary["against"], cases(run), called(run)
    drawn, traces, rows = styles(names), [], []
    for system in names:
        if system == base:
            continue
        points = [(case, *at) for case in found if (at := point(run, case, system)) is not None]
        if points:
            traces.append(
                {"type": "bar", "orientation": "h", "name": label(names[system])}
                | {"y": [label(case.name) for case, _, _ in points], "x": [mean for _, mean, _ in points]}
                | {"marker": {"color": drawn[system][0]}}
                | whiskers([error for _, _, error in points])
            )
        rows += [
            (names[system], case.name, number(m, 4), "-" if e is None else number(e, 2))
            for case, m, e in points
        ]
    if not traces:
        return None
    what = "MoE-layer time, s" if base is None else f"MoE-layer time / {names[base]}'s"
    layout: dict[str, Any] = {
        "barmode": "group",
        "xaxis": {"title": label(what), "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "showgrid": False},
    }
    if base is not None:
        layout["shapes"] = [upright(1.0)]
    columns = ("system", "case", what, "standard error")
    return Plot(
        name="time-to-loss",
        title="Time to loss" if run.summary["targets"] else "Time",
        caption="Critical path, mean over seeds; whiskers: one standard error"
        + ("." if base is None else f" of ratios paired by seed. Dashed: {names[base]}."),
        label=f"{what}. " + "; ".join(f"{name} in {case}: {value}" for name, case, value, _ in rows),
        traces=traces,
        layout=layout,
        table=Table(title=what, columns=columns, rows=rows),
        height=130 + 24 * len(rows) + 12 * len(found),
    )


def _scatter(run: Run) -> Plot | None:
    base, names = run.summary["against"], called(run)
    drawn, traces, rows = styles(names), [], []
    for system in names:
        points = list(_points(run, system))
        if not points:
            continue
        texts = [label(f"{case}, seed {seed}") for case, seed, _, _ in points]
        traces.append(
            {"type": "scatter", "mode": "markers", "name": label(names[system]), "text": texts}
            | {"x": [steps for _, _, steps, _ in points], "y": [time for _, _, _, time in points]}
            | {"marker": {"color": drawn[system][0], "size": 10}}
        )
        rows += [(names[system], case, str(seed), number(x, 4), number(y, 4)) for case, seed, x, y in points]
    if not traces:
        return None
    whose = "" if base is None else f" / {names[base]}'s"
    axes = (f"steps{whose}", "MoE-layer time, s" if base is None else f"MoE-layer time{whose}")
    return Plot(
        name="steps-time",
        title="Steps against time",
        caption="Every seed. To the right: more steps to the loss; higher: more time. A system may need more steps and "
        "yet less time.",
        label=f"Steps against time of {len(rows)} runs of {len(traces)} systems; the table has them.",
        traces=traces,
        layout={
            "xaxis": {"title": label(axes[0])},
            "yaxis": {"title": label(axes[1]), "rangemode": "tozero"},
        },
        table=Table(title="Steps against time", columns=("system", "case", "seed", *axes), rows=rows),
    )


def _points(run: Run, system: str) -> Iterator[tuple[str, int, float, float]]:
    """(case, seed, steps, time) of every seed that arrived: ratios where there is a system to take them to."""
    base = run.summary["against"]
    for case in cases(run):
        others = case.by_seed(base) if base is not None else {}
        for seed, row in case.by_seed(system).items():
            if row["critical_s"] is None:
                continue
            if base is None:
                yield case.name, seed, row["steps"], row["critical_s"]
            elif seed in others and others[seed]["critical_s"]:
                other = others[seed]
                yield case.name, seed, row["steps"] / other["steps"], row["critical_s"] / other["critical_s"]
