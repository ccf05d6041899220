"""Tables, words and the plot of an ablation: what each rule costs in loss, beside nothing dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.report.data import Run
from lrmoe.report.numbers import even, percent
from lrmoe.report.plot import Plot, label, upright
from lrmoe.report.tables import Table

Row = Mapping[str, Any]
_SERIES = 8  # colours there are
_TOLD = 3  # rules in one sentence


def verdict(run: Run) -> str:
    """In a sentence per regime: rules without a loss that can be told from nothing dropped, and the worst."""
    return " ".join(_verdict(regime, _of(run, regime)) for regime in run.summary["regimes"])


def _verdict(regime: str, rows: Sequence[Row]) -> str:
    known = [row for row in rows if row["dloss"] is not None]
    if not known:
        return f"{regime}: no rule kept a finite loss."
    free = [row for row in known if row["dloss_se"] is not None and row["dloss"] <= 2 * row["dloss_se"]]
    worst = max(known, key=lambda row: row["dloss"])
    names = ", ".join(_called(row) for row in free[:_TOLD])
    more = f" and {len(free) - _TOLD} more" if len(free) > _TOLD else ""
    if free:
        first = f"no loss above two standard errors with {names}{more}"
    elif all(row["dloss_se"] is None for row in known):
        first = "one seed, so no standard errors"
    else:
        first = "every rule costs loss"
    return f"{regime}: {first}; most with {_called(worst)} ({worst['dloss']:+.2g})."


def _called(row: Row) -> str:
    return f"{row['label']} at {row['drop']:.0%}"


def tables(run: Run) -> list[Table]:
    """Loss and perplexity of every rule by regime and drop, then each regime in full, and gaps between rules."""
    found = [_matrix(run, "dloss", _signed), _matrix(run, "dppl", _signed_percent)]
    found += [_regime_table(run, regime) for regime in run.summary["regimes"]]
    return [*found, _gaps(run)] if run.summary["between"] else found


def _matrix(run: Run, quantity: str, write: Any) -> Table:
    rows: Sequence[Row] = run.summary["rows"]
    cases = [
        (regime, drop)
        for regime in run.summary["regimes"]
        for drop in sorted({row["drop"] for row in _of(run, regime)})
    ]
    by_place = {(row["label"], row["regime"], row["drop"]): row for row in rows}
    body = [
        (name, *(_cell(by_place.get((name, *case)), quantity, write) for case in cases))
        for name in dict.fromkeys(row["label"] for row in rows)
    ]
    what = {"dloss": "Final training loss", "dppl": "Perplexity"}[quantity]
    return Table(
        title=f"{what} against nothing dropped, {run.summary['model']}",
        columns=("rule", *(f"{regime} {drop:.0%}" for regime, drop in cases)),
        rows=body,
        note="Mean over seeds, paired, +- its standard error. Loss: mean of the last tenth of the steps, at least 20.",
    )


def _cell(row: Row | None, quantity: str, write: Any) -> str:
    if row is None:
        return ""
    if row[quantity] is None:
        return "not finite"
    return str(write(row[quantity], row[f"{quantity}_se"]))


def _signed(value: float, error: float | None, sign: str = "+", least: int = 4) -> str:
    """A number and its standard error, with as many decimals as show two digits of the error."""
    decimals = least
    if error is not None and 0 < error < math.inf:
        decimals = min(8, max(least, 1 - math.floor(math.log10(error))))
    behind = "" if error is None else f" +- {error:.{decimals}f}"
    return f"{value:{sign}.{decimals}f}{behind}"


def _signed_percent(value: float, error: float | None) -> str:
    number, behind, spread = _signed(100 * value, None if error is None else 100 * error, least=2).partition(
        " +- "
    )
    return f"{number}%{behind}{spread}" + ("%" if behind else "")


def _regime_table(run: Run, regime: str) -> Table:
    about, target = run.summary["regimes"][regime]["about"], run.summary["regimes"][regime]["target_loss"]
    if run.summary.get("steps") is not None:
        about += f"; here {run.summary['steps']} steps of training"
    columns = ["rule", "drop", "seeds", "loss", "against exact", "energy dropped", "variance added"]
    if target is not None:
        columns.append(f"steps to {target:g}, against exact")
    rows = [_regime_row(row, target is not None) for row in _of(run, regime)]
    return Table(title=f"{regime}: {about}", columns=columns, rows=rows)


def _regime_row(row: Row, timed: bool) -> tuple[str, ...]:
    cells = (
        row["label"],
        percent(row["drop"], 0),
        str(len(row["seeds"])),
        even(row["loss"], 4),
        _cell(row, "dloss", _signed),
        percent(row["dropped_energy"], 2),
        percent(row["added_variance"], 1) if row["estimator"] == "sampled" else "-",
    )
    if not timed:
        return cells
    if row["steps_ratio"] is None:
        return (*cells, "not all arrived")
    error = row["steps_ratio_se"]
    return (*cells, f"x {row['steps_ratio']:.3f}" + ("" if error is None else f" +- {error:.3f}"))


def _gaps(run: Run) -> Table:
    names = {row["name"]: _called(row) for row in run.summary["rows"]}
    rows = [
        (gap["regime"], *(names.get(gap[side], gap[side]) for side in ("better", "worse")), *_gap(gap))
        for gap in run.summary["between"]
    ]
    return Table(
        title="Between rules",
        columns=("regime", "better", "worse", "loss between", "above two standard errors"),
        rows=rows,
        note="Of one estimator and drop, paired over the seeds that both have.",
        text=True,
    )


def _gap(gap: Row) -> tuple[str, str]:
    if gap["gap_se"] is None:
        return even(gap["gap"], 2), "-"
    return _signed(gap["gap"], gap["gap_se"], sign=""), "yes" if gap["resolved"] else "no"


def plots(run: Run) -> list[Plot]:
    """One plot per regime: each rule's loss against nothing dropped, with two standard errors."""
    found = (_plot(run, regime) for regime in run.summary["regimes"])
    return [plot for plot in found if plot is not None]


