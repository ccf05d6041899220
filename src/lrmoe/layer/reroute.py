"""Where this call's kept pairs run in backward, and the order in which this source sends them.

Pairs that stay find their stash where forward left it: their position travels with them (4 bytes), unless forward knew
them and kept theirs alone, in order. Pairs that move, and all pairs where nothing was kept, carry their input and are
computed again.

Shape letters: N pairs of this source by expert, P kept pairs of this source, R ranks, Q seats of all ranks, V = 2 Q
stands: for each rank its seats with pairs that stay, then its seats with pairs that carry their input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrmoe.distributed.probe import current
from lrmoe.layer.call import Call
from lrmoe.ops import Reading, upload
from lrmoe.planning.cells import between_ranks, carry_stands, part_of_cells, ranges, stands
from lrmoe.planning.problem import IntArray
from lrmoe.planning.transfers import transfers


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """Kept pairs in the order of sending: (rank, stay before carry, seat, token).

    Attributes:
        source_P: int64 (P,) positions among this source's pairs by expert, or None for all of them in that order.
        position_P: int32 (P,) place of the pair among all that its rank received in forward, in received order; means
            nothing for pairs that carry their input. None: what was kept lies in the order of sending, or nothing was.
        cells_RV: int64 (R, V), pairs of every source at every stand.
        starts_R: int64 (R + 1,), first stand of every rank.
        carried: whether any pair, and `all_carried` whether every pair, carries its input.
        kept_RQ: int64 (R, Q), kept pairs of every source at its forward seats.
    """

    source_P: Tensor | None
    position_P: Tensor | None
    cells_RV: IntArray
    starts_R: IntArray
    carried: bool
    all_carried: bool
    kept_RQ: IntArray

    @property
    def staying_RQ(self) -> IntArray:
        """Pairs of every source that stay at each seat, int64 (R, Q)."""
        return self.cells_RV[:, ~carry_stands(self.starts_R)]

    def places(self, rank: int, number: int, parts: int, device: torch.device) -> Tensor | None:
        """Where a part's pairs that stay at this rank lie among all that do, in (seat, source) order; None: all."""
        if parts == 1:
            return None
        mine = np.arange(self.starts_R[rank], self.starts_R[rank + 1])
        mine = mine[~carry_stands(self.starts_R)[mine]]

        def here(cells_RV: IntArray) -> IntArray:
            return cells_RV[:, mine].T.reshape(-1)

        size = here(self.cells_RV)
        earlier = (part_of_cells(self.cells_RV, self.starts_R, i, parts) for i in range(number))
        begin = np.cumsum(size) - size + sum(here(cells_RV) for cells_RV in earlier)
        length = here(part_of_cells(self.cells_RV, self.starts_R, number, parts))
        return upload(ranges(begin, length), device)

    def part(
        self, rank: int, number: int, parts: int, device: torch.device
    ) -> tuple[IntArray, Tensor | None]:
        """Cells (R, V) of one part, and this source's pairs in it as positions in the order of sending; None: all."""
        if parts == 1:
            return self.cells_RV, None
        done_V = sum(part_of_cells(self.cells_RV, self.starts_R, i, parts)[rank] for i in range(number))
        cells_RV = part_of_cells(self.cells_RV, self.starts_R, number, parts)
        begin_V = np.cumsum(self.cells_RV[rank]) - self.cells_RV[rank] + done_V
        return cells_RV, upload(ranges(begin_V, cells_RV[rank]), device)


def reroute(
    call: Call,
    place_N: Tensor | None,
    weight_N: Tensor | None,
    device: torch.device,
    kept_RQ: IntArray | None = None,
) -> Route:
    """Plan the way back.

    Args:
        place_N: the forward's order of sending (see Walked); weight_N: fp32 (N,), 0 where a pair is left out, pairs by
            expert; None: all pairs are kept. kept_RQ: see Route, where it is known; else the ranks tell each other.
    """
    seats = call.seats
    kept_N = None if weight_N is None else weight_N if place_N is None else weight_N[place_N]
    if kept_RQ is None:
        kept_RQ = seats.assign_RQ if kept_N is None else kept_table(call, kept_N)
    current().kept(call.plan, seats.expert_Q, kept_RQ, kept_N)
    in_place = np.array_equal(kept_RQ.sum(axis=0), seats.backward_Q)
    again = call.comm.size > 1 and not call.keeps_rows
    if kept_N is None and in_place:
        return _as_forward(call, place_N, again, device)
    size = int(kept_RQ[call.comm.rank].sum())
    sent_P = torch.arange(size, device=device) if kept_N is None else nonzero(kept_N, size)
    stay_RQ, carry_RQ = kept_RQ, np.zeros_like(kept_RQ)
    if not in_place:
        sent_P, stay_RQ, carry_RQ = _moved(call, sent_P, kept_RQ, again)
    if again:
        stay_RQ, carry_RQ = np.zeros_like(stay_RQ), stay_RQ + carry_RQ
    return Route(
        source_P=sent_P if place_N is None else place_N[sent_P],
        position_P=None if again or call.selects_early else _positions(call, sent_P),
        cells_RV=stands(seats.starts_R, stay_RQ, carry_RQ),
        starts_R=2 * seats.starts_R,
        carried=bool(carry_RQ.any()),
        all_carried=again,
        kept_RQ=kept_RQ,
    )


