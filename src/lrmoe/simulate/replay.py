"""Replays one layer call under several systems: every rank's real work, on one device.

Planning, sorting, packing, the experts and unpacking of both passes, scores and the kept set run and are timed at the
size of the call; the exchange is bytes over a stated link. Systems take turns rank by rank, so that what the machine
does meanwhile meets all of them.

Shape letters: R ranks, E experts, N pairs of a source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError, InfeasibleError
from lrmoe.layer.buffers import scratch
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies import get_policy
from lrmoe.planning.problem import Problem, Topology
from lrmoe.planning.seats import Seats, seats_of
from lrmoe.simulate.cluster import Calls, plans
from lrmoe.simulate.measure import extra_slots
from lrmoe.simulate.replay_data import Data, Source, make_data
from lrmoe.simulate.replay_memory import Held, allocations
from lrmoe.simulate.replay_progress import Progress, Told
from lrmoe.simulate.replay_rank import Rank
from lrmoe.simulate.replay_routes import Backward, Wire, order_by_expert, reroute, sending_order
from lrmoe.simulate.replay_select import home_parts, select
from lrmoe.simulate.replay_times import Times, warm_ups
from lrmoe.simulate.scenario import Allowance, Layer, make_system
from lrmoe.simulate.summary import BASELINE

OURS = "lrmoe"
HALF = "drop0.5"  # lrmoe at that drop, beside the others
_MERGING = threading.Lock()  # of what the ranks that run at the same time add to
ACTIVATIONS = ("recompute", "stash")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What `lrmoe replay` is asked.

    Attributes:
        systems: names; megatron must be among them. calls: counts; the last call is replayed, the others are history.
        topology: ranks, experts, homes. layer: sizes of an expert in the compute dtype, experts per token.
        allowance: slots and drop of every system. config: estimator, score and seed of what prunes.
        dtype: a name of DTYPES. device: where everything runs. repeats: runs of megatron and lrmoe; others run once.
        activations: of every system: "recompute" keeps nothing at the experts and sends inputs again in backward,
            "stash" keeps rows and first projections.
        workers: ranks that run at the same time, each in a thread of its own; 1 on CUDA.
        link_bytes_per_s: of every rank; None: by the rule of replay_link.

    Raises:
        ConfigError: megatron is missing, unknown activations, repeats below 1, workers out of range.
    """

    systems: Sequence[str]
    calls: Calls
    topology: Topology
    layer: Layer
    allowance: Allowance
    config: LRMoEConfig = field(default_factory=LRMoEConfig)
    dtype: str = "bf16"
    device: torch.device
    activations: str = ACTIVATIONS[0]
    repeats: int = 1
    link_bytes_per_s: float | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        if BASELINE not in self.systems:
            raise ConfigError(f"systems={list(self.systems)}: needs {BASELINE}, which all are compared with")
        if self.activations not in ACTIVATIONS:
            raise ConfigError(f"activations={self.activations!r}: must be one of {', '.join(ACTIVATIONS)}")
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats}: must be at least 1")
        most = self.topology.ranks if self.device.type == "cpu" else 1
        if not 1 <= self.workers <= most:
            raise ConfigError(f"workers={self.workers}: must lie in [1, {most}] on {self.device.type}")


@dataclass(kw_only=True, eq=False)
class Lane:
    """One system in a replay.

    Attributes:
        name: as it is listed. plan: of the call; seats: its. repeats: runs of every rank. times: measured so far.
        stash: whether rows and first projections stay for backward. forward: its pairs; kept: its backward.
        most: bytes of the fullest rank: "<pass>_subtotal" of experts, replicas and token buffers, "<pass>_memory" of
            everything that was allocated.
        parts: pass -> part -> bytes of its subtotal.
        energy_dropped: share of squared scores that its backward leaves out.
    """

    name: str
    plan: LayerPlan
    seats: Seats
    repeats: int
    times: Times
    stash: bool
    forward: Wire
    kept: Backward
    most: dict[str, int] = field(default_factory=dict)
    parts: dict[str, Mapping[str, int]] = field(default_factory=dict)
    energy_dropped: float = 0.0

    def fullest(self, side: str, held: Held, allocated: int) -> None:
        """Take one rank's bytes into the largest of all ranks."""
        with _MERGING:
            if held.most > self.most.get(f"{side}_subtotal", 0):
                self.most[f"{side}_subtotal"], self.parts[side] = held.most, held.parts
            self.most[f"{side}_memory"] = max(self.most.get(f"{side}_memory", 0), allocated)


