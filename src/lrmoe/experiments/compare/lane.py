"""One system's progress in a comparison: every step's loss and cost, and its entry of summary.json."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lrmoe.config import LRMoEConfig
from lrmoe.experiments.compare.cost import StepCost
from lrmoe.experiments.compare.memory import memory_summary
from lrmoe.experiments.systems.fairness import TRAINS, Sizes, fairness
from lrmoe.experiments.systems.registry import System
from lrmoe.experiments.trajectories.smoothing import LossWindow
from lrmoe.telemetry.figures import finite


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
    """Collects the steps of one system until it arrives: at the target loss, or without one at the last step.

    Args:
        system, config: what runs. targets: losses of which the smoothed loss must reach the lowest; none: no target.
        smoothing_steps: width of the smoothed loss's window. max_steps: the last step.
        role: who makes its gradients, sizes: of the model, both for the fairness table.
    """

    def __init__(
        self,
        system: System,
        config: LRMoEConfig,
        *,
        targets: Sequence[float] = (),
        smoothing_steps: int,
        max_steps: int,
        role: str = TRAINS,
        sizes: Sizes | None = None,
    ) -> None:
        self.system = system
        self.config = config
        self.role, self.sizes = role, sizes
        self.lines: list[StepLine] = []
        self.reached = False
        self.extra: dict[str, Any] = {}  # further entries of the summary
        self._targets, self._last = tuple(targets), max_steps
        self._window = LossWindow(smoothing_steps)

    def add(self, loss: float, tokens: int, cost: StepCost) -> StepLine:
        """Take one step in; sets `reached`."""
        smoothed = self._window.add(loss)
        line = StepLine(
            system=self.system.name,
            step=len(self.lines) + 1,
            loss=loss,
            smoothed_loss=smoothed,
            tokens=tokens,
            cost=cost,
        )
        self.lines.append(line)
        if self._targets:
            self.reached = LossWindow.reaches(smoothed, min(self._targets))
        else:
            self.reached = line.step >= self._last and math.isfinite(loss)
        return line

    @property
    def running(self) -> bool:
        """Whether the system goes on: it has not arrived, and its last loss is finite."""
        return not self.reached and (not self.lines or math.isfinite(self.lines[-1].loss))

    @property
    def lowest(self) -> float:
        """The lowest smoothed loss so far; infinite where there is none."""
        return min(
            (s for line in self.lines if (s := line.smoothed_loss) is not None and s == s), default=math.inf
        )

    def until(self, loss: float) -> list[StepLine]:
        """The steps up to the first whose smoothed loss is at most `loss`; none where it never is."""
        for line in self.lines:
            if LossWindow.reaches(line.smoothed_loss, loss):
                return self.lines[: line.step]
        return []

    def critical_s(self, link_bytes_per_s: float) -> float:
        """MoE-layer time so far, critical path, in seconds."""
        return _critical_s(self.lines, link_bytes_per_s) or 0.0

    def summary(self, link_bytes_per_s: float | None, common_loss: float | None = None) -> dict[str, Any]:
        """The system's entry of summary.json; critical times are null where no link speed could be taken."""
        costs = [line.cost for line in self.lines]
        calls = sum(c.calls for c in costs) or 1
        pairs, kept = sum(c.pairs for c in costs), sum(c.kept for c in costs)
        last = self.lines[-1] if self.lines else None
        common = [] if common_loss is None else self.until(common_loss)
        return {
            "about": self.system.about,
            "role": self.role,
            "reached": self.reached,
            "steps": len(self.lines),
            "final_loss": finite(last.loss) if last else None,
            "smoothed_loss": finite(last.smoothed_loss) if last and last.smoothed_loss is not None else None,
            "moe_time_wall_s": sum(c.wall_ms for c in costs) / 1e3,
            "moe_time_critical_s": _critical_s(self.lines, link_bytes_per_s),
            "steps_to_common_loss": len(common) or None,
            "critical_s_to_common_loss": _critical_s(common, link_bytes_per_s),
            "wire_bytes": sum(c.wire_bytes for c in costs),
            "replica_bytes": sum(c.replica_bytes for c in costs),
            "wire_bytes_row_per_pair": sum(c.row_per_pair_bytes for c in costs),
            "buffer_peak_bytes": max((c.buffer_bytes for c in costs), default=0),
            "kept_share": kept / pairs if pairs else 1.0,
            "forward_peak_rows": sum(c.forward_peak_rows for c in costs) / calls,
            "backward_peak_rows": sum(c.backward_peak_rows for c in costs) / calls,
            "nonfinite_scores": sum(c.nonfinite_scores for c in costs),
            **_energies(costs),
            "tokens": sum(line.tokens for line in self.lines),
            "to_target": [self._to_target(target, link_bytes_per_s) for target in self._targets or (None,)],
            "call_ms": self._call_ms(calls, link_bytes_per_s),
            "memory": memory_summary([c.memory for c in costs], self.config, self._optimizer_bytes()),
            "fairness": fairness(self.system, self.config, self.role, self.sizes),
            "config": self.config.to_dict(),
            **self.extra,
        }

    def _optimizer_bytes(self) -> int:
        """Bytes of optimizer states for a rank's own experts, or its shards of all; 0 without sizes."""
        if self.sizes is None or not self.lines:
            return 0
        weights = max(line.cost.memory.measured["weights"] for line in self.lines)
        return weights // self.sizes.expert.element_bytes * self.sizes.state_bytes

    def _to_target(self, target: float | None, link_bytes_per_s: float | None) -> dict[str, Any]:
        """What it took to one target, or without any to the last step; only the target where it was not reached."""
        lines = self.until(target) if target is not None else self.lines if self.reached else []
        return {"target": target, "reached": bool(lines), **_needed(lines, link_bytes_per_s)}

    def _call_ms(self, calls: int, link_bytes_per_s: float | None) -> dict[str, float]:
        """Mean milliseconds of a layer call per phase on the critical path; "wire" is the link's part."""
        total: dict[str, float] = defaultdict(float)
        for line in self.lines:
            for phase, ms in line.cost.phase_ms.items():
                total[phase] += ms
        if link_bytes_per_s:
            total["wire"] = sum(line.cost.critical_bytes for line in self.lines) / link_bytes_per_s * 1e3
        return {phase: ms / calls for phase, ms in total.items()}


