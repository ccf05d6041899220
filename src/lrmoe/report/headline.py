"""The figures of `make headline`: ratios of time to loss by model, regime and system, and the ablation beside them.

A figure is called headline.<case>.<system>.<quantity> or ablate.<regime>.<score>.<estimator>.<drop>.<quantity>; a case
may itself hold dots ("aux0.001").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.report.data import Run
from lrmoe.report.names import styles
from lrmoe.report.plot import Plot, label, line
from lrmoe.report.tables import Table, number

_Line = Mapping[str, Any]
TITLES = {
    "time_to_loss_over_symi": "time to loss / symi",
    "time_to_loss_over_ultraep": "time to loss / ultraep",
    "layer_time_over_balanced": "layer time / balanced",
    "dloss": "loss difference",
    "dppl": "perplexity difference",
}


def _split(run: Run, area: str) -> list[tuple[str, str, str, _Line]]:
    """(case, who, quantity, figure) of every figure of an area."""
    found = []
    for figure in run.summary["figures"]:
        first, _, rest = str(figure["name"]).partition(".")
        parts = rest.rsplit(".", 2)
        if first == area and len(parts) == 3:
            found.append((parts[0], parts[1], parts[2], figure))
    return found


def _written(figure: _Line | None) -> str:
    """The value, with its standard error where it has one."""
    if figure is None:
        return "-"
    error = figure.get("context", {}).get("se", figure.get("context", {}).get("standard_error"))
    return number(figure["value"], 4) + (f" +- {number(error, 2)}" if isinstance(error, int | float) else "")


def _table(title: str, first: str, found: Sequence[tuple[str, str, str, _Line]], note: str) -> Table:
    quantities = list(dict.fromkeys(quantity for _, _, quantity, _ in found))
    cells = {(case, who, quantity): figure for case, who, quantity, figure in found}
    rows = [
        (case, who, *(_written(cells.get((case, who, quantity))) for quantity in quantities))
        for case, who in dict.fromkeys((case, who) for case, who, _, _ in found)
    ]
    columns = (
        first,
        "system" if first == "case" else "drop",
        *(TITLES.get(q, q.replace("_", " ")) for q in quantities),
    )
    return Table(title=title, columns=columns, rows=rows, note=note)


def tables(run: Run) -> list[Table]:
    """Time to loss, then the ablation where the file has it, then whatever else it has."""
    ours, ablation = _split(run, "headline"), _split(run, "ablate")
    note = "Ratios are ours over the other's: below 1 is better. +-: standard error over seeds."
    made = [_table("Time to loss", "case", ours, note)] if ours else []
    if ablation:
        made.append(_table("Ablation", "rule", ablation, "Differences from nothing dropped, paired by seed."))
    known = {id(figure) for _, _, _, figure in (*ours, *ablation)}
    rest = [(str(f["name"]), _written(f)) for f in run.summary["figures"] if id(f) not in known]
    if rest:
        made.append(Table(title="Further figures", columns=("figure", "value"), rows=rest))
    return made


def plots(run: Run) -> list[Plot]:
    """A bar for each case and system, one plot per ratio."""
    found = _split(run, "headline")
    ratios = dict.fromkeys(quantity for _, _, quantity, _ in found if "_over_" in quantity)
    return [_ratio([row for row in found if row[2] == quantity], quantity) for quantity in ratios]


def _ratio(found: Sequence[tuple[str, str, str, _Line]], quantity: str) -> Plot:
    cases = list(dict.fromkeys(case for case, _, _, _ in found))
    who = list(dict.fromkeys(system for _, system, _, _ in found))
    values = {(case, system): float(figure["value"]) for case, system, _, figure in found}
    drawn, title = styles(who), TITLES.get(quantity, quantity.replace("_", " "))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(system),
            "y": [label(case) for case in cases],
            "x": [values.get((case, system)) for case in cases],
            "marker": {"color": drawn[system][0]},
        }
        for system in who
    ]
    rows = [(case, system, _written(figure)) for case, system, _, figure in found]
    one = {**line(0), "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1}
    return Plot(
        name=quantity.replace("_", "-"),
        title=title[0].upper() + title[1:],
        caption="Ours over the other's: left of the dashed line is better.",
        label=f"{title}: " + "; ".join(f"{row[0]} {row[1]} {row[2]}" for row in rows),
        traces=traces,
        layout={
            "barmode": "group",
            "xaxis": {"title": "ratio", "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "showgrid": False},
            "shapes": [one],
        },
        table=Table(title=title, columns=("case", "system", "ratio"), rows=rows),
        height=130 + 24 * len(found) + 12 * len(cases),
    )


def verdict(run: Run) -> str:
    """The ratios to SYMI of lrmoe-sampled50, least and most over the cases."""
    found = [
        float(figure["value"])
        for _, system, quantity, figure in _split(run, "headline")
        if system == "lrmoe-sampled50" and quantity == "time_to_loss_over_symi"
    ]
    if not found:
        return f"{len(run.summary['figures'])} figures."
    span = number(found[0]) if len(found) == 1 else f"{number(min(found))} to {number(max(found))}"
    return f"lrmoe-sampled50 reaches the loss in {span} of SYMI's MoE-layer time (critical path)."


def method(run: Run) -> str:
    """Where to read how it was measured."""
    return (
        "Trajectories are trained once; layer times come from executing their recorded calls, systems interleaved, "
        "over a modelled link that is the same for all. Seeds, commands and hardware are in each line of "
        "headline.jsonl."
    )