def _plot(run: Run, regime: str) -> Plot | None:
    rows = [row for row in _of(run, regime) if row["dloss"] is not None]
    if not rows:
        return None
    drops = sorted({row["drop"] for row in rows})
    names = list(dict.fromkeys(row["label"] for row in rows))
    traces = [
        _trace([row for row in rows if row["drop"] == drop], drop, f"var(--series-{i % _SERIES + 1})")
        for i, drop in enumerate(drops)
    ]
    cells = [(_called(row), *_number_and_error(row)) for row in rows]
    return Plot(
        name=f"ablate-{regime}",
        title=f"Loss by rule, {regime}",
        caption="Final training loss less that of nothing dropped, mean over seeds; whiskers: two standard errors. "
        "Dashed: no difference.",
        label=f"Loss against nothing dropped, {regime}. "
        + "; ".join(f"{name}: {value}" for name, value, _ in cells),
        traces=traces,
        layout={
            "scattermode": "group",
            "xaxis": {"title": "loss, nats", "exponentformat": "none"},
            "yaxis": {
                "autorange": "reversed",
                "categoryorder": "array",
                "categoryarray": [label(name) for name in names],
            },
            "shapes": [upright(0.0)],
        },
        table=Table(title=f"Loss by rule, {regime}", columns=("rule", "loss", "standard error"), rows=cells),
        height=130 + 34 * len(names) + (16 * len(names) if len(drops) > 1 else 0),
    )


def _trace(rows: Sequence[Row], drop: float, colour: str) -> dict[str, Any]:
    errors = [2 * row["dloss_se"] if row["dloss_se"] is not None else 0.0 for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{drop:.0%} dropped",
        "orientation": "h",
        "offsetgroup": f"{drop:g}",
        "x": [row["dloss"] for row in rows],
        "y": [label(row["label"]) for row in rows],
        "error_x": {"type": "data", "array": errors},
        "marker": {"color": colour, "size": 10},
    }


def _number_and_error(row: Row) -> tuple[str, str]:
    value, _, error = _signed(row["dloss"], row["dloss_se"]).partition(" +- ")
    return value, error or "-"


def method(run: Run) -> str:
    """How the figures were made, in a sentence or two."""
    seeds = {len(row["seeds"]) for row in run.summary["rows"]}
    count = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    return (
        f"Each rule trains the same model ({run.summary['model']}) as nothing dropped, on the same batches from the "
        f"same weights, with {count} seeds; quotas are those of 8 ranks, in one process."
    )


def _of(run: Run, regime: str) -> list[Row]:
    return [row for row in run.summary["rows"] if row["regime"] == regime]
