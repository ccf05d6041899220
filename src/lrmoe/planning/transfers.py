"""Where kept pairs run in backward, once it is known how many of them each source has at each seat.

A kept pair stays where its forward ran as long as the plan's backward load of that seat allows; the rest goes to the
seats of the same expert that have room. Every rank computes the same table from the same counts.

Shape letters: R ranks, Q seats, X transfers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """Kept pairs of source `source_X` that ran at seat `from_X` and are run backward at seat `to_X`; int64 (X,) each.

    Sorted by (source, from, to); `pairs_X` is positive. Pairs that stay have from = to.
    """

    source_X: IntArray
    from_X: IntArray
    to_X: IntArray
    pairs_X: IntArray

    def table(self, ranks: int, seats: int, *, stay: bool) -> IntArray:
        """Pairs of each (source, backward seat) that stay, or that move, int64 (R, Q)."""
        mine = (self.from_X == self.to_X) == stay
        found = np.zeros((ranks, seats), dtype=np.int64)
        np.add.at(found, (self.source_X[mine], self.to_X[mine]), self.pairs_X[mine])
        return found


def transfers(kept_RQ: IntArray, seats: Seats) -> Transfers:
    """Least moves from the forward's places to the plan's backward loads.

    Args:
        kept_RQ: int64 (R, Q), kept pairs of each source at their forward seats. Per expert they sum to the seats'
            backward loads.
    """
    over_Q = kept_RQ.sum(axis=0) - seats.backward_Q
    leave_RQ = _leaving(kept_RQ, np.maximum(over_Q, 0))
    source, place = np.nonzero(kept_RQ - leave_RQ)
    stay = (kept_RQ - leave_RQ)[source, place]
    moved = _overlaps(leave_RQ, np.maximum(-over_Q, 0), seats.by_expert_Q)
    found = np.concatenate((np.stack((source, place, place, stay)), moved), axis=1)
    found = found[:, np.lexsort((found[2], found[2] != found[1], found[1], found[0]))]
    return Transfers(source_X=found[0], from_X=found[1], to_X=found[2], pairs_X=found[3])


def _leaving(kept_RQ: IntArray, over_Q: IntArray) -> IntArray:
    """Pairs of each (source, seat) that leave, int64 (R, Q): those of the last sources first."""
    upto_RQ = np.cumsum(kept_RQ[::-1], axis=0)[::-1]
    return np.clip(over_Q - (upto_RQ - kept_RQ), 0, kept_RQ)


def _overlaps(leave_RQ: IntArray, room_Q: IntArray, by_expert_Q: IntArray) -> IntArray:
    """Who goes where, int64 (4, X): what leaves and what has room, laid end to end expert after expert."""
    ranks = leave_RQ.shape[0]
    leave = leave_RQ[:, by_expert_Q].T.reshape(-1)  # (seat by expert, source)
    ends_from, ends_to = np.cumsum(leave), np.cumsum(room_Q[by_expert_Q])
    ends = np.union1d(ends_from[leave > 0], ends_to[room_Q[by_expert_Q] > 0])
    pairs = np.diff(ends, prepend=0)
    cell = np.searchsorted(ends_from, ends)
    target = by_expert_Q[np.searchsorted(ends_to, ends)]
    return np.stack((cell % ranks, by_expert_Q[cell // ranks], target, pairs)).astype(np.int64)
