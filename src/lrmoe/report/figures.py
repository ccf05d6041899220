"""The headline figures of a run under the names that its command gives them with --json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lrmoe.report import matrix_figures
from lrmoe.report.data import Run
from lrmoe.telemetry.figures import figure
from lrmoe.training.figures import FIGURES as TRAIN

_Unit = tuple[str, str]  # unit, which way is better
_Named = Iterator[tuple[str, float | int | None, _Unit]]

COMPARE: Mapping[str, _Unit] = {
    "steps": ("steps", "lower"),
    "moe_time_critical_s": ("s", "lower"),
    "moe_time_wall_s": ("s", "lower"),
    "wire_bytes": ("bytes", "lower"),
    "replica_bytes": ("bytes", "lower"),
    "forward_peak_rows": ("rows", "lower"),
    "backward_peak_rows": ("rows", "lower"),
    "buffer_peak_bytes": ("bytes", "lower"),
    "kept_share": ("share", "higher"),
    "final_loss": ("nats", "lower"),
    "largest_difference_eps": ("eps", "lower"),
    "steps_to_common_loss": ("steps", "lower"),
    "critical_s_to_common_loss": ("s", "lower"),
}
SIMULATE: Mapping[str, _Unit] = {
    "forward_peak": ("mean loads", "lower"),
    "backward_peak": ("mean loads", "lower"),
    "peak_worst": ("mean loads", "lower"),
    "kept_share": ("share", "higher"),
    "replicas": ("copies", "lower"),
    "extra_slots": ("slots", "lower"),
    "local_share": ("share", "higher"),
}
REPLAY: Mapping[str, _Unit] = {
    "forward_peak": ("mean loads", "lower"),
    "backward_peak": ("mean loads", "lower"),
    "kept_share": ("share", "higher"),
    "forward_ms": ("ms", "lower"),
    "backward_ms": ("ms", "lower"),
    "backward_speedup": ("ratio", "higher"),
    "layer_speedup": ("ratio", "higher"),
}
ABLATE: Mapping[str, _Unit] = {
    "dloss": ("nats", "lower"),
    "dppl": ("share", "lower"),
    "steps_ratio": ("ratio", "lower"),
}


def figures(run: Run) -> list[dict[str, Any]]:
    """The rows of the run's headline table, one figure for each number."""
    if "figures" in run.summary:  # the files of `make headline` and of one plan are figures
        return [dict(line) for line in run.summary["figures"]]
    context = {**run.summary.get("context", {}), "run": run.name}
    return [
        figure(name, value, *unit, **context)
        for name, value, unit in _NAMED[run.kind](run)
        if isinstance(value, int | float)
    ]


def _compare(run: Run) -> _Named:
    for system in run.systems:
        if "reached" in system.figures:
            yield f"compare.{system.key}.reached", int(system.figures["reached"]), ("boolean", "higher")
        for name, unit in COMPARE.items():
            yield f"compare.{system.key}.{name}", system.number(name), unit


def _train(run: Run) -> _Named:
    (system,) = run.systems
    for name, unit in TRAIN.items():
        yield f"train.{system.name}.{name}", system.number(name), unit


def _simulate(run: Run) -> _Named:
    keys = {system.name: system.key for system in run.systems}
    for scenario in run.summary["scenarios"]:
        where = f"simulate.R{scenario['ranks']}E{scenario['experts']}"
        for name, found in scenario["systems"].items():
            for quantity, unit in SIMULATE.items():
                yield f"{where}.{keys.get(name, name)}.{quantity}", found.get(quantity), unit


def _replay(run: Run) -> _Named:
    for system in run.systems:
        for quantity, unit in REPLAY.items():
            if system.key != "megatron" or not quantity.endswith("speedup"):
                yield f"replay.{system.key}.{quantity}", system.number(quantity), unit


def _plan(run: Run) -> _Named:
    """Of a sweep; one plan's figures are in its file."""
    for row in run.summary["rows"]:
        case = f"plan.{str(row['model']).lower()}.{row['hardware']}.gpus{row['gpus']}"
        yield f"{case}.largest_micro_batch", int(row["largest_micro_batch"] or 0), ("sequences", "higher")


def _matrix(run: Run) -> _Named:
    """Under the names of `lrmoe compare --json`: means over seeds, and paired ratios."""
    for found in matrix_figures.figures(run.summary):
        yield found["name"], found["value"], (found["unit"], found["better"])


def _ablate(run: Run) -> _Named:
    """What each rule costs beside nothing dropped, under the names of `lrmoe ablate --json`."""
    for row in run.summary["rows"]:
        for quantity, unit in ABLATE.items():
            yield f"ablate.{row['regime']}.{row['name']}.{quantity}", row[quantity], unit


_NAMED: Mapping[str, Callable[[Run], _Named]] = {
    "compare": _compare,
    "train": _train,
    "simulate": _simulate,
    "replay": _replay,
    "plan": _plan,
    "matrix": _matrix,
    "ablate": _ablate,
}


def of_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The figures of one run, or of two, one after the other; `context.run` tells them apart."""
    return [
        {**found, "context": {**found.get("context", {}), "run": run.name}}
        for run in runs
        for found in figures(run)
    ]
