"""The figures of `make headline`: ratios of time to loss by model, regime and system, and the ablation beside them.

A figure is called headline.<case>.<system>.<quantity> or ablate.<regime>.<score>.<estimator>.<drop>.<quantity>; a case
may itself hold dots ("0.001"). What is called <system>.stash ran with stashed activations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lrmoe.report import bars
from lrmoe.report.data import Run, SystemRun
from lrmoe.report.names import readable, styles
from lrmoe.report.numbers import even, number, percent, seconds, with_error
from lrmoe.report.plot import Plot, label, upright, whiskers
from lrmoe.report.tables import Table

_Line = Mapping[str, Any]
_PARTS = re.compile(r"(?P<case>.+?)\.(?P<who>drop\d+(?:\.\d+)?|[^.]+\.stash|[^.]+)\.(?P<quantity>[^.]+)")
_STASH = ".stash"
_CASE = re.compile(r"(?P<model>.+?)\.(?P<regime>[a-z][^.]*)\.(?:aux)?(?P<aux>\d.*)")
_METHOD = (
    "Trajectories are trained once; layer times come from executing their recorded calls, systems interleaved, over a "
    "modelled link that is the same for all."
)
TITLES = {
    "time_to_loss_over_symi": "time to loss / symi",
    "time_to_loss_over_ultraep": "time to loss / ultraep",
    "layer_time_over_balanced": "layer time / balanced",
    "time_to_loss_over_megatron": "time to loss / megatron",
    "least_time_over_symi": "least time / symi",
    "dloss": "loss difference",
    "dppl": "perplexity difference",
}


_MEANS = {
    "layer_time_over_balanced": "MoE-layer time of a step over that of the same layer on balanced counts: what "
    "imbalance costs, less what pruning saves.",
    "least_time_over_symi": "The least that is possible with these steps and this kept share, over symi's time: a "
    "balanced forward, and the kept share of a balanced backward.",
}


def _split(run: Run, area: str) -> list[tuple[str, str, str, _Line]]:
    """(case, who, quantity, figure) of every figure of an area."""
    found = []
    for figure in run.summary["figures"]:
        first, _, rest = str(figure["name"]).partition(".")
        parts = _PARTS.fullmatch(rest) if first == area else None
        if parts is not None:
            found.append((_words(parts["case"]), parts["who"], parts["quantity"], figure))
    return found


def _words(case: str) -> str:
    """A case's name for readers: "model.regime.aux0.001" as "model, regime, aux 0.001"; a rule stays as it is."""
    parts = _CASE.fullmatch(case)
    return case if parts is None else f"{parts['model']}, {parts['regime']}, aux {parts['aux']}"


def systems(run: Run) -> tuple[SystemRun, ...]:
    """The systems with the mean phases of a call over all rows but the stashed, and what each was given."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in run.summary["rows"]:
        if row.get("activations") != _STASH[1:]:
            by_name.setdefault(row["system"], []).append(row["phases"])
    called, drawn = readable(list(by_name)), styles(by_name)
    return tuple(
        SystemRun(
            name=called[key],
            key=key,
            figures={"fairness": run.summary["fairness"].get(key, {})},
            phase_ms={
                name: sum(one.get(name, 0.0) for one in found) / len(found)
                for name in dict.fromkeys(name for one in found for name in one)
            },
            colour=drawn[key][0],
        )
        for key, found in by_name.items()
    )


def _written(figure: _Line | None) -> str:
    """The value, with its standard error where it has one."""
    if figure is None:
        return "-"
    error = _error(figure)
    if error is None and figure.get("unit") == "steps":
        return number(figure["value"], 4)
    return with_error(figure["value"], error, 4)


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


def _one_case(table: Table) -> Table:
    """The table with its case in the title, where it has only one."""
    cases = {row[0] for row in table.rows}
    if len(cases) > 1:
        return table
    return replace(
        table,
        title=f"{table.title}: {next(iter(cases))}",
        columns=table.columns[1:],
        rows=[row[1:] for row in table.rows],
    )


def tables(run: Run) -> list[Table]:
    """Time to loss over seeds and per seed, then the ablation where the file has it, then whatever else it has."""
    ours, ablation = _split(run, "headline"), _split(run, "ablate")
    note = "Ratios are the system's over the other's: below 1 is better. +-: standard error over seeds."
    main, stashed = _by_setting(ours)
    made = [_one_case(_table("Time to loss", "case", main, note))] if main else []
    made += [_one_case(_table("With stashed activations", "case", stashed, note))] if stashed else []
    made += [_per_seed(run.summary["rows"])] if run.summary["rows"] else []
    if ablation:
        made.append(_table("Ablation", "rule", ablation, "Differences from nothing dropped, paired by seed."))
    known = {id(figure) for _, _, _, figure in (*ours, *ablation)}
    rest = [(str(f["name"]), _written(f)) for f in run.summary["figures"] if id(f) not in known]
    if rest:
        made.append(Table(title="Further figures", columns=("figure", "value"), rows=rest))
    return made


def _by_setting(
    found: Sequence[tuple[str, str, str, _Line]],
) -> tuple[list[tuple[str, str, str, _Line]], list[tuple[str, str, str, _Line]]]:
    """Figures of the main setting of activations, and those with a stash under the systems' own names."""
    main = [row for row in found if not row[1].endswith(_STASH)]
    stashed = [
        (case, who.removesuffix(_STASH), quantity, line)
        for case, who, quantity, line in found
        if who.endswith(_STASH)
    ]
    return main, stashed


