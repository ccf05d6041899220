"""A call's record, made up: two ranks, two experts, 100 pairs."""

from __future__ import annotations

from lrmoe.telemetry import CallRecord


def record(layer: int = 0, *, kept: int = 70, **changes: object) -> CallRecord:
    fields: dict[str, object] = {
        "step": 0,
        "micro_batch": 0,
        "layer": layer,
        "world_size": 2,
        "tokens": 25,
        "pairs": 100,
        "kept": kept,
        "drop_reason": "always",
        "counts_E": [60, 40],
        "quota_E": [kept - 30, 30],
        "forward_load_R": [60, 40],
        "backward_load_R": [kept - 30, 30],
        "energy": 10.0,
        "energy_dropped": 1.0,
        "variance_added": 2.0,
        "ms": {"experts": 2.0},
        "wall_ms": {"experts": 3.0},
        "bytes": {"dispatch": 100},
        "mem": {"stash": 1000},
        "mem_predicted": {"stash": 900},
    }
    return CallRecord(**{**fields, **changes})  # type: ignore[arg-type]  # a mapping of every field's type
