"""From figures of calls to the summary of a simulation: means, worst calls, throughput under pressure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lrmoe.simulate.cluster import Outcome
from lrmoe.simulate.measure import CallFigures

BASELINE = "megatron"
BASELINE_THROUGHPUT = 0.4  # of fixed ownership at BASELINE_PRESSURE, from the published comparison
BASELINE_PRESSURE = 20
PRESSURES = (1, 2, 5, 10, 20)
_WORST_HIGH = ("forward_peak", "backward_peak", "peak", "forward_subtotal", "backward_subtotal", "plan_ms")


def system_summary(outcome: Outcome, budget_bytes: int | None = None) -> dict[str, Any]:
    """Means over the measured calls, the worst of some (`*_worst`), the median of planning time, what did not fit.

    Args:
        outcome: of one system. budget_bytes: to count planned calls that need more, or None.
    """
    infeasible: dict[str, Any] = {"calls": len(outcome.calls), "infeasible_calls": len(outcome.infeasible)}
    if not outcome.calls:
        return {**infeasible, "infeasible": outcome.infeasible[0] if outcome.infeasible else ""}
    table = {
        name: np.array([c.as_dict()[name] for c in outcome.calls]) for name in outcome.calls[0].as_dict()
    }
    found: dict[str, Any] = {name: float(values.mean()) for name, values in table.items()}
    found |= {f"{name}_worst": float(table[name].max()) for name in _WORST_HIGH}
    found["plan_ms"] = float(np.median(table["plan_ms"]))
    if outcome.infeasible:
        infeasible["infeasible"] = outcome.infeasible[0]
    if budget_bytes is not None:
        most = np.maximum(table["forward_subtotal"], table["backward_subtotal"])
        infeasible["over_budget_calls"] = int((most > budget_bytes).sum())
    return {**infeasible, **found}


def capacity_rows(fixed: Sequence[CallFigures], pressure: float = 1.0) -> float:
    """Rows B of a rank at which fixed ownership's effective throughput is 40 % at 20x.

    Args:
        fixed: fixed ownership's calls. pressure: at which they were planned.
    """
    low, high = 0.0, max(call.backward_rows for call in fixed) * BASELINE_PRESSURE / pressure
    for _ in range(100):
        middle = (low + high) / 2
        reached = throughput(fixed, middle, BASELINE_PRESSURE, planned_at=pressure)
        low, high = (middle, high) if reached < BASELINE_THROUGHPUT else (low, middle)
    return high


def effective(capacity: float, rows: float) -> float:
    """Effective throughput: the part of the work that fits, min(1, B / rows of the most loaded rank)."""
    return 1.0 if rows <= capacity else max(capacity, 0.0) / rows


def throughput(
    calls: Sequence[CallFigures], capacity: float, pressure: float, *, planned_at: float = 1.0
) -> float:
    """Mean effective throughput when the batch is `pressure` times as large, from plans made at `planned_at`.

    A system's replicas take their rows out of the capacity first.
    """
    scale = pressure / planned_at
    return float(np.mean([effective(capacity - c.extra_rows, c.backward_rows * scale) for c in calls]))


def throughputs(outcomes: Sequence[Outcome], capacity: float) -> Mapping[str, dict[str, float]]:
    """System -> pressure -> effective throughput, rows scaled from plans at pressure 1."""
    return {
        o.system.name: {str(p): throughput(o.calls, capacity, p) for p in PRESSURES}
        for o in outcomes
        if o.calls
    }
