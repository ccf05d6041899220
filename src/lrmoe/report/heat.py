"""Load per rank and per expert, one step at a time: bars, a heat map, and what a reader steps through.

    frames   kind     "loads"
             systems  name and layers of each; of a layer: step [S], f and b [S][R], c and q [S][E]
             grid     [rows][columns] of expert ids, -1 where there is none
             start    [system, layer, step] of the first view

The page computes the same three things from a frame as `_traces` does here: rows over the mean load of the call with
nothing dropped (bars), pairs over the mean of all experts, and the share of an expert's pairs that backward keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.report.data import LayerSteps, Run, SystemRun
from lrmoe.report.numbers import number, percent
from lrmoe.report.plot import Plot, label, line
from lrmoe.report.tables import Table
from lrmoe.report.words import subject

_ALONE = 16  # experts of one rank side by side
_BARS, _GAP, _BELOW, _LEGEND = 230, 56, 64, 44  # pixels: bars, between them and the squares, below, above


def heat(run: Run) -> Plot | None:
    """Loads step by step of every system that recorded them."""
    systems = [system for system in run.systems if system.layers]
    if not systems:
        return None
    chosen = next((i for i, system in enumerate(systems) if system is subject(run)), 0)
    layer = systems[chosen].layers[0]
    at = len(layer.step) - 1
    grid = _grid(len(layer.forward_SR[0]), len(layer.counts_SE[0]) if layer.counts_SE else 0)
    frames = {
        "kind": "loads",
        "systems": [
            {"name": system.name, "layers": [_frames(one) for one in system.layers]} for system in systems
        ],
        "grid": grid,
        "start": [chosen, 0, at],
    }
    return Plot(
        name="heat",
        title="Load per rank and expert" + (", step by step" if at else ""),
        caption=_caption(run, systems, bool(grid)),
        label=f"Loads of {systems[chosen].name}, {describe(layer, at)}",
        traces=_traces(layer, at, grid),
        layout=_layout(systems, grid),
        table=_table(systems),
        height=_height(grid),
        frames=frames,
    )


def _caption(run: Run, systems: Sequence[SystemRun], experts: bool) -> str:
    text = "Bars: rows of each rank over the mean load with nothing dropped; a synchronous step waits for the tallest."
    if experts:
        text += " Squares: experts, by pairs routed to them over the mean of all, or by the share of their pairs that "
        text += "backward keeps."
    longest = max(len(system.series.step) for system in systems)
    shown = max(len(layer.step) for system in systems for layer in system.layers)
    if shown < longest:
        text += f" {shown} of {longest} steps are kept here."
    return text + (" The slider also moves with the arrow keys." if shown > 1 else "")


def _frames(layer: LayerSteps) -> dict[str, Any]:
    found = {"layer": layer.layer, "step": layer.step, "f": layer.forward_SR, "b": layer.backward_SR}
    return {**found, "c": layer.counts_SE, "q": layer.quota_SE}


def _grid(ranks: int, experts: int) -> list[list[int]]:
    """Expert ids: a column per rank with its own from top to bottom, or of one rank in rows; -1 fills up."""
    if not experts or experts % ranks:
        return []
    home = experts // ranks
    if ranks > 1:
        return [[rank * home + i for rank in range(ranks)] for i in range(home)]
    padded = [*range(experts), *([-1] * (-experts % _ALONE))]
    return [padded[start : start + _ALONE] for start in range(0, len(padded), _ALONE)]


def over_mean(values: Sequence[float], whole: Sequence[float]) -> list[float]:
    """Each value over the mean of `whole`; zeros where that is empty."""
    mean = sum(whole) / max(1, len(whole))
    return [value / mean if mean else 0.0 for value in values]


def _traces(layer: LayerSteps, at: int, grid: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    forward, backward = layer.forward_SR[at], layer.backward_SR[at]
    ranks = [str(r) for r in range(len(forward))]
    hover = "rank %{x}, %{fullData.name}: %{customdata} rows, %{y:.2f} mean loads<extra></extra>"
    bars = [
        {
            "type": "bar",
            "name": name,
            "x": ranks,
            "y": over_mean(values, forward),
            "customdata": list(values),
            "marker": {"color": f"var(--{name})"},
            "hovertemplate": hover,
        }
        for name, values in (("forward", forward), ("backward", backward))
    ]
    if not grid:
        return bars
    counts = over_mean(layer.counts_SE[at], layer.counts_SE[at])
    squares = {
        "type": "heatmap",
        "name": "pairs",
        "z": [[counts[e] if e >= 0 else None for e in ids] for ids in grid],
        "x": [str(i) for i in range(len(grid[0]))],
        "customdata": [[e if e >= 0 else None for e in ids] for ids in grid],
        "colorscale": [[i / 3, f"var(--heat-{i})"] for i in range(4)],
        "zmin": 0,
        "xgap": 1,
        "ygap": 1,
        "xaxis": "x2",
        "yaxis": "y2",
        "hovertemplate": "expert %{customdata}: %{z:.2f}<extra></extra>",
        "colorbar": {"orientation": "h", "thickness": 8, "len": 0.5, "x": 1, "xanchor": "right"}
        | {"y": 0, "yanchor": "top", "ypad": 28, "outlinewidth": 0},
    }
    return [*bars, squares]


def _cell(grid: Sequence[Sequence[int]]) -> int:
    """Pixels of a row of the heat map."""
    return max(8, min(26, 300 // max(1, len(grid))))


def _height(grid: Sequence[Sequence[int]]) -> int:
    return _BARS + (_GAP + _cell(grid) * len(grid) + _BELOW if grid else 0)


def _layout(systems: Sequence[SystemRun], grid: Sequence[Sequence[int]]) -> dict[str, Any]:
    layers = [layer for system in systems for layer in system.layers]
    top = max((v for one in layers for f in one.forward_SR for v in over_mean(f, f)), default=1.0)
    loads = {"title": "load / mean", "range": [0, max(1.1, 1.05 * top)]}
    layout: dict[str, Any] = {
        "barmode": "group",
        "shapes": [line(1.0, "x domain")],
        "xaxis": {"title": "" if grid else "rank", "type": "category", "tickangle": 0},
        "yaxis": loads,
    }
    if not grid:
        return layout
    area = _cell(grid) * len(grid)
    share = area / (area + _GAP + _BARS - _LEGEND)
    alone = len(systems[0].layers[0].forward_SR[0]) == 1
    loads["domain"] = [share + _GAP / (area + _GAP + _BARS), 1]
    layout["xaxis"]["title"] = "" if alone else "rank; below it its experts"
    layout["xaxis2"] = {"anchor": "y2", "type": "category", "showticklabels": False, "showgrid": False}
    layout["yaxis2"] = {
        "domain": [0, share],
        "autorange": "reversed",
        "showgrid": False,
        "showticklabels": False,
    }
    layout["yaxis2"]["title"] = "experts"
    layout["margin"] = {"l": 8, "r": 12, "t": _LEGEND, "b": _BELOW}
    return layout


def describe(layer: LayerSteps, at: int) -> str:
    """One step of a layer in words; the page says the same of every other step."""
    forward = layer.forward_SR[at]
    ahead, back = (max(over_mean(side[at], forward)) for side in (layer.forward_SR, layer.backward_SR))
    text = f"layer {layer.layer}, step {layer.step[at]}: fullest rank {ahead:.2f} mean loads forward, "
    text += f"{back:.2f} backward"
    if not layer.counts_SE:
        return text
    counts = layer.counts_SE[at]
    hottest = max(range(len(counts)), key=counts.__getitem__)
    return f"{text}; hottest expert {hottest} with {over_mean(counts, counts)[hottest]:.2f} times the mean"


def _table(systems: Sequence[SystemRun]) -> Table:
    rows = [
        (system.name, str(layer.layer), *_extremes(layer)) for system in systems for layer in system.layers
    ]
    columns = ("system", "layer", "fullest rank, forward", "backward", "hottest expert", "least kept share")
    note = "Over the steps shown: the largest load over the mean load, the most pairs of an expert over the mean, and "
    note += "the smallest share of an expert's pairs that backward kept."
    return Table(title="Extremes by layer", columns=columns, rows=rows, note=note)


def _extremes(layer: LayerSteps) -> tuple[str, ...]:
    pairs = list(zip(layer.forward_SR, layer.backward_SR, strict=True))
    forward = max(max(over_mean(f, f)) for f, _ in pairs)
    backward = max(max(over_mean(b, f)) for f, b in pairs)
    if not layer.counts_SE:
        return number(forward), number(backward), "-", "-"
    hottest = max(max(over_mean(c, c)) for c in layer.counts_SE)
    shares = [
        q / c
        for counts, quotas in zip(layer.counts_SE, layer.quota_SE, strict=True)
        for c, q in zip(counts, quotas, strict=True)
        if c
    ]
    return number(forward), number(backward), number(hottest), percent(min(shares, default=None))


def controls(plot: Plot) -> Mapping[str, Any] | None:
    """What the template needs to offer a plot's frames: names of systems, layers and steps, and where it starts."""
    if plot.frames is None:
        return None
    systems = plot.frames["systems"]
    chosen, layer, at = plot.frames["start"]
    shown = systems[chosen]["layers"]
    return {
        "systems": [system["name"] for system in systems],
        "layers": [one["layer"] for one in shown],
        "experts": bool(plot.frames["grid"]),
        "steps": len(shown[layer]["step"]),
        "step": shown[layer]["step"][at],
        "start": {"system": chosen, "layer": layer, "at": at},
        "said": label(plot.label.partition(", ")[2]),
    }
