"""Who does the steps of a comparison: a trainer of its own for each system that prunes, one for all exact ones.

    Own      system's Trainer.step() -> its lane
    Shared   fixed ownership's Trainer.step() -> its lane (where it is compared)
                 after each backward: every other exact system executes the recorded calls, in rotating order
             their records -> their lanes, with the shared loss

A step's loss and records are the same on all ranks, so all agree on who has arrived.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import IO, Any, Protocol

import torch
import torch.distributed as dist

from lrmoe.experiments.compare.config import Experiment
from lrmoe.experiments.compare.cost import step_cost
from lrmoe.experiments.compare.executor import Executor
from lrmoe.experiments.compare.lane import Lane
from lrmoe.experiments.compare.rig import builder, state_bytes
from lrmoe.experiments.systems.fairness import EXECUTES, SHARED, TRAINS, Sizes
from lrmoe.experiments.systems.registry import System, get_system
from lrmoe.experiments.trajectories.recorder import Recorder
from lrmoe.integrations.transformers import watch_layers
from lrmoe.layer import MoELayer
from lrmoe.planning import ExpertShape
from lrmoe.report.data import BASELINE
from lrmoe.telemetry import CallRecord
from lrmoe.training.data import Corpus
from lrmoe.training.loop import Trainer
from lrmoe.training.metrics import StepMetrics
from lrmoe.training.records import gather_records
from lrmoe.training.traces import TraceLog


class Racer(Protocol):
    """Does steps for one or several lanes.

    Attributes:
        lanes: of the systems that are compared. unlisted: of fixed ownership where it only trains for others.
        trainer: who trains.
    """

    lanes: list[Lane]
    unlisted: list[Lane]
    trainer: Trainer

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        ...

    def step(self, out: IO[str] | None, trace: TraceLog | None) -> None:
        """One optimizer step; every rank calls it. Rank 0 writes lines to `out` and the counts to `trace`."""
        ...


def make_racers(experiment: Experiment, group: dist.ProcessGroup | None, corpus: Corpus) -> list[Racer]:
    """The racers of a comparison, in the order of their first systems."""
    executed = experiment.executed
    racers: list[Racer] = []
    for system in experiment.systems:
        if not executed or not (system in executed or system.name == BASELINE):
            racers.append(Own(experiment, system, group, corpus))
        elif not any(isinstance(racer, Shared) for racer in racers):
            racers.append(Shared(experiment, executed, group, corpus))
    return racers


def lanes_of(racers: Sequence[Racer], experiment: Experiment) -> list[Lane]:
    """All lanes in the order in which the systems were named."""
    by_name = {lane.system.name: lane for racer in racers for lane in racer.lanes}
    return [by_name[name] for name in experiment.compare.systems]


def turns(racers: Sequence[Any], round_: int) -> list[Any]:
    """The order of a round: each leads in turn, so that none always finds caches warm or cold."""
    first = round_ % len(racers)
    return [*racers[first:], *racers[:first]]


class Own:
    """A system's trainer on this rank, and its lane, which is the same on all ranks."""

    def __init__(
        self, experiment: Experiment, system: System, group: dist.ProcessGroup | None, corpus: Corpus
    ) -> None:
        self.trainer = Trainer(experiment.train_config(system), group, corpus=corpus)
        self.lanes = [_lane(experiment, system, TRAINS, self.trainer)]
        self.unlisted: list[Lane] = []

    @property
    def running(self) -> bool:
        """Whether its lane goes on."""
        return self.lanes[0].running

    def step(self, out: IO[str] | None, trace: TraceLog | None) -> None:
        """One optimizer step."""
        metrics = self.trainer.step()
        _add(self.lanes[0], metrics, metrics.records_by_rank, out)
        if trace is not None:
            trace.add(metrics.records, system=self.lanes[0].system.name)


class Shared:
    """The exact systems: fixed ownership trains, the others execute.

    Args:
        executed: the systems that execute; fixed ownership has a lane only where it is compared itself.
    """

    def __init__(
        self,
        experiment: Experiment,
        executed: Sequence[System],
        group: dist.ProcessGroup | None,
        corpus: Corpus,
    ) -> None:
        base = get_system(BASELINE)
        self.trainer = Trainer(experiment.train_config(base), group, corpus=corpus)
        self._group = group
        self._base = _lane(experiment, base, SHARED, self.trainer)
        self._executed = [_lane(experiment, system, EXECUTES, self.trainer) for system in executed]
        self.lanes = list(self._executed)
        self.unlisted = [self._base]
        if BASELINE in experiment.compare.systems:
            self.lanes, self.unlisted = [self._base, *self._executed], []
        pairs = _tokens(experiment) * self.trainer.model.config.num_experts_per_tok
        self._executors = [
            Executor(system.name, builder(system, experiment, self._ends, pairs), group)
            for system in executed
        ]
        self._recorder = Recorder()
        self._batches = self._number = 0
        watch_layers(self.trainer.model, self._recorder)
        self.trainer.after_backward = self._execute

    @property
    def running(self) -> bool:
        """Whether the shared trajectory goes on."""
        return self._base.running

    def step(self, out: IO[str] | None, trace: TraceLog | None) -> None:
        """One optimizer step of the trainer, and every executed system's calls in it."""
        metrics = self.trainer.step()
        _add(self._base, metrics, metrics.records_by_rank, None if self.unlisted else out)
        for executor, lane in zip(self._executors, self._executed, strict=True):
            if executor.infeasible:
                lane.extra = {"infeasible": executor.infeasible}
                continue
            records = gather_records(executor.end_step(), self._group, self.trainer.device)
            _add(lane, metrics, records, out)
            lane.extra = {"largest_difference_eps": executor.worst.eps}
        if trace is not None:
            trace.add(metrics.records, system=BASELINE)

    def _ends(self) -> bool:
        return self._number == self.trainer.config.train.accumulate - 1

    def _execute(self, number: int) -> None:
        self._number = number
        calls = self._recorder.take()
        for executor in turns(self._executors, self._batches):
            if not executor.infeasible:
                executor.execute(calls)
        self._batches += 1


def _tokens(experiment: Experiment) -> int:
    """Tokens of a rank and call."""
    return experiment.train.train.batch_size * experiment.train.data.seq_len


def _lane(experiment: Experiment, system: System, role: str, trainer: Trainer) -> Lane:
    c = experiment.compare
    return Lane(
        system,
        experiment.train_config(system).lrmoe,
        targets=c.aims,
        smoothing_steps=c.smoothing_steps,
        max_steps=c.max_steps,
        role=role,
        sizes=_sizes(trainer),
    )


def _sizes(trainer: Trainer) -> Sizes:
    layers: list[MoELayer] = list(trainer.handle.layers.values())
    shape, dtype = layers[0].shape, getattr(torch, trainer.config.train.dtype)
    expert = ExpertShape(hidden=shape.hidden, width=shape.width, element_bytes=dtype.itemsize)
    return Sizes(expert=expert, layers=len(layers), state_bytes=state_bytes(dtype))


def _add(
    lane: Lane, metrics: StepMetrics, records_by_rank: list[list[CallRecord]], out: IO[str] | None
) -> None:
    line = lane.add(metrics.loss, metrics.tokens, step_cost(records_by_rank))
    if out is not None:
        out.write(json.dumps(line.as_dict(), allow_nan=False) + "\n")
        out.flush()
