"""A comparison's figures as JSON lines: compare.<system>.<quantity>."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lrmoe.report.data import BASELINE
from lrmoe.telemetry.figures import figure

# name in the summary, unit, better
QUANTITIES = (
    ("steps", "steps", "lower"),
    ("final_loss", "nats", "lower"),
    ("moe_time_critical_s", "s", "lower"),
    ("moe_time_wall_s", "s", "lower"),
    ("wire_bytes", "B", "lower"),
    ("replica_bytes", "B", "lower"),
    ("buffer_peak_bytes", "B", "lower"),
    ("forward_peak_rows", "rows", "lower"),
    ("backward_peak_rows", "rows", "lower"),
    ("kept_share", "fraction", "higher"),
    ("steps_to_common_loss", "steps", "lower"),
    ("critical_s_to_common_loss", "s", "lower"),
    ("largest_difference_eps", "eps", "lower"),
)
RATIOS = (
    ("time_critical", "moe_time_critical_s"),
    ("time_wall", "moe_time_wall_s"),
    ("wire_bytes", "wire_bytes"),
    ("buffer_peak_bytes", "buffer_peak_bytes"),
    ("steps", "steps"),
    ("time_to_common_loss", "critical_s_to_common_loss"),
)


def figures(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure of a summary. Ratios (ours / megatron's) only where both reached the target."""
    context = {**summary["context"], "seed": summary["seed"], "preset": summary["preset"]}
    context["link_bytes_per_s"] = summary["link_bytes_per_s"]
    base = summary["systems"].get(BASELINE)
    for name, ours in summary["systems"].items():
        yield figure(f"compare.{name}.reached", int(ours["reached"]), "boolean", "higher", **context)
        for quantity, unit, better in QUANTITIES:
            if ours.get(quantity) is not None:
                yield figure(f"compare.{name}.{quantity}", ours[quantity], unit, better, **context)
        if base is None or base is ours or not (base["reached"] and ours["reached"]):
            continue
        for short, quantity in RATIOS:
            if base.get(quantity) and ours.get(quantity) is not None:
                ratio = ours[quantity] / base[quantity]
                yield figure(f"compare.{name}.{short}_over_{BASELINE}", ratio, "ratio", "lower", **context)


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """The figures, one JSON object a line."""
    for item in figures(summary):
        yield json.dumps(item, allow_nan=False)
