"""Figures of a comparison of several cells: compare.<model>.<regime>.aux<a>.target<t>.<system>.<quantity>."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from lrmoe.telemetry.figures import figure

# of one target: name in its entry, name of the figure, unit, better
TARGET_QUANTITIES = (
    ("critical_s", "time_to_loss", "s", "lower"),
    ("wall_s", "wall_to_loss", "s", "lower"),
    ("steps", "steps_to_loss", "steps", "lower"),
    ("wire_bytes", "wire_bytes", "bytes", "lower"),
    ("buffer_peak_bytes", "buffer_peak_bytes", "bytes", "lower"),
    ("kept_share", "kept_share", "share", "higher"),
    ("dropped_energy", "dropped_energy", "share", "lower"),
    ("added_variance", "added_variance", "share", "lower"),
)
TARGET_RATIOS = {"time_to_loss", "wall_to_loss", "steps_to_loss", "wire_bytes", "buffer_peak_bytes"}
_NAMES = {quantity: name for quantity, name, _, _ in TARGET_QUANTITIES}
_CASE = ("model", "regime", "aux", "target", "system")


def case_name(row: Mapping[str, Any], max_steps: int) -> str:
    """The first parts of a figure's name: model, regime, auxiliary loss and target, or steps where none is set."""
    end = f"steps{max_steps}" if row["target"] is None else f"target{row['target']:g}"
    return f"compare.{row['model']}.{row['regime']}.aux{row['aux']:g}.{end}.{row['system']}"


def figures(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure of a summary: means over the seeds that arrived, and ratios paired by seed."""
    shared = {key: summary[key] for key in ("preset", "max_steps", "world_size")}
    for rows in _cases(summary["rows"]):
        name = case_name(rows[0], summary["max_steps"])
        arrived = [row for row in rows if row["reached"]]
        context = {**summary["context"], **shared, "seeds": [row["seed"] for row in rows]}
        yield figure(f"{name}.reached", len(arrived) / len(rows), "share", "higher", **context)
        context["seeds"] = [row["seed"] for row in arrived]
        for quantity, short, unit, better in TARGET_QUANTITIES:
            values = [row[quantity] for row in arrived if row[quantity] is not None]
            if values:
                yield figure(f"{name}.{short}", fmean(values), unit, better, **context)
    for found in summary["paired"]:
        name = f"{case_name(found, summary['max_steps'])}.{_NAMES[found['quantity']]}_over_{found['against']}"
        context = {**summary["context"], **shared, "seeds": found["seeds"]}
        context["standard_error"] = found["standard_error"]
        yield figure(name, found["ratio_mean"], "ratio", "lower", **context)


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """The figures, one JSON object a line."""
    for item in figures(summary):
        yield json.dumps(item, allow_nan=False)


def _cases(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The rows of each case, one per seed."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in _CASE), []).append(row)
    return list(found.values())
