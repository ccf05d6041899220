"""What the MoE layers of a model held on the fullest rank in a step, part by part: measured, and as predicted.

Weights, gradients and the stashes of a micro-batch's calls are there together; of what a call needs only while it runs
(replicas, dispatched rows, buffers of backward, outputs) there is one at a time, and the largest counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lrmoe.config import LRMoEConfig
from lrmoe.layer.budget import budget_limits, device_bytes
from lrmoe.telemetry import PARTS, CallRecord

STAY = ("weights", "grads", "stash")
PASS = ("replicas", "dispatched", "backward", "outputs")


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Bytes on the fullest rank in a step.

    Attributes:
        measured: of all MoE layers, per part of PARTS.
        predicted: the same as the planner saw it coming; zeros where nothing was predicted.
        call_measured: of the call that needed most, on that rank. call_predicted: of the same call.
    """

    measured: Mapping[str, int]
    predicted: Mapping[str, int]
    call_measured: Mapping[str, int]
    call_predicted: Mapping[str, int]

    @property
    def total(self) -> int:
        """Measured bytes of all parts."""
        return sum(self.measured.values())

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Plain values for a summary."""
        return {name: dict(parts) for name, parts in asdict(self).items()}


def model_memory(records_by_rank: Sequence[Sequence[CallRecord]]) -> ModelMemory:
    """Take the records of one step of all ranks together; the rank with the largest measured sum counts."""
    return max((_rank_memory(records) for records in records_by_rank), key=lambda memory: memory.total)


def _rank_memory(records: Sequence[CallRecord]) -> ModelMemory:
    largest = max(records, key=lambda record: sum(record.mem.values()), default=None)
    return ModelMemory(
        measured=_together(records, lambda record: record.mem),
        predicted=_together(records, lambda record: record.mem_predicted),
        call_measured=_parts({} if largest is None else largest.mem),
        call_predicted=_parts({} if largest is None else largest.mem_predicted),
    )


def _together(
    records: Sequence[CallRecord], read: Callable[[CallRecord], Mapping[str, int]]
) -> dict[str, int]:
    """The fullest micro-batch's sum of what stays, and the largest call of what passes."""
    batches: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(PARTS, 0))
    for record in records:
        batch, found = batches[record.micro_batch], read(record)
        for part in STAY:
            batch[part] += found.get(part, 0)
        for part in PASS:
            batch[part] = max(batch[part], found.get(part, 0))
    return max(batches.values(), key=lambda batch: sum(batch.values()), default=dict.fromkeys(PARTS, 0))


def _parts(found: Mapping[str, int]) -> dict[str, int]:
    return {part: found.get(part, 0) for part in PARTS}


def memory_summary(steps: Sequence[ModelMemory], config: LRMoEConfig, optimizer_bytes: int) -> dict[str, Any]:
    """The fullest step as an entry of summary.json.

    Args:
        steps: of a run on CPU. config: of the system, for its budgets.
        optimizer_bytes: states that the optimizer keeps for a rank's experts; no budget counts them.
    """
    fullest = max(steps, key=lambda step: step.total, default=None)
    if fullest is None:
        return {}
    layer, model = budget_limits(config, device_bytes(torch.device("cpu")))
    budgets = {"layer_budget": layer, "memory_budget": model}
    return {**fullest.as_dict(), "optimizer": optimizer_bytes, **budgets}