def replay(question: Question, progress: Progress | None = None) -> list[Lane]:
    """Run every system.

    Args:
        question: what is asked. progress: told a text, units done and units in all.

    Returns:
        a lane per system, in the order given, lrmoe at drop 0.5 last (where lrmoe is among them).

    Raises:
        ConfigError: a plan that leaves pairs out of forward. InfeasibleError, PlanError: from a policy.
    """
    device = question.device
    data = make_data(
        question.calls.counts[-1], question.layer.shape, question.layer.top_k, dtype=DTYPES[question.dtype],
        device=device, seed=question.config.seed,
    )  # fmt: skip
    told = Told(progress, question.topology.ranks, [_repeats(question, name) for name in _names(question)])
    with torch.no_grad(), _one_thread_each(device):
        order_R = [order_by_expert(s.ids_TK, data.counts_RE.shape[1], int(n)) for s, n in _sources(data)]
        norm_R = _norms(data, question, order_R, told)
        lanes = [_lane(data, question, planned, order_R, norm_R, told) for planned in _plans(question)]
        if warm_ups(device):
            _each_rank(question, partial(_run_unheard, data, lanes), ranks=1)
        _each_rank(question, partial(_take_turns, data, lanes, told))
    return lanes


def _sources(data: Data) -> Iterator[tuple[Source, int]]:
    """Every source and how many pairs it has."""
    return zip(data.sources, data.counts_RE.sum(axis=1).tolist(), strict=True)


def _take_turns(data: Data, lanes: Sequence[Lane], told: Told, rank: int) -> None:
    for repeat in range(max(lane.repeats for lane in lanes)):
        for lane in lanes:
            if repeat < lane.repeats:
                told.one(f"rank {rank}, {lane.name}")
                _run_rank(data, lane, rank, first=repeat == 0)


def _run_unheard(data: Data, lanes: Sequence[Lane], rank: int) -> None:
    """One run of every system that leaves nothing behind."""
    for lane in lanes:
        _run_rank(data, replace(lane, times=Times(data.device), most={}, parts={}), rank, first=False)


def _each_rank(question: Question, work: Callable[[int], None], ranks: int | None = None) -> None:
    """Do the work of every rank (or the first `ranks`), `workers` ranks at a time, each in a thread of its own."""

    def one(rank: int) -> None:
        with torch.no_grad(), scratch.fresh():  # belong to a thread
            work(rank)

    with ThreadPoolExecutor(question.workers) as pool:
        for done in [pool.submit(one, rank) for rank in range(ranks or question.topology.ranks)]:
            done.result()


@contextmanager
def _one_thread_each(device: torch.device) -> Iterator[None]:
    """On a CPU a rank's work is one thread's, whose CPU time is its time."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _names(question: Question) -> list[str]:
    """Of every lane."""
    return [*question.systems, *([HALF] if OURS in question.systems else [])]


def _repeats(question: Question, name: str) -> int:
    """Timed runs of a lane."""
    return question.repeats if name in (BASELINE, OURS) else 1


def _plans(question: Question) -> list[tuple[str, LayerPlan, float]]:
    """Name, plan and milliseconds of planning of every lane."""
    asked = [(name, name, question.allowance) for name in question.systems]
    if OURS in question.systems:
        half = Allowance(slots=question.allowance.slots, max_drop=0.5, drop=question.allowance.drop)
        asked.append((HALF, OURS, half))
    found = []
    for listed, name, allowance in asked:
        system = make_system(name, question.allowance.slots)
        ((problem, plan, ms),) = plans(system, question.calls, question.topology, question.layer, allowance)
        if isinstance(plan, InfeasibleError):
            raise plan
        plan.check(problem)
        if plan.overflow_RE is not None and plan.overflow_RE.any():
            raise ConfigError(f"systems={name!r}: leaves pairs out of forward, which a replay does not run")
        found.append((listed, plan, ms))
    return found


def _norms(data: Data, question: Question, order_R: Sequence[Tensor], told: Told) -> list[Tensor]:
    """Norm of every pair's projection input, for each source in (expert, token) order; also warms the machine up."""
    topology = question.topology
    plan = get_policy(BASELINE)(Problem(counts_RE=data.counts_RE, topology=topology))
    seats, times = seats_of(plan), Times(data.device)
    wire = Wire(counts_RV=seats.assign_RQ, starts_R=seats.starts_R, pair_R=order_R)
    norm_R = [torch.empty(len(pair), device=data.device) for pair in order_R]

    def run(home: int) -> None:
        told.one(f"warm-up, rank {home}")
        one = Rank(data, seats, wire, home, topology.experts_per_rank, times)
        one.forward(stash=False, norms=True)
        if one.norm_M is None:
            return
        received = wire.layout(home, data.device).to_received(one.norm_M)
        parts = home_parts(data.counts_RE, home, norm_R)
        for part, norm in zip(parts, received.split([len(p) for p in parts]), strict=True):
            part.copy_(norm)

    _each_rank(question, run)
    return norm_R


