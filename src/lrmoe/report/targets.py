"""What each system of one comparison needed to each of several target losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lrmoe.report.data import Run, SystemRun
from lrmoe.report.numbers import against, number, seconds, size
from lrmoe.report.tables import Table


def targets(run: Run) -> Table:
    """One row per system and target; in brackets against the system that ratios are taken to."""
    base = run.baseline
    rows = [
        (system.name, number(entry["target"]), *_cells(system, i, base))
        for system in run.systems
        for i, entry in enumerate(system.figures["to_target"])
    ]
    columns = ("", "loss", "steps", "time, critical path", "time, wall", "wire", "buffers")
    note = "Steps and MoE-layer time until the smoothed loss first is at or below each loss."
    if base is not None:
        note += f" In brackets: against {base.name}."
    return Table(title="To each loss", columns=columns, rows=rows, note=note)


def _cells(system: SystemRun, place: int, base: SystemRun | None) -> tuple[str, ...]:
    ours: Mapping[str, Any] = system.figures["to_target"][place]
    if not ours["reached"]:
        return ("not reached", "-", "-", "-", "-")
    other = {} if base is None or base is system else base.figures["to_target"][place]
    times = (seconds(ours[q]) + against(ours[q], other.get(q)) for q in ("critical_s", "wall_s"))
    return (number(ours["steps"]), *times, size(ours["wire_bytes"]), size(ours["buffer_peak_bytes"]))
