"""Two simulations side by side: systems planned in both, in the first cluster that both have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.errors import ConfigError
from lrmoe.report.data import Run
from lrmoe.report.numbers import number
from lrmoe.report.plot import Plot, label
from lrmoe.report.simulation import milliseconds, scenarios, where
from lrmoe.report.tables import Table, differences

_Figures = Mapping[str, Any]
_QUANTITIES = (
    ("backward_peak", "Peak load, backward", lambda v: number(v, 4)),
    ("layer_ms", "Layer time, modelled, ms", milliseconds),
)


def common(left: Run, right: Run) -> tuple[_Figures, _Figures, list[str]]:
    """The first cluster that both simulated, as each saw it, and the systems that made plans in both.

    Raises:
        ConfigError: no cluster, or no system, is in both.
    """
    for first in scenarios(left):
        second = next((other for other in scenarios(right) if where(other) == where(first)), None)
        if second is None:
            continue
        ours, theirs = first["systems"], second["systems"]
        names = [name for name, f in ours.items() if f["calls"] and theirs.get(name, {}).get("calls")]
        if names:
            return first, second, names
    raise ConfigError(
        f"runs: {left.name!r} and {right.name!r} have no cluster in which both planned the same system"
    )


def tables(left: Run, right: Run, titles: Sequence[str]) -> list[Table]:
    """One table per quantity: a row per system, both columns and the ratio; then the settings that differ."""
    first, second, names = common(left, right)
    columns = ("system", *titles, "second / first")
    made = []
    for key, title, write in _QUANTITIES:
        pairs = [(name, first["systems"][name].get(key), second["systems"][name].get(key)) for name in names]
        rows = [
            (name, write(a), write(b), f"{b / a:.3f}" if a and b is not None else "-") for name, a, b in pairs
        ]
        made.append(Table(title=f"{title}: {where(first)}", columns=columns, rows=rows))
    return [*made, differences(left.summary["settings"], right.summary["settings"], titles)]


def plots(left: Run, right: Run, titles: Sequence[str]) -> list[Plot]:
    """Backward peak of every system under both simulations, on one axis."""
    first, second, names = common(left, right)
    traces = [
        {
            "type": "bar",
            "name": label(title),
            "x": [label(name) for name in names],
            "marker": {"color": colour},
        }
        | {"y": [seen["systems"][name]["backward_peak"] for name in names]}
        for title, seen, colour in zip(
            titles, (first, second), ("var(--series-1)", "var(--series-2)"), strict=True
        )
    ]
    table = tables(left, right, titles)[0]
    ends = "; ".join(f"{row[0]} {row[1]} and {row[2]}" for row in table.rows)
    return [
        Plot(
            name="peak",
            title=f"Peak load in backward, {where(first)}",
            caption="Rows of the most loaded rank over the mean load with nothing dropped, mean over calls.",
            label=f"Peak over mean load in both simulations: {ends}",
            traces=traces,
            layout={"barmode": "group", "yaxis": {"title": "peak / mean", "rangemode": "tozero"}},
            table=table,
        )
    ]


def verdict(left: Run, right: Run, titles: Sequence[str]) -> str:
    """What stands side by side."""
    first, _, names = common(left, right)
    return f"{where(first)}: {len(names)} systems planned the calls of {titles[0]} and those of {titles[1]}."