def _lane(
    data: Data,
    question: Question,
    planned: tuple[str, LayerPlan, float],
    order_R: Sequence[Tensor],
    norm_R: Sequence[Tensor],
    told: Told,
) -> Lane:
    """Sort, score, select and re-route for all ranks, timed."""
    name, plan, plan_ms = planned
    seats, heard = seats_of(plan, homes=False), Times(data.device)
    repeats, stash = _repeats(question, name), question.activations == "stash"
    for turn in range(-warm_ups(data.device), repeats):
        times = heard if turn >= 0 else Times(data.device)
        if turn >= 0:
            told.one(f"selection, {name}")
        place_R = _send_order(data, seats, plan_ms, order_R, times)
        weight_R, energy = None, 0.0
        if not plan.exact:
            selection = select(data, plan, question.config, order_R, norm_R, times)
            weight_R, energy = selection.weight_R, selection.energy_dropped
        kept = reroute(data, plan, seats, order_R, place_R, weight_R, times, stash=stash)
    pair_R = [order if place is None else order[place] for order, place in zip(order_R, place_R, strict=True)]
    forward = Wire(counts_RV=seats.assign_RQ, starts_R=seats.starts_R, pair_R=pair_R)
    return Lane(
        name=name, plan=plan, seats=seats, repeats=repeats, times=heard, stash=stash, forward=forward, kept=kept,
        energy_dropped=energy,
    )  # fmt: skip


def _send_order(
    data: Data, seats: Seats, plan_ms: float, order_R: Sequence[Tensor], times: Times
) -> list[Tensor | None]:
    """Planning, sorting by expert and ordering by seat at every source, timed: its pairs' order of sending."""
    found = []
    for rank, (source, pairs) in enumerate(_sources(data)):
        times.add("forward", rank, "plan", plan_ms)
        with times.phase("forward", rank, "sort"):
            order_by_expert(source.ids_TK, seats.topology.experts, pairs)
        with times.phase("forward", rank, "order"):
            place = sending_order(seats, rank, data.device)
            if place is not None:
                order_R[rank][place]
        found.append(place)
    return found


def _run_rank(data: Data, lane: Lane, rank: int, *, first: bool) -> None:
    """Both passes of one rank; in the first run with what it had allocated, scratch included."""
    slots = lane.plan.topology.experts_per_rank + int(extra_slots(lane.plan)[rank])
    with allocations(data.device) as counted:
        one = Rank(data, lane.seats, lane.forward, rank, slots, lane.times)
        one.forward(stash=lane.stash, norms=not lane.plan.exact)
        if first:
            lane.fullest("forward", one.held, counted.most)
        counted.restart()
        one.backward(lane.kept)
        if first:
            lane.fullest("backward", one.held, counted.most)
        one.add_home(_returning(lane.plan, rank))


def _returning(plan: LayerPlan, rank: int) -> int:
    """Expert gradients that foreign seats send home to a rank."""
    if not plan.moved.return_R.any():
        return 0
    home_J = plan.topology.home_E[plan.instance_expert_J]
    return int((plan.foreign_J & (home_J == rank)).sum())
