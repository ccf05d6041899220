"""Which of a source's pairs go to which seat, within the numbers that the plan fixes, and the rows that then cross.

The plan says how many pairs of each expert a source sends to each seat, never which. `in_order` takes them as they
come; `choose_seats` takes those that spare rows where a token crosses once per rank:

    token 3: experts 5 (rank 0), 40 (rank 2), 77 (rank 0 or 4)   ->  77 at rank 0, where token 3 goes anyway

It works in passes. A pass looks at every pair that has a choice, one beside the other: how surely does its token visit
each of the ranks on offer because of its other pairs? Those that have a choice themselves count in part, by their odds
in the first pass, by odds and choice in later ones. Then every expert's pairs are divided among its seats, in halves
of the seats, those to the left that gain most by it: for two seats the best division there is, the other pairs given.
The best pass stands, so rows never exceed those of `in_order`. All steps are integer and linear in the pairs.

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

from lrmoe.ops import upload
from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats

UNIT = 16  # a sure visit, in the units that odds are counted in
CLASSES = 2 * UNIT + 1  # of differences of two odds
DENSE = 4  # a second pass where more than one pair in four has a choice: elsewhere the first leaves nothing to gain
SPARSE = 32  # unique_rows sorts instead of marking where marks would outnumber pairs by this


def in_order(seats: Seats, rank: int, device: torch.device) -> Tensor:
    """The seat of each pair of source `rank`, seats taking pairs as they come, int64 (N,) on `device`.

    Pairs come by (expert, token); an expert's first `assign_RQ[rank, q]` pairs go to its first seat, and so on.
    """
    return _repeat(seats.by_expert_Q, seats.assign_RQ[rank, seats.by_expert_Q], device)


def choose_seats(token_N: Tensor, tokens: int, seats: Seats, rank: int) -> Tensor:
    """The seat of each pair of source `rank`, chosen so that few (token, rank) rows leave it, int64 (N,).

    Args:
        token_N: int64 (N,), the pairs' tokens, pairs by (expert, token): as many of each expert as `assign_RQ[rank]`
            gives to its seats.
        tokens: T.
        seats: the plan's; every seat gets exactly the pairs that `assign_RQ[rank]` says.
        rank: the source.

    Rows to ranks other than the source are never more than with `in_order`. No random numbers, no device reads.
    """
    plain_N = in_order(seats, rank, token_N.device)
    offer = _Offer.of(seats, rank)
    if offer is None:
        return plain_N
    passes = 2 if DENSE * int(offer.length_X.sum()) > token_N.shape[0] else 1
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
        sent_Q = seats.assign_RQ[rank]
        used = seats.by_expert_Q[sent_Q[seats.by_expert_Q] > 0]
        seats_E = np.bincount(seats.expert_Q[used], minlength=seats.topology.experts)
        chosen = np.flatnonzero(seats_E > 1)
        if not chosen.size:
            return None
        pairs_E = np.zeros_like(seats_E)
        np.add.at(pairs_E, seats.expert_Q, sent_Q)
        used = used[seats_E[seats.expert_Q[used]] > 1]
        row = np.searchsorted(chosen, seats.expert_Q[used])
        column = np.arange(used.size) - np.searchsorted(row, row)
        width = 1 << int(seats_E.max() - 1).bit_length()
        seat_XM = np.repeat(used[column == 0][:, None], width, axis=1)
        room_XM = np.zeros_like(seat_XM)
        seat_XM[row, column], room_XM[row, column] = used, sent_Q[used]
        mine_Q = np.zeros(sent_Q.shape, dtype=np.bool_)
        mine_Q[used] = True
        return cls(
            start_X=(np.cumsum(pairs_E) - pairs_E)[chosen],
            length_X=pairs_E[chosen],
            seat_XM=seat_XM,
            room_XM=room_XM,
            mine_Q=mine_Q,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Level:
    """One level of halving the seats: node d lies at a stretch of the pairs, and its left half takes some of them.

    Attributes:
        left_D: int64 (D,), pairs of the left half of each node.
        left_before_D: int64 (D,), pairs of the left halves before it.
        node_C: int64 (C,), node of each place.
        shift_C: int64 (C,), places of a node less the pairs that earlier left halves took.
        ends_C: int64 (C,), pairs that the left halves took, this node's included.
    """

    left_D: Tensor
    left_before_D: Tensor
    node_C: Tensor
    shift_C: Tensor
    ends_C: Tensor

    @classmethod
    def all_of(cls, room_XM: IntArray, device: torch.device) -> Iterator[_Level]:
        """From X nodes of M seats to X * M / 2 nodes of two."""
        width = room_XM.shape[1]
        while width > 1:
            left_D, right_D = room_XM.reshape(-1, 2, width // 2).sum(axis=2).T
            length_D, ends_D = left_D + right_D, np.cumsum(left_D)
            shift_D = _before(length_D) - ends_D + left_D
            yield cls(
                left_D=upload(left_D, device),
                left_before_D=upload(ends_D - left_D, device),
                node_C=_repeat(np.arange(length_D.size), length_D, device),
                shift_C=_repeat(shift_D, length_D, device),
                ends_C=_repeat(ends_D, length_D, device),
            )
            width //= 2

    def divide(self, score_C: Tensor) -> Tensor:
        """The order in which each node's highest scores come first, as many as fit; else they stay as they came.

        Scores lie in [-UNIT, UNIT]. Where equals are cut, the earlier ones go left.
        """
        pairs, nodes = score_C.shape[0], self.left_D.shape[0]
        class_C = UNIT - score_C.long()  # 0 is the best
        count_DS = torch.zeros(nodes * CLASSES, dtype=torch.int64, device=score_C.device)
        count_DS.index_add_(
            0, self.node_C * CLASSES + class_C, torch.ones_like(class_C)
        )  # bincount would wait
        count_DS = count_DS.view(nodes, CLASSES)
        ends_DS = count_DS.cumsum(dim=1)
        last_D = (ends_DS < self.left_D[:, None]).sum(dim=1)  # the class that is cut
        whole_D = ends_DS.gather(1, last_D[:, None]) - count_DS.gather(1, last_D[:, None])
        last_C = last_D[self.node_C]
        cut_C = class_C == last_C
        seen_C = cut_C.cumsum(dim=0)
        seen_D = torch.zeros_like(last_D)
        cut_D = count_DS.gather(1, last_D[:, None])[:, 0]
        seen_D[1:] = cut_D.cumsum(dim=0)[:-1]
        most_D = seen_D + self.left_D - whole_D[:, 0]
        left_C = (class_C < last_C) | (cut_C & (seen_C <= most_D[self.node_C]))
        taken_C = left_C.cumsum(dim=0)
        here_C = torch.arange(pairs, device=score_C.device)
        place_C = torch.where(left_C, taken_C - 1 + self.shift_C, here_C - taken_C + self.ends_C)
        return torch.empty_like(place_C).index_copy_(0, place_C, here_C)


class _Chooser:
    """One source's choice in progress."""

    def __init__(self, token_N: Tensor, tokens: int, seats: Seats, rank: int, offer: _Offer) -> None:
        device, ranks = token_N.device, seats.topology.ranks
        self.offer, self.ranks = offer, ranks
        length_X, room_XM = offer.length_X, offer.room_XM
        self.pair_C = _repeat(offer.start_X - _before(length_X), length_X, device)
        self.pair_C += torch.arange(self.pair_C.shape[0], device=device)
        self.key_CM = _repeat(seats.rank_Q[offer.seat_XM], length_X, device)
        self.key_CM += (token_N[self.pair_C] * ranks)[:, None]
        odds_XM = (room_XM * UNIT // length_X[:, None]).astype(np.int32)
        self.odds_CM = _repeat(odds_XM, length_X, device)
        self.real_CM = _repeat(room_XM > 0, length_X, device) if (room_XM == 0).any() else None
        self.column_C = _repeat(
            np.tile(np.arange(room_XM.shape[1]), length_X.size), room_XM.reshape(-1), device
        )
        self.seat_C = _repeat(offer.seat_XM.reshape(-1), room_XM.reshape(-1), device)
        self.levels = tuple(_Level.all_of(room_XM, device))
        self.fixed = self._visits(token_N, tokens, seats, rank)

    def _visits(self, token_N: Tensor, tokens: int, seats: Seats, rank: int) -> Tensor:
        """UNIT where a token goes whatever is chosen, int32 (T * R,); always to the source itself, which is free."""
        order = seats.by_expert_Q
        rank_Q = np.where(self.offer.mine_Q, rank, seats.rank_Q)[order]
        key_N = _repeat(rank_Q, seats.assign_RQ[rank, order], token_N.device)
        key_N.add_(token_N, alpha=self.ranks)
        visits = torch.zeros(tokens * self.ranks, dtype=torch.int32, device=token_N.device)
        visits.view(tokens, self.ranks)[:, rank] = UNIT
        return visits.index_fill_(0, key_N, UNIT)

    def run(self, plain_N: Tensor, passes: int) -> Tensor:
        """The best of `passes` passes and the plain choice."""
        best_C = plain_N[self.pair_C]
        fewest = self._rows(self._taken(torch.arange(best_C.shape[0], device=best_C.device)))
        odds_CM = self.odds_CM
        for _ in range(passes):
            place_C = self._divide(self._gain(odds_CM))
            taken_CM = self._taken(place_C)
            odds_CM = (odds_CM + taken_CM) // 2  # half of the old: pairs of one token do not all turn at once
            rows = self._rows(taken_CM)
            seat_C = torch.empty_like(best_C).index_copy_(0, place_C, self.seat_C)
            best_C = torch.where(rows < fewest, seat_C, best_C)
            fewest = torch.minimum(rows, fewest)
        return plain_N.index_copy_(0, self.pair_C, best_C)

    def _taken(self, place_C: Tensor) -> Tensor:
        """UNIT at the seat of each pair, int32 (C, M); `place_C` lists the pairs seat after seat."""
        taken_CM = torch.zeros_like(self.odds_CM)
        taken_CM.view(-1).index_fill_(0, place_C * taken_CM.shape[1] + self.column_C, UNIT)
        return taken_CM

    def _rows(self, taken_CM: Tensor) -> Tensor:
        """Rows that leave the source plus a constant, int64 ()."""
        return self._sum(taken_CM).count_nonzero()

    def _sum(self, odds_CM: Tensor) -> Tensor:
        """Odds of every token at every rank, int32 (T * R,): whole numbers, so that their order does not matter."""
        return self.fixed.index_add(0, self.key_CM.view(-1), odds_CM.view(-1))

    def _gain(self, odds_CM: Tensor) -> Tensor:
        """How surely each pair's token visits each rank on offer for other reasons, int32 (C, M) in [0, UNIT]."""
        others = self._sum(odds_CM).index_select(0, self.key_CM.view(-1)).view_as(odds_CM)
        gain_CM = others.sub_(odds_CM).clamp_(max=UNIT)
        return gain_CM if self.real_CM is None else gain_CM.mul_(self.real_CM)

    def _divide(self, gain_CM: Tensor) -> Tensor:
        """The pairs seat after seat, int64 (C,): in every node those to the left half that gain most by it."""
        pairs, width = gain_CM.shape
        place_C: Tensor | None = None
        for depth, level in enumerate(self.levels):
            nodes = 1 << depth
            best = gain_CM.view(pairs, nodes, 2, width // (2 * nodes)).amax(dim=3)
            score_CD = best[..., 0] - best[..., 1]
            if place_C is None:
                place_C = level.divide(score_CD[:, 0])
            else:
                place_C = place_C[level.divide(score_CD[place_C, level.node_C % nodes])]
        assert place_C is not None, "an expert on offer has two seats or more"
        return place_C


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Distinct (rank, token) rows of a source's pairs.

    Attributes:
        rows_R: int64 (R,), rows per rank.
        row_N: int32 (N,), each pair's row within its rank's block.
        marks_RT: bool (R, T), the rows; or None where `sorted_U` holds their tokens.
    """

    rows_R: Tensor
    row_N: Tensor
    marks_RT: Tensor | None
    sorted_U: Tensor | None

    def tokens(self, rows: int) -> Tensor:
        """Token of each row, rows by (rank, token), int64 (U,).

        Args:
            rows: the sum of `rows_R`, which the caller has read.
        """
        if self.marks_RT is None:
            assert self.sorted_U is not None, "rows are marked or sorted"
            return self.sorted_U
        if self.marks_RT.device.type == "cpu":
            return self.marks_RT.nonzero(as_tuple=True)[1]
        return torch.nonzero_static(self.marks_RT, size=rows)[:, 1]


def unique_rows(rank_N: Tensor, token_N: Tensor, ranks: int, tokens: int) -> Rows:
    """The rows that pairs need if a token crosses once per rank.

    Args:
        rank_N, token_N: int64 (N,), in any order; ranks in [0, ranks), tokens in [0, tokens).
        ranks, tokens: R and T.

    Reads nothing from a device, but where so few pairs visit so many ranks that they are sorted.
    """
    key_N = torch.add(token_N, rank_N, alpha=tokens)
    if ranks * tokens > SPARSE * key_N.shape[0]:
        key_U, place_N = torch.unique(key_N, return_inverse=True)
        rows_R = torch.bincount(key_U // max(tokens, 1), minlength=ranks)
        place_N -= (rows_R.cumsum(dim=0) - rows_R)[rank_N]
        return Rows(
            rows_R=rows_R,
            row_N=place_N.to(torch.int32),
            marks_RT=None,
            sorted_U=key_U % max(tokens, 1),
        )
    marks_RT = torch.zeros(ranks, tokens, dtype=torch.bool, device=key_N.device)
    marks_RT.view(-1).index_fill_(0, key_N, True)
    rows_RT = marks_RT.cumsum(dim=1, dtype=torch.int32)
    return Rows(
        rows_R=marks_RT.sum(dim=1),
        row_N=rows_RT.view(-1).index_select(0, key_N).sub_(1),
        marks_RT=marks_RT,
        sorted_U=None,
    )


def _repeat(value: NDArray[np.generic], times: IntArray, device: torch.device) -> Tensor:
    """Each value (or row of values) as often as it says, on the device."""
    if device.type == "cpu":  # several times faster than torch
        return torch.from_numpy(np.repeat(value, times, axis=0))
    return torch.repeat_interleave(
        upload(value, device), upload(times, device), dim=0, output_size=int(times.sum())
    )


def _before(length_X: IntArray) -> IntArray:
    return np.cumsum(length_X) - length_X
