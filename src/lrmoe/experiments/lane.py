"""One system's progress in a comparison: every step's loss and cost, and its entry of summary.json."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from lrmoe.config import LRMoEConfig
from lrmoe.experiments.cost import StepCost
from lrmoe.experiments.smoothing import LossWindow
from lrmoe.experiments.systems import System


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """One optimizer step of one system: a line of metrics.jsonl.

    Attributes:
        system: its name.
        step: from 1.
        loss: global mean training loss.
        smoothed_loss: None while the window fills.
        tokens: of all ranks.
        cost: of its MoE layers.
    """

    system: str
    step: int
    loss: float
    smoothed_loss: float | None
    tokens: int
    cost: StepCost

    def as_dict(self) -> dict[str, Any]:
        """Flat and JSON-able; a number that is not finite is null."""
        flat = {"system": self.system, "step": self.step, "loss": finite(self.loss), "tokens": self.tokens}
        smoothed = None if self.smoothed_loss is None else finite(self.smoothed_loss)
        return {**flat, "smoothed_loss": smoothed, "wall_s": self.cost.wall_ms / 1e3, **self.cost.as_dict()}


class Lane:
    """Collects the steps of one system until its smoothed loss reaches the target."""

    def __init__(
        self, system: System, config: LRMoEConfig, *, target_loss: float, smoothing_steps: int
    ) -> None:
        self.system = system
        self.config = config
        self.lines: list[StepLine] = []
        self.reached = False
        self._target = target_loss
        self._window = LossWindow(smoothing_steps)

    def add(self, loss: float, tokens: int, cost: StepCost) -> StepLine:
        """Take one step in; sets `reached`."""
        smoothed = self._window.add(loss)
        self.reached = LossWindow.reaches(smoothed, self._target)
        line = StepLine(
            system=self.system.name,
            step=len(self.lines) + 1,
            loss=loss,
            smoothed_loss=smoothed,
            tokens=tokens,
            cost=cost,
        )
        self.lines.append(line)
        return line

    @property
    def running(self) -> bool:
        """Whether the system goes on: it has not arrived, and its last loss is finite."""
        return not self.reached and (not self.lines or math.isfinite(self.lines[-1].loss))

    def critical_s(self, link_bytes_per_s: float) -> float:
        """MoE-layer time so far, critical path, in seconds."""
        return sum(line.cost.critical_s(link_bytes_per_s) for line in self.lines)

    def summary(self, link_bytes_per_s: float | None) -> dict[str, Any]:
        """The system's entry of summary.json; critical times are null where no link speed could be taken."""
        costs = [line.cost for line in self.lines]
        calls = sum(c.calls for c in costs) or 1
        pairs, kept = sum(c.pairs for c in costs), sum(c.kept for c in costs)
        last = self.lines[-1] if self.lines else None
        return {
            "about": self.system.about,
            "reached": self.reached,
            "steps": len(self.lines),
            "final_loss": finite(last.loss) if last else None,
            "smoothed_loss": finite(last.smoothed_loss) if last and last.smoothed_loss is not None else None,
            "moe_time_wall_s": sum(c.wall_ms for c in costs) / 1e3,
            "moe_time_critical_s": self.critical_s(link_bytes_per_s) if link_bytes_per_s else None,
            "wire_bytes": sum(c.wire_bytes for c in costs),
            "buffer_peak_bytes": max((c.buffer_bytes for c in costs), default=0),
            "kept_share": kept / pairs if pairs else 1.0,
            "forward_peak_rows": sum(c.forward_peak_rows for c in costs) / calls,
            "backward_peak_rows": sum(c.backward_peak_rows for c in costs) / calls,
            "nonfinite_scores": sum(c.nonfinite_scores for c in costs),
            "tokens": sum(line.tokens for line in self.lines),
            "call_ms": self._call_ms(calls, link_bytes_per_s),
            "fairness": self._fairness(),
            "config": self.config.to_dict(),
        }

    def _call_ms(self, calls: int, link_bytes_per_s: float | None) -> dict[str, float]:
        """Mean milliseconds of a layer call per phase on the critical path; "wire" is the link's part."""
        total: dict[str, float] = defaultdict(float)
        for line in self.lines:
            for phase, ms in line.cost.phase_ms.items():
                total[phase] += ms
        if link_bytes_per_s:
            total["wire"] = sum(line.cost.critical_bytes for line in self.lines) / link_bytes_per_s * 1e3
        return {phase: ms / calls for phase, ms in total.items()}

    def _fairness(self) -> dict[str, Any]:
        c = self.config
        drops = c.max_drop > 0
        return {
            "replica_slots": c.replica_slots,
            "budget_bytes": c.memory_budget or c.layer_budget or "none",
            "plans_from": self.system.plans_from,
            "estimator": f"{c.estimator}, score {c.score}" if drops else "exact, nothing dropped",
            "max_drop": c.max_drop,
            "exact_warmup_steps": c.warmup_steps if drops else "all",
            "activations": c.activations,
            "rows_on_the_wire": "one per (token, rank)" if c.lean_wire is True else "one per pair",
        }


def finite(value: float) -> float | None:
    """The number, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None
