"""What happened in each layer call: loads, bytes, times, memory, selection statistics; traces of them.

Names are loaded when first used: figures and traces serve commands that need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrmoe.telemetry.clock import PHASES, PhaseClock, critical_path_ms
    from lrmoe.telemetry.figures import figure
    from lrmoe.telemetry.ledger import PARTS, Ledger
    from lrmoe.telemetry.live import TensorBoard, WandB
    from lrmoe.telemetry.record import CallRecord, Telemetry

_HOMES = {
    "PHASES": "clock",
    "PhaseClock": "clock",
    "critical_path_ms": "clock",
    "figure": "figures",
    "PARTS": "ledger",
    "Ledger": "ledger",
    "TensorBoard": "live",
    "WandB": "live",
    "CallRecord": "record",
    "Telemetry": "record",
}

__all__ = [
    "PARTS", "PHASES", "CallRecord", "Ledger", "PhaseClock", "Telemetry", "TensorBoard", "WandB", "critical_path_ms",
    "figure",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