def _per_seed(rows: Sequence[Mapping[str, Any]]) -> Table:
    body = [
        (
            row["system"] + (f" ({_STASH[1:]})" if row.get("activations") == _STASH[1:] else ""),
            f"{row['model']}, aux {row['aux']:g}",
            str(row["seed"]),
            number(row["steps"]),
            even(row["layer_ms"], 4),
            seconds(row["time_to_loss_s"]),
            even(row["over"].get("symi")),
            even(row["over"].get("ultraep")),
            even(row["over_balanced"]),
            even(row["dloss"], 2),
            percent(row["kept_share"]),
        )
        for row in rows
    ]
    columns = (
        "system",
        "case",
        "seed",
        "steps",
        "layers ms",
        "time to loss",
        "/ symi",
        "/ ultraep",
        "/ balanced",
    )
    note = "Layers ms: critical path of a step's MoE layers, mean over the executed steps up to the target."
    return Table(title="Every seed", columns=(*columns, "loss diff.", "kept"), rows=body, note=note)


def plots(run: Run) -> list[Plot]:
    """A bar for each case and system, one plot per ratio; then the phases of a call."""
    found, _ = _by_setting(_split(run, "headline"))
    ratios = dict.fromkeys(quantity for _, _, quantity, _ in found if "_over_" in quantity)
    made = [
        _ratio([row for row in found if row[2] == quantity], quantity, run.summary.get("published"))
        for quantity in ratios
    ]
    phases = bars.phases(run)
    caption = "Critical path of an executed call, mean over all rows."
    return [*made, *([replace(phases, caption=caption)] if phases is not None else [])]


def _error(figure: _Line) -> float | None:
    context = figure.get("context", {})
    error = context.get("se", context.get("standard_error"))
    return float(error) if isinstance(error, int | float) else None


def _ratio(
    found: Sequence[tuple[str, str, str, _Line]], quantity: str, published: Sequence[float] | None
) -> Plot:
    cases = list(dict.fromkeys(case for case, _, _, _ in found))
    who = list(dict.fromkeys(system for _, system, _, _ in found))
    values = {(case, system): float(figure["value"]) for case, system, _, figure in found}
    errors = {(case, system): _error(figure) for case, system, _, figure in found}
    drawn, title = styles(who), TITLES.get(quantity, quantity.replace("_", " "))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(system),
            "y": [label(case) for case in cases],
            "x": [values.get((case, system)) for case in cases],
            "marker": {"color": drawn[system][0]},
            **whiskers([errors.get((case, system)) for case in cases]),
        }
        for system in who
    ]
    rows = [(case, system, _written(figure)) for case, system, _, figure in found]
    caption = _MEANS.get(quantity, "The system's over the other's: left of the dashed line is better.")
    if any(error is not None for error in errors.values()):
        caption += " Whiskers: one standard error over seeds."
    shapes = [upright(1.0)]
    if published and quantity == "time_to_loss_over_symi":
        least, most = 1 - max(published), 1 - min(published)
        band = {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": least,
            "x1": most,
            "y0": 0,
            "y1": 1,
            "line": {"width": 0},
        }
        shapes.append({**band, "fillcolor": "var(--series-2)", "opacity": 0.15, "layer": "below"})
        caption += f" Shaded: the published range of the authors' system, {number(least)} to {number(most)}."
    return Plot(
        name=quantity.replace("_", "-"),
        title=title[0].upper() + title[1:],
        caption=caption,
        label=f"{title}: " + "; ".join(f"{row[0]} {row[1]} {row[2]}" for row in rows),
        traces=traces,
        layout={
            "barmode": "group",
            "xaxis": {"title": "ratio", "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "showgrid": False},
            "shapes": shapes,
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
    """How it was measured, and at which size."""
    summary = run.summary
    parts = [
        _METHOD,
        str(summary.get("link_rule", "")),
    ]
    if summary.get("size"):
        parts.append(
            "Size: "
            + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in summary["size"].items())
            + "."
        )
    if summary.get("pairs_per_rank"):
        parts.append(
            f"Pairs of a rank and call: {summary['pairs_per_rank']:,}; every {summary['every']}th step is executed."
        )
    parts.append("Seeds, commands and hardware are in each line of headline.jsonl.")
    return " ".join(part for part in parts if part)
