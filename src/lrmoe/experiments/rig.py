"""How an executed system's layers are made: its own policy, budget and storage, in the place of the trainer's."""

from __future__ import annotations

from collections.abc import Callable

from lrmoe.experiments.config import Experiment
from lrmoe.experiments.systems import System
from lrmoe.layer import MoELayer, StepClock
from lrmoe.telemetry import Telemetry
from lrmoe.training.loop import Trainer


def builder(
    system: System, experiment: Experiment, trainer: Trainer
) -> Callable[[MoELayer, StepClock, Telemetry], MoELayer]:
    """A function that makes the system's layer beside one of the trainer's."""
    config = experiment.train_config(system).lrmoe

    def build(beside: MoELayer, clock: StepClock, telemetry: Telemetry) -> MoELayer:
        return MoELayer(
            num_experts=beside.shape.experts,
            hidden_size=beside.shape.hidden,
            intermediate_size=beside.shape.width,
            activation=beside.activation,
            config=config,
            group=beside.comm.group,
            layer=beside.layer,
            clock=clock,
            telemetry=telemetry,
        )

    return build
