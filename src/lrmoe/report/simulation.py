"""Tables and words of a simulation. Its summary holds one scenario per cluster size, each with all systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lrmoe.report.data import BASELINE, Run
from lrmoe.report.numbers import even, number, percent, size
from lrmoe.report.tables import Table

OURS = "lrmoe"
_Figures = Mapping[str, Any]


def milliseconds(value: float | None) -> str:
    """Three digits, "-" for None."""
    return even(value)


def _gib(value: float | None) -> str:
    return "-" if value is None else even(value / 2**30)


def _share(value: float | None) -> str:
    return percent(value)


# heading, figure of the summary, how it is written
_Column = tuple[str, str, Callable[[float | None], str]]
_BALANCE: Sequence[_Column] = (
    ("fwd peak", "forward_peak", lambda v: even(v, 4)),
    ("bwd peak", "backward_peak", lambda v: even(v, 4)),
    ("worst", "peak_worst", lambda v: even(v, 4)),
    ("kept", "kept_share", _share),
    ("copies", "replicas", number),
    ("slots", "extra_slots", number),
    ("local", "local_share", _share),
)
_COST: Sequence[_Column] = (
    ("fwd GiB", "forward_subtotal", _gib),
    ("bwd GiB", "backward_subtotal", _gib),
    ("rows GiB", "row_traffic", _gib),
    ("weight GiB", "weight_traffic", _gib),
    ("plan ms", "plan_ms", milliseconds),
    ("fwd ms", "forward_ms", milliseconds),
    ("bwd ms", "backward_ms", milliseconds),
    ("layer ms", "layer_ms", milliseconds),
)

_CHUNKS: Sequence[_Column] = (
    ("fwd chunks", "forward_chunks", number),
    ("bwd chunks", "backward_chunks", number),
)


def scenarios(run: Run) -> Sequence[_Figures]:
    """One entry per cluster size."""
    return list(run.summary["scenarios"])


def where(scenario: _Figures) -> str:
    """The cluster in words."""
    nodes = f", {scenario['nodes']} nodes" if scenario["nodes"] > 1 else ""
    return f"{scenario['ranks']} ranks, {scenario['experts']} experts{nodes}"


def balance(scenario: _Figures) -> Table:
    """Peaks, replicas and throughput under pressure of one cluster."""
    tried = pressures(scenario)
    shown = tried[-1:]
    columns = ("system", *(title for title, *_ in _BALANCE), *(f"at {p}x" for p in shown))
    rows = [
        (name, *_cells(f, _BALANCE), *(_share(f.get("throughput", {}).get(p)) for p in shown))
        for name, f in scenario["systems"].items()
    ]
    return Table(
        title=f"Balance: {where(scenario)}", columns=columns, rows=rows, note=_balance_note(scenario)
    )


def _balance_note(scenario: _Figures) -> str:
    text = "Peak: rows of the most loaded rank over the mean load with nothing dropped, mean over calls; worst: the "
    text += "worst call. Kept: pairs that backward computes. Copies: foreign experts on all ranks. Slots: most extra "
    text += "weight slots of a rank. Local: pairs that run at their source."
    for name, figures in scenario["systems"].items():
        missed = figures["infeasible_calls"] + figures.get("over_budget_calls", 0)
        if missed:
            calls = figures["calls"] + figures["infeasible_calls"]
            text += f" {name} does not fit the budget in {missed} of {calls} calls."
    for name, acts in scenario.get("at_home", {}).items():
        text += f" {name} (acts: {acts}) left every expert at home in the measured calls: it saw nothing to gain, or "
        text += "its turn comes after more calls than --skip."
    if scenario["capacity_rows"] is not None:
        text += (
            f" At {_last(scenario)}x: effective throughput with so much larger a batch, the part that fits "
        )
        text += f"{number(scenario['capacity_rows'], 4)} rows"
        text += f" ({scenario['capacity_rule']})."
    return text


def _last(scenario: _Figures) -> str:
    return next(iter(pressures(scenario)[-1:]), "")


def cost(scenario: _Figures) -> Table:
    """Bytes, traffic and time of one cluster."""
    columns = ("system", *(title for title, *_ in _COST))
    rows = [(name, *_cells(f, _COST)) for name, f in scenario["systems"].items()]
    note = "Per layer call: experts, replicas and token buffers of the fullest rank in each pass; rows and weights "
    note += "that cross ranks, all ranks; CPU time of planning on this machine; other times are modelled, nothing "
    note += "overlaps."
    return Table(title=f"Cost: {where(scenario)}", columns=columns, rows=rows, note=note)


def chunks(scenario: _Figures) -> Table:
    """Parts in which rows run, of one cluster."""
    columns = ("system", *(title for title, *_ in _CHUNKS))
    rows = [(name, *_cells(f, _CHUNKS)) for name, f in scenario["systems"].items()]
    note = "Parts in which each rank's rows run one after another, mean over calls; the memory columns hold the token "
    note += (
        "buffers of one part. Of the built-in systems only lrmoe is offered chunks, and only under a budget."
    )
    return Table(title=f"Chunks: {where(scenario)}", columns=columns, rows=rows, note=note)


def chunked(scenario: _Figures) -> bool:
    """Whether any system runs rows in more than one part."""
    return any(f.get(name, 1) > 1 for f in scenario["systems"].values() for _, name, _ in _CHUNKS)


def _cells(figures: _Figures, columns: Sequence[_Column]) -> list[str]:
    return [write(figures.get(name)) for _, name, write in columns]


def pressures(scenario: _Figures) -> list[str]:
    """Batch pressures at which throughput is known."""
    return list(next((f["throughput"] for f in scenario["systems"].values() if "throughput" in f), {}))


def comparison(run: Run) -> Table | None:
    """Published and simulated side by side, where the summary has them."""
    lines = run.summary.get("comparison")
    if not lines:
        return None
    rows = [
        (
            line["quantity"],
            even(line["published"], 4),
            even(line["simulated"], 4),
            even(line["ratio"], 3),
        )
        for line in lines
    ]
    columns = ("quantity", "published", "simulated", "ratio")
    return Table(title="Beside the published figures", columns=columns, rows=rows, note=_COMPARISON_NOTE)


_COMPARISON_NOTE = (
    "Ratio: simulated / published. Simulated figures are arithmetic on plans, not measurements; "
    "lrmoe against megatron where no system is named."
)


def fairness(run: Run) -> Table:
    """What every system was given, one row each."""
    given: Mapping[str, _Figures] = run.summary["fairness"]
    keys = list({key: None for entry in given.values() for key in entry})
    rows = [(name, *(_plain(key, entry.get(key)) for key in keys)) for name, entry in given.items()]
    return Table(
        title="Fairness: what each system was given", columns=("system", *keys), rows=rows, text=True
    )


def _plain(key: str, value: Any) -> str:
    return size(value) if isinstance(value, int) and ("bytes" in key or "budget" in key) else str(value)


def tables(run: Run) -> list[Table]:
    """All tables for a terminal, in order."""
    found = [
        table
        for scenario in scenarios(run)
        for table in (balance(scenario), cost(scenario), *([chunks(scenario)] if chunked(scenario) else ()))
    ]
    beside = comparison(run)
    return [*found, *([beside] if beside else [])]


def verdict(run: Run) -> str:
    """One sentence on the first cluster."""
    scenario = scenarios(run)[0]
    systems = scenario["systems"]
    ours = next((n for n in (OURS, *systems) if n in systems and systems[n]["calls"]), None)
    if ours is None:
        return "No system fits the budget."
    figures = systems[ours]
    text = (
        f"{where(scenario)}: under {ours} the most loaded rank runs {number(figures['forward_peak'], 4)} mean loads "
        f"forward and {number(figures['backward_peak'], 4)} backward"
    )
    base = systems.get(BASELINE)
    if base is None or not base["calls"] or ours == BASELINE:
        return text + "."
    return text + f", under fixed ownership {number(base['forward_peak'], 4)} in both."


def method(run: Run) -> str:
    """What was simulated, and that it was."""
    settings = run.summary["settings"]
    source = (
        f"counts of the generator {settings['generator']!r}, seeds {', '.join(map(str, settings['seeds']))}, "
        f"{settings['tokens']:,} tokens per rank"
        if "generator" in settings
        else f"counts of the trace {settings.get('trace') or 'given'}"
    )
    steps, skip = settings.get("steps"), settings.get("skip")
    if skip is not None:
        source += f"; {'all' if steps is None else steps} calls measured after {skip} that only make history"
    slots, row, expert = settings["slots"], size(settings["row_bytes"]), size(settings["expert_bytes"])
    return (
        f"Simulated, nothing was run: {source}. Every system planned every call; history-based systems saw earlier "
        f"calls only. {slots} weight slots per rank beyond the home experts for every system that uses any; a pair "
        f"takes {row} at its expert's rank, an expert {expert} with its gradient. Layer time is modelled for "
        f"{settings['hardware']}."
    )


def fairness_short(run: Run) -> Table:
    """What differs between systems in the fairness table, narrow enough for a terminal."""
    given: Mapping[str, _Figures] = run.summary["fairness"]
    keys: tuple[str, ...] = ("slots per rank beyond E / R", "plans from", "acts", "estimator")
    if any(chunked(scenario) for scenario in scenarios(run)):
        keys = (*keys, "chunks")
    rows = [(name, *(str(entry.get(key, "-")) for key in keys)) for name, entry in given.items()]
    return Table(
        title="Fairness: what each system was given",
        columns=("system", *keys),
        rows=rows,
        note="The whole table, with bytes, activations and what is ours in each rule, is in the report.",
        text=True,
    )
