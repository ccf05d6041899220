"""How an executed system's layers are made: its own policy, budget and storage, in the place of the trainer's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lrmoe.distributed import Comm
from lrmoe.experiments.compare.config import Experiment
from lrmoe.experiments.systems.fitted import fitted
from lrmoe.experiments.systems.registry import System
from lrmoe.experiments.systems.stores import Ends, FromShards, KeptCopies, Residents
from lrmoe.layer import MoELayer, StepClock
from lrmoe.layer.weights import Storage
from lrmoe.planning import ExpertShape
from lrmoe.planning.policies import get_policy
from lrmoe.planning.shards import expert_cuts
from lrmoe.telemetry import Telemetry

_MOMENTS = 8  # bytes of AdamW's two fp32 moments of a parameter
_MASTER = 4  # of the fp32 copy beside parameters of lower precision


def builder(
    system: System, experiment: Experiment, ends: Ends, pairs: int
) -> Callable[[MoELayer, StepClock, Telemetry], MoELayer]:
    """A function that makes the system's layer beside one of the trainer's.

    Args:
        ends: whether the micro-batch in execution is the last of its step.
        pairs: (token, expert) pairs of a rank and call.
    """
    config = experiment.train_config(system).lrmoe
    dtype: torch.dtype = getattr(torch, experiment.train.train.dtype)

    def build(beside: MoELayer, clock: StepClock, telemetry: Telemetry) -> MoELayer:
        shape = beside.shape
        expert = ExpertShape(hidden=shape.hidden, width=shape.width, element_bytes=dtype.itemsize)
        policy = get_policy(config.policy)
        slots = min(config.replica_slots, shape.experts - shape.local_experts)
        return MoELayer(
            num_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size=shape.width,
            activation=beside.activation,
            config=config,
            group=beside.comm.group,
            layer=beside.layer,
            clock=clock,
            telemetry=telemetry,
            policy=fitted(policy, expert, ranks=beside.comm.size, slots=slots, pairs=pairs),
            storage=storage_of(system, ends, dtype, beside.comm, shape.hidden, shape.width),
        )

    return build


def state_bytes(dtype: torch.dtype) -> int:
    """Bytes of optimizer state for each parameter of that dtype."""
    return _MOMENTS + (_MASTER if dtype.itemsize < torch.float32.itemsize else 0)


def storage_of(
    system: System, ends: Ends, dtype: torch.dtype, comm: Comm, hidden: int, width: int
) -> Storage:
    """Where an executed system's layers have their weights from. They are all given the home experts.

    Args:
        ends: whether the micro-batch in execution is the last of its step.
        dtype: of weights. comm: the ranks. hidden, width: of an expert.
    """
    resident = system.info.slots == "resident"
    if system.storage == "sharded":
        return FromShards(comm, expert_cuts(hidden, width, comm.size), ends, per_step=resident)
    if resident or system.info.slots == "none":
        return Residents(ends, state_bytes(dtype))
    return KeptCopies()
