"""A training run's figures, as `lrmoe train --json` prints them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lrmoe.telemetry.figures import figure

# name in the summary -> unit, which way is better
FIGURES: Mapping[str, tuple[str, str]] = {
    "final_loss": ("nats", "lower"),
    "eval_loss": ("nats", "lower"),
    "tokens_per_s": ("tokens/s", "higher"),
    "moe_time_wall_s": ("s", "lower"),
    "wire_bytes": ("bytes", "lower"),
    "buffer_peak_bytes": ("bytes", "lower"),
    "kept_share": ("share", "higher"),
}


def figures(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A summary's figures in the form of all machine-readable evidence, named train.<run>.<quantity>."""
    context = {"folder": summary["folder"], "world_size": summary["world_size"], "steps": summary["steps"]}
    return [
        figure(f"train.{summary['name']}.{name}", summary[name], unit, better, **context)
        for name, (unit, better) in FIGURES.items()
        if summary[name] is not None
    ]
