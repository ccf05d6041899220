"""Which pair travels where in a replayed call: forward, and in backward the kept pairs that stay and that move.

Rows lie as the runtime lays them: a source sends seat after seat, tokens in order; a rank receives source after source
and computes in the order (seat, source, token).

Shape letters: R ranks (and sources), E experts, Q seats, N pairs of a source, M rows of a rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrmoe.layer.routing import expert_order, sort_pairs
from lrmoe.ops import gather_rows
from lrmoe.planning.cells import ranges
from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats
from lrmoe.planning.transfers import Transfers, transfers
from lrmoe.simulate.replay_times import Times


@dataclass(frozen=True, kw_only=True, eq=False)
class Wire:
    """Pairs that every source sends to every seat.

    Attributes:
        seats: of the plan. counts_RQ: int64 (R, Q). pair_R: for each source its flat pair ids, seat after seat.
        weight_R: fp32 factors (1/pi) beside them, or None for 1.
    """

    seats: Seats
    counts_RQ: IntArray
    pair_R: Sequence[Tensor]
    weight_R: Sequence[Tensor] | None = None

    def segments(self, rank: int) -> list[int]:
        """Rows of each seat of a rank."""
        rows: list[int] = self.counts_RQ[:, self.seats.of(rank)].sum(axis=0).tolist()
        return rows

    def place(self, rank: int, device: torch.device) -> Tensor:
        """For each row in (seat, source, token) order its place in received order, int64 (M,)."""
        return torch.from_numpy(expert_order(self.counts_RQ[:, self.seats.of(rank)])).to(device)

    def part(self, rank: int, values_R: Sequence[Tensor]) -> list[Tensor]:
        """Of values in the order of sending, each source's part for a rank."""
        at = self.seats.of(rank)
        begin_R = self.counts_RQ[:, : at.start].sum(axis=1)
        end_R = begin_R + self.counts_RQ[:, at].sum(axis=1)
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

    def receive_scale(self, rank: int, alpha_R: Sequence[Tensor]) -> Tensor:
        """Routing weight times 1/pi of the rows of a rank, fp32 (M,) in received order."""
        scale = torch.cat(
            [
                alpha.reshape(-1)[pair]
                for alpha, pair in zip(alpha_R, self.part(rank, self.pair_R), strict=True)
            ]
        )
        return scale if self.weight_R is None else scale * torch.cat(self.part(rank, self.weight_R))


@dataclass(frozen=True, kw_only=True, eq=False)
class Backward:
    """The kept pairs of a call. `stay` run where forward ran them, `moved` elsewhere.

    Attributes:
        kept_R: for each source whether a pair of its forward stays, bool (N,) in the order of sending; None: all do.
    """

    stay: Wire
    moved: Wire
    kept_R: Sequence[Tensor] | None


def seat_index(counts_Q: IntArray, by_expert_Q: IntArray) -> IntArray:
    """For each row in seat order its place among a source's rows in (expert, rank) order, int64 (N,)."""
    count = counts_Q[by_expert_Q]
    start_Q = np.empty_like(counts_Q)
    start_Q[by_expert_Q] = np.cumsum(count) - count
    return ranges(start_Q, counts_Q)


def order_source(ids_TK: Tensor, seats: Seats, rank: int) -> tuple[Tensor, Tensor]:
    """A source's flat pair ids in the order (expert, token) and in the order of sending, int64 (N,) each."""
    order = sort_pairs(ids_TK, seats.topology.experts)[0][: int(seats.assign_RQ[rank].sum())]
    index = seat_index(seats.assign_RQ[rank], seats.by_expert_Q)
    return order, order[torch.from_numpy(index).to(order.device)]


def kept_per_seat(weight_N: Tensor, counts_Q: IntArray) -> tuple[Tensor, IntArray]:
    """Positions of kept pairs in the order of sending, int64 (P,), and how many each seat has, int64 (Q,)."""
    kept = weight_N > 0
    total = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    end = torch.from_numpy(np.cumsum(counts_Q)).to(weight_N.device)
    reached = total[end].cpu().numpy()
    position = (
        torch.nonzero_static(kept, size=int(reached[-1])).squeeze(1) if kept.is_cuda else kept.nonzero()[:, 0]
    )
    return position, np.diff(reached, prepend=0)


def split_source(position_P: Tensor, moves: Transfers, rank: int) -> tuple[Tensor, Tensor]:
    """A source's kept positions that stay, in seat order, and those that move, in the order of their new seats."""
    mine = moves.source_X == rank
    pairs, to = moves.pairs_X[mine], moves.to_X[mine]
    begins, stay = np.cumsum(pairs) - pairs, to == moves.from_X[mine]
    away = np.flatnonzero(~stay)
    away = away[np.argsort(to[away], kind="stable")]
    stays, leaves = (
        torch.from_numpy(ranges(begins[some], pairs[some])).to(position_P.device) for some in (stay, away)
    )
    return position_P[stays], position_P[leaves]


def reroute(forward: Wire, weight_R: Sequence[Tensor] | None, times: Times) -> Backward:
    """Where every source's kept pairs run in backward.

    Args:
        weight_R: for each source 1/pi in the order of sending, 0 of what is left out; None: all are kept.
        times: phase "reroute" of every rank goes here.
    """
    seats = forward.seats
    if weight_R is None:
        if np.array_equal(forward.counts_RQ.sum(axis=0), seats.backward_Q):
            return Backward(stay=forward, moved=_nothing(forward), kept_R=None)
        weight_R = [torch.ones(len(pair), device=pair.device) for pair in forward.pair_R]
    found = []
    for rank, weight_N in enumerate(weight_R):
        with times.phase("backward", rank, "reroute"):
            found.append(kept_per_seat(weight_N, seats.assign_RQ[rank]))
    kept_RQ = np.stack([kept_Q for _, kept_Q in found])
    halves = []
    for rank, (position_P, _) in enumerate(found):
        with times.phase("backward", rank, "moves"):
            moves = transfers(kept_RQ, seats)
            halves.append(split_source(position_P, moves, rank))
    stay_RQ, moved_RQ = (moves.table(*kept_RQ.shape, stay=stay) for stay in (True, False))
    stays, leaves = ([half[side] for half in halves] for side in (0, 1))
    return Backward(
        stay=_kept_wire(forward, stay_RQ, stays, weight_R),
        moved=_kept_wire(forward, moved_RQ, leaves, weight_R),
        kept_R=[_mask(len(w), position) for w, position in zip(weight_R, stays, strict=True)],
    )


def _nothing(forward: Wire) -> Wire:
    return Wire(
        seats=forward.seats,
        counts_RQ=np.zeros_like(forward.counts_RQ),
        pair_R=[pair[:0] for pair in forward.pair_R],
    )


def _kept_wire(
    forward: Wire, counts_RQ: IntArray, position_R: Sequence[Tensor], weight_R: Sequence[Tensor]
) -> Wire:
    return Wire(
        seats=forward.seats,
        counts_RQ=counts_RQ,
        pair_R=[pair[at] for pair, at in zip(forward.pair_R, position_R, strict=True)],
        weight_R=[weight[at] for weight, at in zip(weight_R, position_R, strict=True)],
    )


def _mask(size: int, position_P: Tensor) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool, device=position_P.device)
    mask[position_P] = True
    return mask
