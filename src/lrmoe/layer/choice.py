"""Which of a source's pairs go to which seat, within the numbers that the plan fixes, and the rows that then cross.

The plan says how many pairs of each expert a source sends to each seat, never which. `in_order` takes them as they
come; `choose_seats` takes those that spare rows where a token crosses once per rank:

    token 3: experts 5 (rank 0), 40 (rank 2), 77 (rank 0 or 4)   ->  77 at rank 0, where token 3 goes anyway

It works in passes. A pass looks at every pair that has a choice, one beside the other: how surely does its token visit
each of the ranks on offer because of its other pairs (in the first pass those that have a choice themselves count in
part, by their odds; in later ones by what they chose). Then every expert's pairs are divided among its seats, in
halves of the seats, those to the left that gain most by it: for two seats the best division there is, the other pairs
given. The best pass stands, so rows never exceed those of `in_order`. All steps are integer and linear in the pairs.

Shape letters: T tokens, N pairs of this source by (expert, token), Q seats, R ranks, U rows; of the pairs with a
choice: C pairs, X experts, M seats of one expert (a power of two, padded), D nodes of a level of halving.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats

UNIT = 16  # a sure visit, in the units that odds are counted in
SPARSE = 32  # unique_rows sorts instead of marking where marks would outnumber pairs by this


def in_order(seats: Seats, rank: int, device: torch.device) -> Tensor:
    """The seat of each pair of source `rank`, seats taking pairs as they come, int64 (N,) on `device`.

    Pairs come by (expert, token); an expert's first `assign_RQ[rank, q]` pairs go to its first seat, and so on.
    """
    lengths = seats.assign_RQ[rank, seats.by_expert_Q]
    return _repeat(seats.by_expert_Q, lengths, device)


def choose_seats(token_N: Tensor, tokens: int, seats: Seats, rank: int, *, passes: int = 1) -> Tensor:
    """The seat of each pair of source `rank`, chosen so that few (token, rank) rows leave it, int64 (N,).

    Args:
        token_N: int64 (N,), the pairs' tokens, pairs by (expert, token): as many of each expert as `assign_RQ[rank]`
            gives to its seats.
        tokens: T.
        seats: the plan's; every seat gets exactly the pairs that `assign_RQ[rank]` says.
        rank: the source.
        passes: looks at every pair with a choice.

    Rows to ranks other than the source are never more than with `in_order`. No random numbers, no device reads.
    """
    plain_N = in_order(seats, rank, token_N.device)
    offer = _Offer.of(seats, rank)
    if offer is None or passes < 1:
        return plain_N
    return _Chooser(token_N, tokens, seats, rank, offer).run(plain_N, passes)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Offer:
    """The experts of which a source sends pairs to several seats.

    Attributes:
        start_X, length_X: their pairs' place among the source's pairs, int64 (X,).
        seat_XM: int64 (X, M), their seats; padded by the first one.
        room_XM: int64 (X, M), pairs of each; padding has none.
        mine_Q: bool (Q,), the seats on offer.
    """

    start_X: IntArray
    length_X: IntArray
    seat_XM: IntArray
    room_XM: IntArray
    mine_Q: NDArray[np.bool_]

    @classmethod
    def of(cls, seats: Seats, rank: int) -> _Offer | None:
        """From the plan; None where no pair has a choice."""
        order, experts = seats.by_expert_Q, seats.topology.experts
        sent_Q = seats.assign_RQ[rank, order]
        used = order[sent_Q > 0]
        seats_E = np.bincount(seats.expert_Q[used], minlength=experts)
        chosen = np.flatnonzero(seats_E > 1)
        if not chosen.size:
            return None
        pairs_E = np.zeros(experts, dtype=np.int64)
        np.add.at(pairs_E, seats.expert_Q[order], sent_Q)
        used = used[seats_E[seats.expert_Q[used]] > 1]
        row = np.searchsorted(chosen, seats.expert_Q[used])
        column = np.arange(used.size) - np.searchsorted(row, row)
        width = 1 << int(seats_E.max() - 1).bit_length()
        seat_XM = np.repeat(used[column == 0][:, None], width, axis=1)
        room_XM = np.zeros((chosen.size, width), dtype=np.int64)
        seat_XM[row, column], room_XM[row, column] = used, seats.assign_RQ[rank, used]
        mine_Q = np.zeros(seats.expert_Q.size, dtype=np.bool_)
        mine_Q[used] = True
        return cls(
            start_X=(np.cumsum(pairs_E) - pairs_E)[chosen],
            length_X=pairs_E[chosen],
            seat_XM=seat_XM,
            room_XM=room_XM,
            mine_Q=mine_Q,
        )

    def halvings(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Level after level: pairs of each node and of its left half, int64 (D,) each; D doubles from X to X * M/2."""
        parts = 2
        while parts <= self.room_XM.shape[1]:
            half = self.room_XM.reshape(-1, 2, self.room_XM.shape[1] // parts).sum(axis=2)
            yield half.sum(axis=1), half[:, 0]
            parts *= 2


class _Chooser:
    """One source's choice in progress."""

    def __init__(self, token_N: Tensor, tokens: int, seats: Seats, rank: int, offer: _Offer) -> None:
        device, ranks = token_N.device, seats.topology.ranks
        self.offer, self.ranks = offer, ranks
        expert_C = _repeat(np.arange(offer.length_X.size), offer.length_X, device)
        self.pair_C = _repeat(offer.start_X - _before(offer.length_X), offer.length_X, device)
        self.pair_C += torch.arange(self.pair_C.shape[0], device=device)
        self.seat_C = _repeat(offer.seat_XM.reshape(-1), offer.room_XM.reshape(-1), device)
        row_C = token_N[self.pair_C] * ranks
        self.key_CM = row_C[:, None] + _upload(seats.rank_Q[offer.seat_XM], device)[expert_C]
        odds_XM = offer.room_XM * UNIT // offer.length_X[:, None]
        self.odds_CM = _upload(odds_XM, device)[expert_C].int()
        self.real_CM = _upload(offer.room_XM > 0, device)[expert_C] if (offer.room_XM == 0).any() else None
        self.fixed = self._visits(token_N, tokens, seats, rank)
        self.levels = [(_upload(length, device), _upload(left, device)) for length, left in offer.halvings()]
        self.lengths = [length for length, _ in offer.halvings()]

    def _visits(self, token_N: Tensor, tokens: int, seats: Seats, rank: int) -> Tensor:
        """UNIT where a token visits a rank whatever is chosen, 0 elsewhere, int32 (T * R,): its own always, for free."""
        order = seats.by_expert_Q
        rank_Q = np.where(self.offer.mine_Q, rank, seats.rank_Q)[order]
        key_N = token_N * self.ranks + _repeat(rank_Q, seats.assign_RQ[rank, order], token_N.device)
        visits = torch.zeros(tokens * self.ranks, dtype=torch.int32, device=token_N.device)
        visits.view(tokens, self.ranks)[:, rank] = UNIT
        return visits.index_fill_(0, key_N, UNIT)

    def run(self, plain_N: Tensor, passes: int) -> Tensor:
        """The best of `passes` passes and the plain choice."""
        best_C = plain_N[self.pair_C]
        place_C = torch.arange(best_C.shape[0], device=best_C.device)
        fewest = self._rows(self._taken(place_C))
        share_CM = self.odds_CM
        for _ in range(passes):
            place_C = self._divide(self._gain(share_CM))
            share_CM = self._taken(place_C)
            rows = self._rows(share_CM)
            seat_C = torch.empty_like(best_C).index_copy_(0, place_C, self.seat_C)
            best_C = torch.where(rows < fewest, seat_C, best_C)
            fewest = torch.minimum(rows, fewest)
        return plain_N.index_copy_(0, self.pair_C, best_C)

    def _taken(self, place_C: Tensor) -> Tensor:
        """UNIT at the seat of each pair, int32 (C, M); `place_C` lists the pairs seat after seat."""
        width = self.key_CM.shape[1]
        columns = np.tile(np.arange(width), self.offer.length_X.size)
        column_C = _repeat(columns, self.offer.room_XM.reshape(-1), place_C.device)
        taken = torch.zeros_like(self.odds_CM)
        taken[place_C, column_C] = UNIT
        return taken

    def _rows(self, taken_CM: Tensor) -> Tensor:
        """Rows that leave the source plus a constant, int64 ()."""
        return self._sum(taken_CM).count_nonzero()

    def _sum(self, share_CM: Tensor) -> Tensor:
        return self.fixed.index_add(0, self.key_CM.reshape(-1), share_CM.reshape(-1))

    def _gain(self, share_CM: Tensor) -> Tensor:
        """How surely each pair's token visits each rank on offer for other reasons, int32 (C, M) in [0, UNIT]."""
        others = self._sum(share_CM)[self.key_CM] - share_CM
        gain = others.clamp_(max=UNIT)
        return gain if self.real_CM is None else gain * self.real_CM

    def _divide(self, gain_CM: Tensor) -> Tensor:
        """The pairs seat after seat, int64 (C,): in every node those to the left half that gain most by it."""
        pairs, width = gain_CM.shape
        place_C = torch.arange(pairs, device=gain_CM.device)
        nodes = 1
        for (length_D, left_D), lengths in zip(self.levels, self.lengths, strict=True):
            node_C = _repeat(np.arange(lengths.size), lengths, gain_CM.device)
            best = gain_CM.view(pairs, nodes, 2, width // (2 * nodes)).amax(dim=3)
            score_C = (best[..., 0] - best[..., 1])[place_C, node_C % nodes]
            place_C = place_C[_partition(score_C, node_C, length_D, left_D)]
            nodes *= 2
        return place_C


def _partition(score_C: Tensor, node_C: Tensor, length_D: Tensor, left_D: Tensor) -> Tensor:
    """The order in which each node's `left_D` highest scores come first; else, and among equals, as they came.

    Scores lie in [-UNIT, UNIT]; nodes are contiguous.
    """
    classes = 2 * UNIT + 1
    class_C = UNIT - score_C.long()  # 0 is the best
    count_DS = torch.bincount(node_C * classes + class_C, minlength=length_D.shape[0] * classes)
    ends_DS = count_DS.view(-1, classes).cumsum(dim=1)
    last_D = (ends_DS < left_D[:, None]).sum(dim=1).clamp_(max=classes - 1)  # the class that is cut
    before_D = torch.where(last_D > 0, ends_DS.gather(1, (last_D - 1).clamp(min=0)[:, None])[:, 0], 0)
    start_D = length_D.cumsum(dim=0) - length_D
    cut_C = class_C == last_D[node_C]
    turn_C = _place_in_node(cut_C, node_C, start_D)
    left_C = (class_C < last_D[node_C]) | (cut_C & (turn_C < (left_D - before_D)[node_C]))
    place_left = _place_in_node(left_C, node_C, start_D)
    inside = torch.arange(node_C.shape[0], device=node_C.device) - start_D[node_C]
    target = torch.where(left_C, place_left, left_D[node_C] + inside - place_left) + start_D[node_C]
    order = torch.empty_like(target)
    order[target] = torch.arange(target.shape[0], device=target.device)
    return order


def _place_in_node(mask_C: Tensor, node_C: Tensor, start_D: Tensor) -> Tensor:
    """How many of its node's earlier pairs the mask marks, int64 (C,)."""
    before = mask_C.cumsum(dim=0) - mask_C.long()
    return before - before[start_D.clamp(max=before.shape[0] - 1)][node_C]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Distinct (rank, token) rows of a source's pairs.

    Attributes:
        token_U: int64 (U,), token of each row, rows by (rank, token).
        rows_R: int64 (R,), rows per rank.
        row_N: int32 (N,), each pair's row within its rank's block.
    """

    token_U: Tensor
    rows_R: Tensor
    row_N: Tensor


def unique_rows(rank_N: Tensor, token_N: Tensor, ranks: int, tokens: int) -> Rows:
    """The rows that pairs need if a token crosses once per rank.

    Args:
        rank_N, token_N: int64 (N,), in any order; ranks in [0, ranks), tokens in [0, tokens).
        ranks, tokens: R and T.
    """
    key_N = rank_N * tokens + token_N
    if ranks * tokens > SPARSE * key_N.shape[0]:
        key_U, place_N = torch.unique(key_N, return_inverse=True)
        rows_R = torch.bincount(key_U // max(tokens, 1), minlength=ranks)
    else:
        marks = torch.zeros(ranks * tokens, dtype=torch.bool, device=key_N.device)
        marks[key_N] = True
        place_N = (marks.cumsum(dim=0, dtype=torch.int32) - 1)[key_N]
        key_U = marks.nonzero()[:, 0]
        rows_R = marks.view(ranks, tokens).sum(dim=1)
    start_R = rows_R.cumsum(dim=0) - rows_R
    row_N = (place_N - start_R[rank_N]).to(torch.int32)
    return Rows(token_U=key_U % max(tokens, 1), rows_R=rows_R, row_N=row_N)


def _repeat(value: IntArray, times: IntArray, device: torch.device) -> Tensor:
    """Each value as often as it says, int64 on the device."""
    return torch.repeat_interleave(
        _upload(value, device), _upload(times, device), output_size=int(times.sum())
    )


def _upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def _before(length_X: IntArray) -> IntArray:
    return np.cumsum(length_X) - length_X
