"""One plot as plain Plotly dictionaries, with a caption, an accessible name and the table behind it.

Colours are names of CSS variables ("var(--series-1)"): the page resolves them, so that light, dark and print share one
description.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lrmoe.report.data import BASELINE, Run, SystemRun
from lrmoe.report.tables import Table

SERIES_COLOURS = 4
DASHES = ("solid", "dash", "dot", "dashdot")


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


def label(text: str) -> str:
    """Text as Plotly shows it literally: Plotly reads a little HTML in labels."""
    return html.escape(text, quote=False)


def colour(run: Run, system: SystemRun) -> str:
    """The baseline is always grey; the others take the series colours in order; a system's own colour goes first."""
    if system.colour:
        return system.colour
    if system.name == BASELINE:
        return "var(--series-0)"
    others = [s for s in run.systems if s.name != BASELINE]
    return f"var(--series-{1 + others.index(system) % SERIES_COLOURS})"


def line(y: float, xref: str = "paper", yref: str = "y") -> dict[str, Any]:
    """A dashed horizontal line at height `y`."""
    dash = {"color": "var(--ink-soft)", "width": 1.5, "dash": "dash"}
    return {"type": "line", "xref": xref, "yref": yref, "x0": 0, "x1": 1, "y0": y, "y1": y, "line": dash}


def note(y: float, text: str) -> dict[str, Any]:
    """Text at the left end of a line at height `y`."""
    place = {"xref": "paper", "yref": "y", "x": 0.01, "y": y, "xanchor": "left", "yanchor": "bottom"}
    return {**place, "text": label(text), "showarrow": False}
