"""Rows of a comparison of several cells, and the paired statistics over its seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lrmoe.experiments.compare.cells import Cell
from lrmoe.statistics import averaged

QUANTITIES = ("steps", "critical_s", "wall_s", "wire_bytes", "buffer_peak_bytes")  # of which ratios are taken
COLUMNS = (
    *("model", "regime", "aux", "seed", "target", "system", "reached"),
    *QUANTITIES,
    *("budget", "kept_share", "dropped_energy", "added_variance", "final_loss", "cell"),
)
_CASE = ("model", "regime", "aux", "target")


def rows_of(cell: Cell, summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each system and target of a finished cell, under the names of COLUMNS.

    Args:
        summary: its summary.json.
    """
    for system, entry in summary["systems"].items():
        config = entry["config"]
        for found in entry["to_target"]:
            values = {
                **cell.key,
                **found,
                "system": system,
                "budget": config.get("layer_budget") or config.get("memory_budget"),
                "final_loss": entry["final_loss"],
                "cell": cell.name,
            }
            yield {name: values[name] for name in COLUMNS}


def ratios(rows: Sequence[Mapping[str, Any]], against: str | None) -> list[dict[str, Any]]:
    """Every system's quantities over those of `against`, paired by seed: mean and standard error of the ratio.

    Only seeds at which both arrived count. `standard_error` is None with one seed.
    """
    base = {_place(row): row for row in rows if row["system"] == against}
    groups: dict[tuple[Any, ...], list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for row in rows:
        other = base.get(_place(row))
        if other is not None and row["system"] != against and row["reached"] and other["reached"]:
            case = tuple(row[name] for name in (*_CASE, "system"))
            groups.setdefault(case, []).append((row, other))
    return [
        {**dict(zip((*_CASE, "system"), case, strict=True)), "against": against, **found}
        for case, pairs in groups.items()
        for found in _ratios(pairs)
    ]


def _ratios(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    for quantity in QUANTITIES:
        values = [
            ours[quantity] / base[quantity]
            for ours, base in pairs
            if base[quantity] and ours[quantity] is not None
        ]
        if values:
            found = averaged(values)
            yield {
                "quantity": quantity,
                "ratio_mean": found.mean,
                "standard_error": found.standard_error if found.n > 1 else None,
                "seeds": found.n,
            }


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*_CASE, "seed"))