def _critical_s(lines: Sequence[StepLine], link_bytes_per_s: float | None) -> float | None:
    """Critical path of some steps in seconds; None without a link, or without steps."""
    if not link_bytes_per_s or not lines:
        return None
    return sum(line.cost.critical_s(link_bytes_per_s) for line in lines)


def _needed(lines: Sequence[StepLine], link_bytes_per_s: float | None) -> dict[str, Any]:
    """What some steps took; every value is None without steps."""
    costs = [line.cost for line in lines]
    pairs = sum(c.pairs for c in costs)
    found: dict[str, Any] = {
        "steps": len(lines),
        "critical_s": _critical_s(lines, link_bytes_per_s),
        "wall_s": sum(c.wall_ms for c in costs) / 1e3,
        "wire_bytes": sum(c.wire_bytes for c in costs),
        "buffer_peak_bytes": max((c.buffer_bytes for c in costs), default=0),
        "kept_share": sum(c.kept for c in costs) / pairs if pairs else 1.0,
        **_energies(costs),
    }
    return found if lines else dict.fromkeys(found)


def _energies(costs: Sequence[StepCost]) -> dict[str, float]:
    """Mean over the steps that scored anything: shares of energy dropped and of variance added; 0 without any."""
    scored = [c for c in costs if c.energy > 0]
    names = ("dropped_energy", "added_variance")
    return {name: sum(getattr(c, name) for c in scored) / (len(scored) or 1) for name in names}
