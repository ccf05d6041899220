"""One plot as plain Plotly dictionaries, with a caption, an accessible name and the table behind it.

Colours are names of CSS variables ("var(--series-1)"): the page resolves them, so that light, dark and print share one
description.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lrmoe.report.data import Run, SystemRun
from lrmoe.report.names import styles
from lrmoe.report.tables import Table


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
        frames: what a reader may step through, where there is more than the traces show; see heat.py.
    """

    name: str
    title: str
    caption: str
    label: str
    traces: Sequence[Mapping[str, Any]]
    table: Table
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 360
    frames: Mapping[str, Any] | None = None


def label(text: str) -> str:
    """Text as Plotly shows it literally: Plotly reads a little HTML in labels."""
    return html.escape(text, quote=False)


def colour(run: Run, system: SystemRun) -> str:
    """The system's own colour, or the one that its name has on every page."""
    return system.colour or styles(s.key or s.name for s in run.systems)[system.key or system.name][0]


def line(y: float, xref: str = "paper", yref: str = "y") -> dict[str, Any]:
    """A dashed horizontal line at height `y`."""
    dash = {"color": "var(--ink-soft)", "width": 1.5, "dash": "dash"}
    return {"type": "line", "xref": xref, "yref": yref, "x0": 0, "x1": 1, "y0": y, "y1": y, "line": dash}


def upright(x: float) -> dict[str, Any]:
    """A dashed upright line at `x`."""
    return {**line(0), "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1}


def whiskers(errors: Sequence[float | None]) -> dict[str, Any]:
    """Standard errors of horizontal bars, where any is known."""
    if all(error is None for error in errors):
        return {}
    return {"error_x": {"type": "data", "array": list(errors), "color": "var(--ink)", "thickness": 1.5}}


def note(y: float, text: str) -> dict[str, Any]:
    """Text at the left end of a line at height `y`."""
    place = {"xref": "paper", "yref": "y", "x": 0.01, "y": y, "xanchor": "left", "yanchor": "bottom"}
    return {**place, "text": label(text), "showarrow": False}
