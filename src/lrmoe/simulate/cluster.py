"""Runs systems over sequences of calls: plans every call as a system would have, and measures the plans.

A history-based system sees the counts of earlier calls and its last plan, never the call it plans. Systems that
remember nothing skip the calls that are not measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lrmoe.errors import InfeasibleError
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import History, IntArray, Problem, Topology
from lrmoe.simulate.measure import CallFigures, measure
from lrmoe.simulate.scenario import Allowance, Layer, System

HISTORY = 16  # past calls that a system may look at
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """Consecutive calls of one layer.

    Attributes:
        name: for messages. counts: int64 (R, E) arrays, in order. skip: leading calls that only make history.
    """

    name: str
    counts: Sequence[IntArray]
    skip: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """One system on all sequences.

    Attributes:
        system: which. calls: figures of the measured calls that could be planned.
        infeasible: messages of the calls that could not, under the budget.
    """

    system: System
    calls: tuple[CallFigures, ...]
    infeasible: tuple[str, ...] = ()


def simulate(
    systems: Iterable[System],
    sequences: Sequence[Calls],
    topology: Topology,
    layer: Layer,
    allowance: Allowance,
    *,
    pressure: int = 1,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Plan all calls under every system.

    Args:
        systems: what plans. sequences: what is planned. topology: ranks, experts and nodes.
        layer: sizes and devices. allowance: what each system is given.
        pressure: every count is multiplied by it (a larger batch of the same routing).
        progress: told after every system and sequence.

    Raises:
        InfeasibleError: the budget does not hold the home experts. PlanError: a policy broke the rules.
    """
    allowance.budget_rows(layer, topology)
    outcomes = []
    for system in systems:
        calls: list[CallFigures] = []
        infeasible: list[str] = []
        for sequence in sequences:
            for problem, plan, ms in plans(system, sequence, topology, layer, allowance, pressure):
                if isinstance(plan, InfeasibleError):
                    infeasible.append(str(plan))
                else:
                    plan.check(problem)
                    calls.append(measure(plan, layer, ms))
            if progress is not None:
                progress(f"{system.name}, {topology.ranks} ranks, {sequence.name}")
        outcomes.append(Outcome(system=system, calls=tuple(calls), infeasible=tuple(infeasible)))
    return outcomes


def plans(
    system: System,
    sequence: Calls,
    topology: Topology,
    layer: Layer,
    allowance: Allowance,
    pressure: int = 1,
) -> Iterator[tuple[Problem, LayerPlan | InfeasibleError, float]]:
    """The measured calls of a sequence: the problem, its plan (or why there is none), CPU milliseconds of planning."""
    past: deque[IntArray] = deque(maxlen=HISTORY)
    previous: LayerPlan | None = None
    for step, counts_RE in enumerate(sequence.counts):
        counts_RE = counts_RE * pressure
        if step >= sequence.skip or system.remembers:
            history = History(counts=tuple(past), previous=previous, step=step)
            problem = make_problem(counts_RE, topology, layer, allowance, history)
            begin = time.thread_time()
            try:
                plan: LayerPlan | InfeasibleError = system.policy(problem)
            except InfeasibleError as error:
                plan = error
            ms = (time.thread_time() - begin) * 1e3
            if step >= sequence.skip:
                yield problem, plan, ms
            previous = plan if isinstance(plan, LayerPlan) else previous
        past.append(counts_RE)


def make_problem(
    counts_RE: IntArray, topology: Topology, layer: Layer, allowance: Allowance, history: History | None
) -> Problem:
    """The question put to every system, the same for all."""
    foreign = topology.experts - topology.experts_per_rank
    return Problem(
        counts_RE=counts_RE,
        topology=topology,
        slots=min(allowance.slots, foreign),
        max_drop=allowance.max_drop,
        drop=allowance.drop,
        budget_rows=allowance.budget_rows(layer, topology),
        replica_rows=-(-layer.expert_bytes // layer.row_bytes) if allowance.budget_bytes is not None else 0,
        history=history,
    )


def mean_rows(sequences: Sequence[Calls], ranks: int) -> float:
    """Mean rows of a rank in a measured call with nothing dropped."""
    totals = [int(c.sum()) for sequence in sequences for c in sequence.counts[sequence.skip :]]
    return float(np.mean(totals)) / ranks if totals else 0.0
