"""Call records made of plain numbers."""

from __future__ import annotations

from typing import Any

from lrmoe.telemetry import CallRecord


def record(*, ms: dict[str, float], sent: dict[str, int], layer: int = 0, **changes: Any) -> CallRecord:
    """One layer call of 2 ranks: 100 pairs, 70 of them kept."""
    values: dict[str, Any] = {
        "step": 1,
        "micro_batch": 0,
        "layer": layer,
        "world_size": 2,
        "tokens": 50,
        "pairs": 100,
        "kept": 70,
        "drop_reason": "always",
        "counts_E": [60, 40],
        "quota_E": [35, 35],
        "forward_load_R": [60, 40],
        "backward_load_R": [35, 35],
        "ms": ms,
        "wall_ms": {phase: 2 * value for phase, value in ms.items()},
        "bytes": sent,
    }
    return CallRecord(**{**values, **changes})
