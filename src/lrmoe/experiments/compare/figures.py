"""A comparison's figures as JSON lines: compare.<system>.<quantity>; with several targets also
compare.<system>.target<t>.<quantity>.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lrmoe.report.data import BASELINE
from lrmoe.report.figures import COMPARE
from lrmoe.report.matrix_figures import TARGET_QUANTITIES, TARGET_RATIOS
from lrmoe.telemetry.figures import figure

# name in the summary -> unit, which way is better: those of the headline table, and what pruning left out
QUANTITIES: Mapping[str, tuple[str, str]] = {
    **COMPARE,
    "dropped_energy": ("share", "lower"),
    "added_variance": ("share", "lower"),
}
RATIOS = (
    ("time_critical", "moe_time_critical_s"),
    ("time_wall", "moe_time_wall_s"),
    ("wire_bytes", "wire_bytes"),
    ("buffer_peak_bytes", "buffer_peak_bytes"),
    ("steps", "steps"),
    ("time_to_common_loss", "critical_s_to_common_loss"),
)


def figures(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure of a summary. Ratios (ours / the base's, megatron's by default) only where both arrived."""
    context = {**summary["context"], "seed": summary["seed"], "preset": summary["preset"]}
    context["link_bytes_per_s"] = summary["link_bytes_per_s"]
    against = summary.get("against") or BASELINE
    base = summary["systems"].get(against)
    yield from _of_targets(summary, base, against, context)
    for name, ours in summary["systems"].items():
        yield figure(f"compare.{name}.reached", int(ours["reached"]), "boolean", "higher", **context)
        for quantity, (unit, better) in QUANTITIES.items():
            if ours.get(quantity) is not None:
                yield figure(f"compare.{name}.{quantity}", ours[quantity], unit, better, **context)
        if base is None or base is ours or not (base["reached"] and ours["reached"]):
            continue
        for short, quantity in RATIOS:
            if base.get(quantity) and ours.get(quantity) is not None:
                ratio = ours[quantity] / base[quantity]
                yield figure(f"compare.{name}.{short}_over_{against}", ratio, "ratio", "lower", **context)


def _of_targets(
    summary: Mapping[str, Any], base: Mapping[str, Any] | None, against: str, context: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Figures of each target where there are several."""
    if len(summary.get("targets", ())) < 2:
        return
    for system, entry in summary["systems"].items():
        for i, ours in enumerate(entry["to_target"]):
            name = f"compare.{system}.target{ours['target']:g}"
            other = None if base is None or base is entry else base["to_target"][i]
            yield figure(f"{name}.reached", int(ours["reached"]), "boolean", "higher", **context)
            for quantity, short, unit, better in TARGET_QUANTITIES:
                if ours[quantity] is None:
                    continue
                yield figure(f"{name}.{short}", ours[quantity], unit, better, **context)
                if other is not None and other[quantity] and short in TARGET_RATIOS:
                    ratio = ours[quantity] / other[quantity]
                    yield figure(f"{name}.{short}_over_{against}", ratio, "ratio", "lower", **context)


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """The figures, one JSON object a line."""
    for item in figures(summary):
        yield json.dumps(item, allow_nan=False)
