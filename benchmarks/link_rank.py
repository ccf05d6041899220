"""One rank of benchmarks/link.py: the systems' layer calls in turn, on the wall's clock.

Shape letters: T tokens of a rank, K experts per token, H hidden, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from layer_variants import Case, choose_experts
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.distributed import Comm
from lrmoe.experiments.compare.rig import storage_of
from lrmoe.experiments.stage.inputs import Routed, Rows, draw_weights
from lrmoe.experiments.systems.fitted import fitted
from lrmoe.experiments.systems.registry import get_system
from lrmoe.layer import MoELayer
from lrmoe.layer.budget import CallBudget
from lrmoe.planning import ExpertShape, get_policy
from lrmoe.telemetry import CallRecord

FIXED, ULTRAEP, OURS = "megatron", "ultraep", "lrmoe"
_DTYPE = torch.float32


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Who runs: a system of the comparisons, at a drop where it is ours.

    Attributes:
        name: of the lane. system: of the registry. max_drop: None is the system's own.
        balanced: every expert is chosen equally often.
        in_turn: no work is left for the time while results travel home.
    """

    name: str
    system: str
    max_drop: float | None = None
    balanced: bool = False
    in_turn: bool = False


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both ranks do.

    Attributes:
        case: sizes; its tokens are one rank's. lanes: who takes turns. draws: seeds of routing, one call each a round.
        rounds: after one that warms up. budget: `layer_budget` of every lane. slots: `replica_slots`.
    """

    case: Case
    lanes: Sequence[Lane]
    draws: Sequence[int]
    rounds: int
    budget: str | None
    slots: int = 2


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One call over both ranks.

    Attributes:
        lane, draw, round: which. wall_ms: from a barrier to the end of backward, of the slower rank.
        cpu_ms: thread CPU time of all phases, mean of the ranks. sent_bytes: of the rank that sent more.
        forward_peak, backward_peak: rows of the fuller rank over the mean of the whole call. replicas: copies.
        chunks: parts that the budget made of the call. stash_bytes: activations kept for backward, on the fuller rank.
        peak_bytes: most that booked buffers held, on the fuller rank.
    """

    lane: str
    draw: int
    round: int
    wall_ms: float
    cpu_ms: float
    sent_bytes: int
    forward_peak: float
    backward_peak: float
    replicas: int
    chunks: int
    stash_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """One rank's part of one call."""

    routed: Routed
    rows: Rows


def play(work: Work) -> list[dict[str, object]]:
    """All rounds on this rank: the calls as plain values, the same on both ranks."""
    case, rank = work.case, dist.get_rank()
    ranks = dist.get_world_size()
    layers = {lane.name: make_layer(work, lane, ranks) for lane in work.lanes}
    weights = draw_weights(case.experts // ranks, case.hidden, case.width, 0, rank)
    given = {
        (draw, balanced): _given(case, draw, rank, ranks, balanced)
        for draw in work.draws
        for balanced in {lane.balanced for lane in work.lanes}
    }
    found = []
    for number in range(work.rounds + 1):
        for place, draw in enumerate(work.draws):
            shift = (number + place) % len(work.lanes)
            for lane in (*work.lanes[shift:], *work.lanes[:shift]):
                with patch.object(CallBudget, "overlaps", _nothing) if lane.in_turn else nullcontext():
                    timed = _call(
                        layers[lane.name], given[draw, lane.balanced], weights, (lane.name, draw, number)
                    )
                if number:  # the first round warms up
                    found.append(asdict(timed))
    return found


def _nothing(*_: object) -> bool:
    """No products wait until results travel."""
    return False


def make_layer(work: Work, lane: Lane, ranks: int) -> MoELayer:
    """A lane's layer: the system's own rules under the common budget and slots, as comparisons run it."""
    case, system = work.case, get_system(lane.system)
    config = system.config(LRMoEConfig(warmup_steps=0, replica_slots=work.slots, layer_budget=work.budget))
    if lane.max_drop is not None:
        config = config.replace(max_drop=lane.max_drop)
    group = dist.group.WORLD
    own = lane.system == OURS  # plans and stores as users have it; the others are fitted to these sizes
    expert = ExpertShape(hidden=case.hidden, width=case.width, element_bytes=_DTYPE.itemsize)
    pairs = case.tokens * case.top_k
    policy = fitted(get_policy(config.policy), expert, ranks=ranks, slots=config.replica_slots, pairs=pairs)
    store = storage_of(system, lambda: True, _DTYPE, Comm(group), case.hidden, case.width)
    return MoELayer(
        num_experts=case.experts,
        hidden_size=case.hidden,
        intermediate_size=case.width,
        config=config,
        group=group,
        policy=None if own else policy,
        storage=None if own else store,
    )


def _given(case: Case, draw: int, rank: int, ranks: int, balanced: bool) -> Given:
    taste = torch.Generator().manual_seed(draw)  # all ranks' tokens share it
    popularity = case.sigma * torch.randn(case.experts, generator=taste)
    alpha_TK, ids_TK = choose_experts(
        popularity, case.tokens, case.top_k, torch.Generator().manual_seed(1 + draw * ranks + rank)
    )
    routed = Routed(ids_TK=ids_TK, alpha_TK=alpha_TK, grad_norm_T=torch.ones(case.tokens))
    if balanced:
        routed = routed.balanced(case.experts, draw * ranks + rank)
    return Given(routed=routed, rows=Rows.draw(case.tokens, case.hidden, draw, rank))


def _call(
    layer: MoELayer, given: Given, weights: tuple[Tensor, Tensor], place: tuple[str, int, int]
) -> Timed:
    """Forward and backward once, both ranks from the same moment on."""
    x_TH = given.rows.x_TH.detach().requires_grad_()
    alpha_TK = given.routed.alpha_TK.detach().requires_grad_()
    dist.barrier()
    begin = time.perf_counter()
    out_TH = layer(x_TH, given.routed.ids_TK, alpha_TK, *weights, training=True)
    out_TH.backward(given.rows.direction_TH)
    wall_ms = (time.perf_counter() - begin) * 1e3
    layer.clock.advance()
    for weight in weights:
        weight.grad = None
    (record,) = layer.telemetry.drain()
    return _over_ranks(record, wall_ms, place)


def _over_ranks(record: CallRecord, wall_ms: float, place: tuple[str, int, int]) -> Timed:
    stash = record.mem.get("stash", 0)
    mine = torch.tensor(
        [wall_ms, sum(record.ms.values()), record.wire_bytes, record.peak_measured, stash],
        dtype=torch.float64,
    )
    both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(both, mine)
    most, mean = torch.stack(both).amax(0).tolist(), torch.stack(both).mean(0).tolist()
    lane, draw, number = place
    return Timed(
        lane=lane,
        draw=draw,
        round=number,
        wall_ms=most[0],
        cpu_ms=mean[1],
        sent_bytes=int(most[2]),
        forward_peak=record.forward_peak,
        backward_peak=record.backward_peak,
        replicas=record.replicas,
        chunks=record.chunks,
        stash_bytes=int(most[4]),
        peak_bytes=int(most[3]),
    )


def timed_of(lines: Sequence[Mapping[str, Any]]) -> list[Timed]:
    """What `play` gave, read back."""
    return [Timed(**line) for line in lines]
