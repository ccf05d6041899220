"""Bytes of a whole model's MoE part on a rank: all layers' weights, gradients, optimizer states and waiting stashes.

Shape letters: R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from lrmoe.errors import PlanError, did_you_mean
from lrmoe.planning.memory import (
    GRADIENT_BYTES,
    Execution,
    ExpertShape,
    PassBytes,
    Rows,
    add_parts,
    call_rows,
    held_R,
    replica_bytes,
    rows_cost,
)
from lrmoe.planning.plan import LayerPlan

# Bytes per parameter that optimizers keep beside weight and gradient.
OPTIMIZERS: Mapping[str, int] = MappingProxyType(
    {
        "adamw": 12,  # fp32 master weight, two fp32 moments
        "adamw-bf16-moments": 8,  # fp32 master weight, two bf16 moments
        "adamw-8bit": 6,  # fp32 master weight, two 8-bit moments
        "adamw-no-master": 8,  # two fp32 moments
        "muon": 8,  # fp32 master weight, one fp32 momentum
        "sgd": 4,  # fp32 master weight
        "none": 0,
    }
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a whole model adds to one layer call.

    Attributes:
        layers: MoE layers.
        gradient_bytes: bytes per parameter of the gradient buffers: 4 (fp32) or 2 (bf16).
        optimizer: a name of OPTIMIZERS. optimizer_shards: ranks that share one expert's optimizer state.
        checkpointing: whether each layer's forward runs again in its backward, so that only one layer's stash waits.

    Raises:
        PlanError: a size below 1, another gradient size, or an unknown optimizer (names the nearest).
    """

    layers: int
    gradient_bytes: int = GRADIENT_BYTES
    optimizer: str = "adamw"
    optimizer_shards: int = 1
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "optimizer_shards"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.gradient_bytes not in (2, 4):
            raise PlanError(f"gradient_bytes={self.gradient_bytes}: must be 4 (fp32) or 2 (bf16)")
        if self.optimizer not in OPTIMIZERS:
            hint = did_you_mean(self.optimizer, OPTIMIZERS)
            raise PlanError(
                f"optimizer={self.optimizer!r}: no such kind{hint}; valid: {', '.join(OPTIMIZERS)}"
            )

    @property
    def waiting(self) -> int:
        """Layers whose stash is alive together."""
        return 1 if self.checkpointing else self.layers


def model_bytes(shape: ExpertShape, plan: LayerPlan, run: Execution, training: Training) -> PassBytes:
    """Bytes of the MoE part of a whole model, every layer taken to be as loaded as this call, on the same ranks.

    Weights, gradients, optimizer states and waiting stashes count for all layers; slots are shared by the layers
    unless the plan says that they are resident; transients count once. "grads" also holds one layer's fresh gradients
    in the compute dtype, before they are added to the buffers.
    """
    rows, local = call_rows(shape, plan, run), plan.topology.experts_per_rank
    each = np.ones(plan.topology.ranks, dtype=np.int64)
    params = local * shape.params
    resident_R = plan.moved.resident_R
    per_slot = shape.weight_bytes + shape.params * training.gradient_bytes
    state = -(-params * OPTIMIZERS[training.optimizer] // training.optimizer_shards)
    fixed = {
        "weights": each * (training.layers * params * shape.element_bytes),
        "grads": each * (training.layers * params * training.gradient_bytes),
        "optimizer": each * (training.layers * state),
        "replicas": training.layers * resident_R * per_slot
        + (held_R(plan) - resident_R) * replica_bytes(shape, run),
    }
    kept = {part: size * training.waiting for part, size in rows.kept.items()}
    fresh = {"grads": each * (params * shape.element_bytes)}
    return PassBytes(
        forward=add_parts(fixed, kept, rows.forward), backward=add_parts(fixed, kept, rows.backward, fresh)
    )


def rows_within(
    budget: int,
    shape: ExpertShape,
    *,
    pairs: int,
    local_experts: int,
    run: Execution,
    training: Training,
    alone: bool = False,
    keeps: bool = True,
) -> tuple[int, int]:
    """Rows that fit a rank under a byte budget for `model_bytes` without optimizer states, and one replica in rows.

    Every row is charged what it needs in the dearer pass; nothing is taken to be dropped or chunked.

    Args:
        pairs: pairs that a rank sends. local_experts: experts homed on a rank.
        run, training: how calls run.
        alone: whether there is one rank only.
        keeps: whether rows stay at their experts until backward (else their inputs are dispatched again).

    Returns:
        (rows, below 1 where not even weights and sent rows fit; rows one replica counts, rounded up).
    """
    params = local_experts * shape.params
    fixed = training.layers * params * (shape.element_bytes + training.gradient_bytes)
    fixed += params * shape.element_bytes
    one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    here = Rows(sent=none, received=one, kept_sent=none, kept_here=one, moved_sent=none, moved_here=none)
    there = Rows(sent=one, received=none, kept_sent=one, kept_here=none, moved_sent=none, moved_here=none)
    per_row, per_pair = (_dearest(shape, rows, run, training, alone, keeps) for rows in (here, there))
    replica = -(-replica_bytes(shape, run) // per_row)
    return (budget - fixed - pairs * per_pair) // per_row, replica


def _dearest(
    shape: ExpertShape, rows: Rows, run: Execution, training: Training, alone: bool, keeps: bool
) -> int:
    parts = rows_cost(shape, rows, run, alone=alone, keeps=keeps)
    kept, forward, backward = (
        sum(int(size[0]) for size in part.values()) for part in (parts.kept, parts.forward, parts.backward)
    )
    return kept * training.waiting + max(forward, backward)
