"""Which pair travels where in a replayed call: forward, and in backward the kept pairs.

Rows lie as the runtime lays them: a source sends seat after seat (in backward stand after stand), tokens in order; a
rank receives source after source and computes in the order (seat, source, token). Orders, moves and positions are the
layer's own; what its ranks would gather from each other is handed over.

Shape letters: R ranks (and sources), E experts, Q seats, V seats or stands of a pass (see planning.cells), N pairs of a
source by expert, P kept pairs of a source, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lrmoe.layer.call import Call
from lrmoe.layer.choice import in_order
from lrmoe.layer.reroute import Route
from lrmoe.layer.reroute import reroute as layer_reroute
from lrmoe.layer.routing import Layout, sort_pairs
from lrmoe.ops import gather_rows
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats
from lrmoe.simulate.replay_data import Data
from lrmoe.simulate.replay_times import Times


@dataclass(frozen=True, kw_only=True, eq=False)
class Wire:
    """Pairs that every source sends to every seat or stand.

    Attributes:
        counts_RV: int64 (R, V). starts_R: int64 (R + 1,), first seat or stand of every rank.
        pair_R: for each source its flat pair ids in the order of sending.
    """

    counts_RV: IntArray
    starts_R: IntArray
    pair_R: Sequence[Tensor]

    def layout(self, rank: int, device: torch.device) -> Layout:
        """As the runtime lays the pairs of a rank."""
        return Layout.build(self.counts_RV, self.starts_R, rank, device)

    def part(self, rank: int, values_R: Sequence[Tensor]) -> list[Tensor]:
        """Of values in the order of sending, each source's part for a rank."""
        first, last = (int(self.starts_R[r]) for r in (rank, rank + 1))
        begin_R = self.counts_RV[:, :first].sum(axis=1)
        end_R = begin_R + self.counts_RV[:, first:last].sum(axis=1)
        return [v[int(b) : int(e)] for v, b, e in zip(values_R, begin_R, end_R, strict=True)]

    def receive(self, rank: int, table_R: Sequence[Tensor], slots: int) -> Tensor:
        """Every source's rows of its token table (T, H) for a rank, in received order (M, H): what an exchange does."""
        parts = self.part(rank, self.pair_R)
        out = table_R[0].new_empty((sum(len(part) for part in parts), table_R[0].shape[1]))
        end = 0
        for pair, table_TH in zip(parts, table_R, strict=True):
            begin, end = end, end + len(pair)
            gather_rows(table_TH, pair // slots, out=out[begin:end])
        return out


@dataclass(frozen=True, kw_only=True, eq=False)
class Backward:
    """The kept pairs of a call.

    Attributes:
        wire: their stands, (rank, stay before carry, seat). scale_R: for each source their routing weights times 1/pi
            in the dtype of sums, (P,). position_R: int32 (P,) each, where forward left a pair's rows; None where they
            lie as forward laid them, or nothing was kept.
        again: of them the pairs that carry their input and are computed again; None where no pair does.
        all_carried: whether every pair carries its input. moved: pairs that run elsewhere than forward did.
    """

    wire: Wire
    scale_R: Sequence[Tensor]
    position_R: Sequence[Tensor] | None
    again: Wire | None
    all_carried: bool
    moved: int


def order_by_expert(ids_TK: Tensor, experts: int, pairs: int) -> Tensor:
    """A source's flat pair ids in the order (expert, token), int64 (N,)."""
    return sort_pairs(ids_TK, experts)[0][:pairs]


def sending_order(seats: Seats, rank: int, device: torch.device) -> Tensor | None:
    """Positions, among a source's pairs by expert, in the order of sending; None where both are the same."""
    if not seats.spread:
        return None
    return torch.sort(in_order(seats, rank, device), stable=True).indices


def reroute(
    data: Data,
    plan: LayerPlan,
    seats: Seats,
    order_R: Sequence[Tensor],
    place_R: Sequence[Tensor | None],
    weight_R: Sequence[Tensor] | None,
    times: Times,
    *,
    stash: bool,
) -> Backward:
    """Where every source's kept pairs run in backward.

    Args:
        order_R: each source's pairs by expert; place_R: its order of sending in forward.
        weight_R: for each source fp32 (N,) 1/pi, 0 of what is left out; None: all are kept.
        times: phase "reroute" of every rank goes here, and the order of what it sends to "pack".
        stash: whether rows and first projections stayed at their seats.
    """
    table = _kept_table(seats, place_R, weight_R)
    routes, pair_R, scale_R = [], [], []
    for rank, source in enumerate(data.sources):
        weight_N = None if weight_R is None else weight_R[rank]
        call = _call(plan, seats, rank, table, stash=stash)
        with times.phase("backward", rank, "reroute"):
            route = layer_reroute(call, place_R[rank], weight_N, data.device)
        with times.phase("backward", rank, "order"):
            alpha_N = source.alpha_TK.reshape(-1)[order_R[rank]].to(data.scale_dtype)
            scale_N = alpha_N if weight_N is None else alpha_N * weight_N
            at = slice(None) if route.source_P is None else route.source_P
            pair_R.append(order_R[rank][at])
            scale_R.append(scale_N[at])
        routes.append(route)
    first = routes[0]
    wire = Wire(counts_RV=first.cells_RV, starts_R=first.starts_R, pair_R=pair_R)
    positions = [route.position_P for route in routes if route.position_P is not None]
    return Backward(
        wire=wire,
        scale_R=scale_R,
        position_R=positions or None,
        again=_again(first, wire),
        all_carried=first.all_carried,
        moved=int(np.maximum(table.sum(axis=0) - seats.backward_Q, 0).sum()),
    )


def _kept_table(
    seats: Seats, place_R: Sequence[Tensor | None], weight_R: Sequence[Tensor] | None
) -> IntArray:
    """Kept pairs of every source at its forward seats, int64 (R, Q)."""
    if weight_R is None:
        return seats.assign_RQ
    found = np.zeros_like(seats.assign_RQ)
    for rank, (place_N, weight_N) in enumerate(zip(place_R, weight_R, strict=True)):
        kept = (weight_N if place_N is None else weight_N[place_N]) > 0
        total = np.concatenate(([0], kept.cumsum(0).cpu().numpy()))
        found[rank] = np.diff(total[np.cumsum(seats.assign_RQ[rank])], prepend=0)
    return found


def _call(plan: LayerPlan, seats: Seats, rank: int, table_RQ: IntArray, *, stash: bool) -> Call:
    """What the layer's re-routing reads of a call; the table that its ranks gather is handed over."""

    def gathered(mine_Q: Tensor) -> Tensor:
        return torch.from_numpy(table_RQ).to(mine_Q.device)

    def nothing(*_: Any) -> int:
        return 0

    comm = SimpleNamespace(rank=rank, size=seats.topology.ranks, sent_bytes=nothing, all_gather_ints=gathered)
    opened = SimpleNamespace(sent=nothing)
    return cast(
        "Call",
        SimpleNamespace(
            plan=plan, seats=seats, comm=comm, keeps_rows=stash, selects_early=False, open_call=opened
        ),
    )


def _again(route: Route, wire: Wire) -> Wire | None:
    """The pairs that carry their input, at the same stands."""
    if not route.carried or route.all_carried:
        return wire if route.all_carried else None
    middle_R = (wire.starts_R[:-1] + wire.starts_R[1:]) // 2
    carry_V = np.arange(wire.counts_RV.shape[1]) >= np.repeat(middle_R, np.diff(wire.starts_R))
    pair_R = [
        pair[torch.from_numpy(np.flatnonzero(np.repeat(carry_V, counts_V))).to(pair.device)]
        for pair, counts_V in zip(wire.pair_R, wire.counts_RV, strict=True)
    ]
    return Wire(counts_RV=wire.counts_RV * carry_V, starts_R=wire.starts_R, pair_R=pair_R)
