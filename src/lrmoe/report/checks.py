"""The pruned gradient beside the exact one, where `check_every` compared them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lrmoe.report.data import Run, SystemRun
from lrmoe.report.numbers import even
from lrmoe.report.plot import Plot, colour, label, line
from lrmoe.report.tables import Table

_LINES = (("cosine", "check_cosine", "solid", "circle"), ("relative error", "check_error", "dot", "diamond"))
_TABLE_ROWS = 200


def checks(run: Run) -> Plot | None:
    """Cosine and relative error of every check, by step; None where nothing was checked."""
    systems = [s for s in run.systems if any(v is not None for v in s.series.check_cosine)]
    if not systems:
        return None
    traces = [
        trace
        for system in systems
        for kind in _LINES
        if (trace := _trace(run, system, *kind, several=len(systems) > 1)) is not None
    ]
    rows = [row for system in systems for row in _rows(system)]
    return Plot(
        name="checks",
        title="Pruned gradient against the exact one",
        caption="One layer's gradient of input, routing weights and experts, over all ranks, with pairs left out and "
        "without, at every check; layers take turns. A cosine of 1 and an error of 0 are exact; sampled makes up for "
        "its error on average.",
        label="Pruned gradient against the exact one, mean over checks: "
        + "; ".join(
            f"{s.name}: cosine {even(s.number('check_cosine'), 4)}, relative error {even(s.number('check_error'))}"
            for s in systems
        ),
        traces=traces,
        layout={
            "xaxis": {"title": "optimizer step", "rangemode": "tozero"},
            "yaxis": {"title": "cosine, error", "rangemode": "tozero"},
            "shapes": [line(1.0)],
        },
        table=Table(
            title="Checks of the gradient",
            columns=("run", "step", "layer", "cosine", "relative error"),
            rows=rows[-_TABLE_ROWS:],
            note=f"The last {_TABLE_ROWS} checks." if len(rows) > _TABLE_ROWS else "",
        ),
        height=260,
    )


def _trace(
    run: Run, system: SystemRun, title: str, name: str, dash: str, symbol: str, *, several: bool
) -> dict[str, Any] | None:
    values = getattr(system.series, name)
    points = [(step, v) for step, v in zip(system.series.step, values, strict=True) if v is not None]
    if not points:
        return None
    shade = colour(run, system) if several or title == "cosine" else "var(--series-2)"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(f"{system.name}, {title}" if several else title),
        "x": [step for step, _ in points],
        "y": [value for _, value in points],
        "line": {"color": shade, "width": 1.5, "dash": dash},
        "marker": {"color": shade, "size": 7, "symbol": symbol},
    }


def _rows(system: SystemRun) -> Iterator[tuple[str, ...]]:
    series = system.series
    found = zip(series.step, series.check_layer, series.check_cosine, series.check_error, strict=True)
    for step, layer, cosine, error in found:
        if cosine is not None:
            yield system.name, str(step), "-" if layer is None else str(layer), even(cosine, 4), even(error)
