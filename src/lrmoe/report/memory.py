"""Bytes by part against the budget: measured beside predicted, one stack each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.report.data import Memory, Run
from lrmoe.report.numbers import size
from lrmoe.report.plot import Plot, label
from lrmoe.report.tables import Table

PARTS: Mapping[str, str] = {
    "weights": "weights",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "replicas": "replicas",
    "dispatched": "dispatched rows",
    "stash": "stash",
    "backward": "backward buffers",
    "outputs": "outputs",
    "scratch": "scratch",
    "reserved": "not MoE",
}
_CAPTION = "Bytes of the fullest rank."
_MODEL = (
    " Of weights, gradients and stashes there is one for each layer at the same time; of what a call needs only while "
    "it runs (replicas, rows, buffers, outputs) the largest call counts."
)
ALL_LAYERS = "all MoE layers"


def memory(run: Run) -> Plot | None:
    """Memory of every system that recorded it."""
    found = {system.name: system.memory for system in run.systems if system.memory is not None}
    if not found:
        return None
    optimizer = any("optimizer" in parts for one in found.values() for parts in one.stacks.values())
    caption = _CAPTION + (_MODEL if any(one.what == ALL_LAYERS for one in found.values()) else "")
    caption += " No budget counts optimizer states." if optimizer else ""
    return stack(found, name="memory", title="Memory by part", caption=caption)


def stack(found: Mapping[str, Memory], *, name: str, title: str, caption: str) -> Plot:
    """One bar per system and kind of figure, stacked by part, with each budget as a line."""
    bars = [(system, kind, parts) for system, one in found.items() for kind, parts in one.stacks.items()]
    budgets = {one.budget_name: one.budget for one in found.values() if one.budget}
    largest = max([*(sum(parts.values()) for _, _, parts in bars), *budgets.values()])
    unit, scale = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    whats = list(dict.fromkeys(one.what for one in found.values() if one.what))
    layout: dict[str, Any] = {
        "barmode": "stack",
        "xaxis": {"title": unit, "rangemode": "tozero"},
        "yaxis": {"type": "multicategory", "autorange": "reversed", "automargin": True, "showgrid": False},
        "shapes": [_budget_line(value / scale) for value in budgets.values()],
        "annotations": [_budget_note(budget, value, scale) for budget, value in budgets.items()],
    }
    if not any(len(one.stacks) > 1 for one in found.values()):
        layout["yaxis"]["type"] = "category"
    return Plot(
        name=name,
        title=title,
        caption=f"{caption} Shown: {' and '.join(whats)}." if whats else caption,
        label=_label(title, bars, budgets),
        traces=_traces(bars, unit, scale, layout["yaxis"]["type"] == "multicategory"),
        layout=layout,
        table=_table(title, bars, budgets),
        height=170 + (34 if len(bars) > len(found) else 44) * len(bars) + (20 if budgets else 0),
    )


def _traces(
    bars: Sequence[tuple[str, str, Mapping[str, float]]], unit: str, scale: int, several: bool
) -> list[dict[str, Any]]:
    names: list[Any] = [label(system) for system, _, _ in bars]
    y = [names, [kind for _, kind, _ in bars]] if several else names
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "y": y,
            "x": [parts.get(part, 0) / scale for _, _, parts in bars],
            "marker": {"color": f"var(--part-{i})", "line": {"color": "var(--page)", "width": 1}},
            "hovertemplate": f"%{{x:.4g}} {unit}<extra>{title}</extra>",
        }
        for i, (part, title) in enumerate(PARTS.items())
        if any(parts.get(part) for _, _, parts in bars)
    ]


def _budget_line(x: float) -> dict[str, Any]:
    stroke = {"color": "var(--ink)", "width": 2, "dash": "dash"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": stroke}


def _budget_note(name: str, value: float, scale: int) -> dict[str, Any]:
    place = {
        "xref": "x",
        "yref": "paper",
        "x": value / scale,
        "y": 1,
        "xanchor": "right",
        "yanchor": "bottom",
    }
    return {**place, "text": label(f"{name} {size(value)}"), "showarrow": False}


def _label(
    title: str, bars: Sequence[tuple[str, str, Mapping[str, float]]], budgets: Mapping[str, float | None]
) -> str:
    ends = [f"{system} {size(sum(parts.values()))} {kind}" for system, kind, parts in bars]
    limits = [f"{name} {size(value)}" for name, value in budgets.items()]
    return f"{title}: {'; '.join([*ends, *limits])}"


def _table(
    title: str, bars: Sequence[tuple[str, str, Mapping[str, float]]], budgets: Mapping[str, float | None]
) -> Table:
    shown = [part for part in PARTS if any(parts.get(part) for _, _, parts in bars)]
    rows = [
        (system, kind, *(size(parts.get(part, 0)) for part in shown), size(sum(parts.values())))
        for system, kind, parts in bars
    ]
    columns = ("system", "", *(PARTS[part] for part in shown), "together")
    note = " ".join(f"{name[0].upper()}{name[1:]}: {size(value)}." for name, value in budgets.items())
    return Table(title=title, columns=columns, rows=rows, note=note)
