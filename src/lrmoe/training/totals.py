"""Sums over the steps of a run, through every resume: a checkpoint carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lrmoe.telemetry.figures import finite
from lrmoe.training.metrics import StepMetrics
from lrmoe.training.observed import add_observed, observed_summary


@dataclass(kw_only=True)
class Totals:
    """Sums over all steps that led to the present weights; times are wall times, bytes are of all ranks.

    Attributes:
        eval_losses: [step, loss] of every evaluation.
        observed: sums of what lrmoe.observe saw.
    """

    last_loss: float | None = None
    tokens: int = 0
    pairs: int = 0
    kept: int = 0
    step_s: float = 0.0
    moe_s: float = 0.0
    wire_bytes: int = 0
    buffer_peak_bytes: int = 0
    eval_losses: list[list[float]] = field(default_factory=list)
    observed: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: StepMetrics) -> None:
        """Take one step in."""
        self.last_loss = finite(metrics.loss)
        self.tokens += metrics.tokens
        self.pairs += sum(r.pairs for r in metrics.records)
        self.kept += sum(r.kept for r in metrics.records)
        self.step_s += metrics.step_ms / 1e3
        self.moe_s += metrics.moe_ms_wall / 1e3
        self.wire_bytes += metrics.wire_bytes
        buffers = (r.buffer_peak_bytes for records in metrics.records_by_rank for r in records)
        self.buffer_peak_bytes = max(self.buffer_peak_bytes, max(buffers, default=0))
        add_observed(self.observed, metrics.records_by_rank)

    def evaluated(self, step: int, loss: float) -> None:
        """Take the evaluation after `step` in."""
        self.eval_losses.append([step, loss])

    def summary(self) -> dict[str, Any]:
        """Under the names of a comparison's systems; null where no step was done. `observed` only where it was."""
        evaluated: Sequence[Mapping[str, Any]] = [
            {"step": int(step), "loss": finite(loss)} for step, loss in self.eval_losses
        ]
        return {
            "final_loss": self.last_loss,
            "eval_loss": evaluated[-1]["loss"] if evaluated else None,
            "kept_share": self.kept / self.pairs if self.pairs else None,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / self.step_s if self.step_s else None,
            "train_time_s": self.step_s,
            "moe_time_wall_s": self.moe_s,
            "wire_bytes": self.wire_bytes,
            "buffer_peak_bytes": self.buffer_peak_bytes,
            "eval_losses": evaluated,
            **({"observed": observed_summary(self.observed)} if self.observed else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)