def _moved(call: Call, sent_P: Tensor, kept_RQ: IntArray, again: bool) -> tuple[Tensor, IntArray, IntArray]:
    """Where some pairs run at other seats: kept pairs in the order of sending, tables of those that stay and carry."""
    rank, seats = call.comm.rank, call.seats
    moves = transfers(kept_RQ, seats)
    mine = moves.source_X == rank
    to, pairs = moves.to_X[mine], moves.pairs_X[mine]
    carry = (to != moves.from_X[mine]) | again
    order = np.lexsort((to, carry, seats.rank_Q[to]))
    # Where forward had one seat for an expert and nothing is carried, sending order stays as it was.
    if not np.array_equal(order, np.arange(order.size)):
        begins = np.cumsum(pairs) - pairs
        sent_P = sent_P[upload(ranges(begins[order], pairs[order]), sent_P.device)]
    stay_RQ, carry_RQ = (moves.table(kept_RQ.shape[0], kept_RQ.shape[1], stay=stay) for stay in (True, False))
    return sent_P, stay_RQ, carry_RQ


def _as_forward(call: Call, place_N: Tensor | None, again: bool, device: torch.device) -> Route:
    """Every pair runs where it ran, in the forward's order."""
    assign_RQ, none_RQ = call.seats.assign_RQ, np.zeros_like(call.seats.assign_RQ)
    cells = (none_RQ, assign_RQ) if again else (assign_RQ, none_RQ)
    position_P = None
    if call.plan.backward_chunks > 1 and not again:
        position_P = _positions(call, torch.arange(int(assign_RQ[call.comm.rank].sum()), device=device))
    return Route(
        source_P=place_N,
        position_P=position_P,
        cells_RV=stands(call.seats.starts_R, *cells),
        starts_R=2 * call.seats.starts_R,
        carried=again,
        all_carried=again,
        kept_RQ=assign_RQ,
    )


def kept_table(call: Call, kept_N: Tensor) -> IntArray:
    """Kept pairs of every source at its forward seats, int64 (R, Q): known on one rank, else one small all-gather.

    Args:
        kept_N: (N,), positive where a pair is kept, in the forward's order of sending.
    """
    seats, comm = call.seats, call.comm
    if comm.size == 1:
        return call.plan.quota_E[seats.expert_Q][None]
    ends = upload(np.cumsum(seats.assign_RQ[comm.rank]), kept_N.device)
    total = torch.nn.functional.pad((kept_N > 0).cumsum(0), (1, 0))[ends]
    mine_Q = torch.diff(total, prepend=total.new_zeros(1))
    call.open_call.sent("reroute", comm.sent_bytes(mine_Q.expand(comm.size, -1), [1] * comm.size))
    return Reading(comm.all_gather_ints(mine_Q)).wait().numpy()


def nonzero(weight: Tensor, size: int) -> Tensor:
    """Positions of the kept rows; their number is known, so that a device need not be read."""
    if weight.device.type == "cpu":
        is_kept = (weight > 0).numpy()  # a search of bools takes a third of the time of one of floats
        kept = torch.from_numpy(np.flatnonzero(is_kept))
        assert kept.shape[0] == size, f"{kept.shape[0]} rows kept, the plan says {size}"
        return kept
    return torch.nonzero_static(weight, size=size).squeeze(1)


def _positions(call: Call, sent_P: Tensor) -> Tensor:
    """Places among all pairs that a rank received in forward, int32 (P,), from positions in the order of sending."""
    if call.comm.size == 1:
        return sent_P.to(torch.int32)
    seats, rank = call.seats, call.comm.rank
    blocks_RR = between_ranks(seats.assign_RQ[None], seats.starts_R)[0]
    begin_R = upload(np.cumsum(np.append(0, blocks_RR[rank])), sent_P.device)
    before_R = upload(blocks_RR[:rank].sum(axis=0), sent_P.device)
    block_P = torch.bucketize(sent_P, begin_R[1:], right=True)
    return (sent_P + (before_R - begin_R[:-1])[block_P]).to(torch.int32)
