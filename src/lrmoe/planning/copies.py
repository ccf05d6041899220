"""Which rank sends an expert's weights or gradients to which, and when: from the seats, alike on every rank.

    up to DIRECT copies              more: a binomial tree, rank by rank after the home
    home -> 1, 2, 3, 4               round 0: home -> 1     1: home -> 2, 1 -> 3     2: home -> 4, 1 -> 5, 2 -> 6 ...

Gradients go the same ways back: leaves first, each rank adding what it received to its own before it passes the sum on.
A rank takes in at most WINDOW gradients at a time, so what it holds is bounded however many copies there are: those,
and where home gradients are narrower than sums the sums in progress, at most WINDOW and one per hot expert at home.

Shape letters: R ranks, E experts, Q seats of all ranks, M messages (one expert each).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats

DIRECT = 4  # copies that a home serves itself
WINDOW = 2  # gradients that a rank takes in at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class Messages:
    """Messages of one expert each, in the order (round, receiver, expert, sender's place), int64 (M,) arrays.

    Attributes:
        ranks: number of ranks.
        expert_M, sender_M, receiver_M: what goes from where to where.
        round_M: a round ends, for the ranks that take part in it, before the next begins.
    """

    ranks: int
    expert_M: IntArray
    sender_M: IntArray
    receiver_M: IntArray
    round_M: IntArray

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return int(self.round_M[-1]) + 1 if self.round_M.size else 0

    @cached_property
    def window_R(self) -> IntArray:
        """Most messages that each rank receives in one round, int64 (R,)."""
        received = np.zeros((self.rounds, self.ranks), dtype=np.int64)
        np.add.at(received, (self.round_M, self.receiver_M), 1)
        return received.max(axis=0, initial=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tree:
    """Foreign copies, expert after expert, and their place in the tree: copy i of an expert is place i + 1."""

    expert_M: IntArray
    rank_M: IntArray
    above_M: IntArray
    level_M: IntArray
    levels_M: IntArray


def _tree(seats: Seats) -> _Tree:
    """Who is above each foreign copy, on which level (round of a broadcast), and how many levels its expert has."""
    topology = seats.topology
    foreign = np.flatnonzero(seats.foreign_Q)
    expert, rank = seats.expert_Q[foreign], seats.rank_Q[foreign]
    home = expert // topology.experts_per_rank
    order = np.lexsort(((rank - home) % topology.ranks, expert))
    expert, rank, home = expert[order], rank[order], home[order]
    first = np.searchsorted(expert, expert)
    copies = np.searchsorted(expert, expert, side="right") - first
    place = np.arange(expert.size) - first + 1
    hot = copies > DIRECT
    level = np.where(hot, _log2(place), 0)
    above = np.where(hot, place - (1 << level), 0)
    return _Tree(
        expert_M=expert,
        rank_M=rank,
        above_M=np.where(above > 0, rank[np.maximum(first + above - 1, 0)], home),
        level_M=level,
        levels_M=np.where(hot, _log2(copies) + 1, 1),
    )


def _log2(value: IntArray) -> IntArray:
    """Floor of the binary logarithm of positive integers."""
    return np.frexp(value.astype(np.float64))[1].astype(np.int64) - 1


def fetch_messages(seats: Seats) -> Messages:
    """Weights of every foreign seat, from the home or from a copy that has them by then; M = foreign seats."""
    tree = _tree(seats)
    return _messages(seats, tree.expert_M, tree.above_M, tree.rank_M, tree.level_M)


def return_messages(seats: Seats) -> Messages:
    """Gradients of every foreign seat (of a relay: with all below it) towards the home; M = foreign seats."""
    tree = _tree(seats)
    phase = tree.levels_M - 1 - tree.level_M
    order = np.lexsort((tree.expert_M, tree.above_M, phase))
    turn = _turn(phase[order] * seats.topology.ranks + tree.above_M[order]) // WINDOW
    turns_P = np.zeros(int(phase.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(turns_P, phase[order], turn + 1)
    round_M = np.empty_like(phase)
    round_M[order] = turn + (np.cumsum(turns_P) - turns_P)[phase[order]]
    return _messages(seats, tree.expert_M, tree.rank_M, tree.above_M, round_M)


def _turn(key: IntArray) -> IntArray:
    """Number of equal entries before each entry of a sorted array."""
    return np.arange(key.size) - np.searchsorted(key, key)


def _messages(
    seats: Seats, expert: IntArray, sender: IntArray, receiver: IntArray, when: IntArray
) -> Messages:
    order = np.lexsort((expert, receiver, when))  # stable: copies of one expert stay in the order of the tree
    return Messages(
        ranks=seats.topology.ranks,
        expert_M=expert[order],
        sender_M=sender[order],
        receiver_M=receiver[order],
        round_M=when[order],
    )


def fetch_experts_R(seats: Seats) -> IntArray:
    """Experts' weights that each rank allocates to fetch: its foreign seats and nothing else, int64 (R,).

    Weights are sent from where they lie and received where they are used.
    """
    return np.bincount(seats.rank_Q[seats.foreign_Q], minlength=seats.topology.ranks).astype(np.int64)


def return_experts_R(seats: Seats, *, narrow_foreign: bool = False, narrow_home: bool = False) -> IntArray:
    """Experts' gradients in the dtype of sums (fp32; fp64 for fp64) that each rank allocates to return, int64 (R,).

    Args:
        narrow_foreign: gradients of foreign seats come in a narrower dtype than sums and are widened first.
        narrow_home: gradients at home are narrower, so that sums in progress need room of their own.
    """
    messages = return_messages(seats)
    held = messages.window_R.copy()
    if narrow_foreign:
        held += fetch_experts_R(seats)
    if narrow_home:
        held += open_sums(seats, messages).max(axis=0, initial=0)
    return held


def open_sums(seats: Seats, messages: Messages) -> IntArray:
    """Sums at home that have begun and not ended, in each round on each rank, int64 (rounds, R)."""
    topology = seats.topology
    home_M = messages.receiver_M == messages.expert_M // topology.experts_per_rank
    expert, when = messages.expert_M[home_M], messages.round_M[home_M]
    change = np.zeros((messages.rounds + 1, topology.ranks), dtype=np.int64)
    first = np.full(topology.experts, messages.rounds, dtype=np.int64)
    last = np.full(topology.experts, -1, dtype=np.int64)
    np.minimum.at(first, expert, when)
    np.maximum.at(last, expert, when)
    summed = np.flatnonzero(last >= 0)
    home = summed // topology.experts_per_rank
    np.add.at(change, (first[summed], home), 1)
    np.add.at(change, (last[summed] + 1, home), -1)
    return np.cumsum(change, axis=0)[:-1]
