"""The cases of a comparison of several cells, and their figures over seeds.

A *case* is a model, regime, auxiliary loss and target; its seeds are repetitions, paired between systems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lrmoe.report.data import Run
from lrmoe.report.names import readable
from lrmoe.statistics import standard_error

Row = Mapping[str, Any]
PARTS = ("model", "regime", "aux", "target")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, regime, auxiliary loss and target.

    Attributes:
        key: their values, in this order. name: what tells it from the other cases. title: all of it, in words.
        rows: by system, one row per seed.
    """

    key: tuple[Any, ...]
    name: str
    title: str
    rows: Mapping[str, Sequence[Row]]

    def arrived(self, system: str) -> list[Row]:
        """The system's rows of seeds at which it reached the target."""
        return [row for row in self.rows.get(system, ()) if row["reached"]]

    def by_seed(self, system: str) -> dict[int, Row]:
        """The same by seed."""
        return {row["seed"]: row for row in self.arrived(system)}


def cases(run: Run) -> list[Case]:
    """The cases of a run, in the order in which they were run."""
    found: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in run.summary["rows"]:
        by_system = found.setdefault(tuple(row[part] for part in PARTS), {})
        by_system.setdefault(row["system"], []).append(row)
    differ = [i for i in range(len(PARTS)) if len({key[i] for key in found}) > 1] or [len(PARTS) - 1]
    return [
        Case(key=key, name=words(run, key, differ), title=words(run, key, range(len(PARTS))), rows=rows)
        for key, rows in found.items()
    ]


def words(run: Run, key: Sequence[Any], which: Sequence[int]) -> str:
    """Some parts of a case's key, for readers."""
    model, regime, aux, target = key
    end = f"{run.summary['max_steps']} steps" if target is None else f"loss {target:g}"
    return ", ".join([model, regime, f"aux {aux:g}", end][i] for i in which)


def called(run: Run) -> dict[str, str]:
    """System -> what it is called."""
    return readable(run.summary["systems"])


def paired(run: Run, case: Case, system: str, quantity: str) -> Row | None:
    """The paired ratio of a system's quantity to the chosen system's, or None."""
    for found in run.summary["paired"]:
        if (found["system"], found["quantity"]) == (system, quantity) and (
            tuple(found[part] for part in PARTS) == case.key
        ):
            return dict(found)
    return None


def point(run: Run, case: Case, system: str) -> tuple[float, float | None] | None:
    """Mean and standard error of the ratio, or of the time where there is no system to take it to."""
    if run.summary["against"] is not None:
        found = paired(run, case, system, "critical_s")
        return None if found is None else (found["ratio_mean"], found["standard_error"])
    times = [row["critical_s"] for row in case.arrived(system) if row["critical_s"] is not None]
    return (fmean(times), standard_error(times)) if times else None


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there; None without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
