"""SYMI: every iteration as many instances of an expert as its share of the last iteration's load asks for.

Source: NSDI'26 pp. 75-92, arXiv 2504.19925, algorithm 1 (no public code). Inputs: the last call's counts for
placement, current counts for the split. Acts: every call. Moves: nothing extra; the optimizer's weight update, which
writes every slot anyway, delivers the new layout, and states stay sharded over all nodes. Slots: `slots_per_rank`,
resident per layer; n + the problem's extra slots unless given. With n slots per rank it equals fixed ownership.
Dropless by default; `capacity_factor` turns its capacity drop on (1.0 in the paper).
Ours: capacity counts (token, expert) pairs, and of an expert over its capacity every source loses its proportional
share. Start: equal popularity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.errors import PlanError
from lrmoe.planning.plan import LayerPlan, Traffic
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.policies._layout import check_option, make_plan, past_counts, split_evenly
from lrmoe.planning.problem import IntArray, Problem
from lrmoe.planning.quotas import split_quota

INFO = PolicyInfo(
    title="SYMI",
    source="NSDI'26 pp. 75-92, arXiv 2504.19925",
    inputs="history",
    acts="every call",
    moves="nothing extra: the optimizer's weight update delivers the new layout; states never move",
    slots="resident",
    drops=True,
    note="n + S slots per rank, the extra ones resident; dropless unless a capacity factor is set (1.0 in the paper)",
)


@dataclass(frozen=True, kw_only=True)
class Symi:
    """The SYMI planner.

    Attributes:
        slots_per_rank: slots of each rank, at least E / R; None: E / R plus the problem's extra slots.
        capacity_factor: pairs beyond capacity_factor * pairs / slots for each instance of an expert are not computed
            at all; None drops nothing.

    Raises:
        PlanError: an option out of range.
    """

    slots_per_rank: int | None = None
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        slots, factor = self.slots_per_rank, self.capacity_factor
        check_option(slots is None or slots >= 1, "slots_per_rank", slots, "None or at least 1")
        check_option(factor is None or factor > 0, "capacity_factor", factor, "None or positive")

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan one call."""
        slots = self._slots(problem)
        past_RE = past_counts(problem, 1)
        popularity_E = np.ones_like(problem.counts_E) if past_RE is None else past_RE.sum(axis=0)
        copies_E = instances(popularity_E, slots * problem.topology.ranks)
        copies_RE = _contiguous(copies_E, slots, problem.topology.ranks)
        sent_RE = self._within_capacity(problem, copies_E)
        overflow_RE = problem.counts_RE - sent_RE
        return make_plan(
            problem,
            copies_RE,
            split_evenly(sent_RE, copies_RE),
            traffic=_traffic(problem, slots),
            overflow_RE=overflow_RE if overflow_RE.any() else None,
        )

    def _slots(self, problem: Problem) -> int:
        n = problem.topology.experts_per_rank
        slots = n + problem.slots if self.slots_per_rank is None else self.slots_per_rank
        if slots < n:
            raise PlanError(
                f"slots_per_rank={slots}: must be at least experts / ranks = {n}, one slot for every expert"
            )
        return slots

    def _within_capacity(self, problem: Problem, copies_E: IntArray) -> IntArray:
        """Pairs that are computed, int64 (R, E)."""
        if self.capacity_factor is None:
            return problem.counts_RE
        slot_capacity = self.capacity_factor * problem.pairs / int(copies_E.sum())
        capacity_E = np.floor(slot_capacity * copies_E).astype(np.int64)
        return split_quota(np.minimum(capacity_E, problem.counts_E), problem.counts_RE)


def _traffic(problem: Problem, slots: int) -> Traffic:
    none_R = np.zeros(problem.topology.ranks, dtype=np.int64)
    extra_R = none_R + slots - problem.topology.experts_per_rank
    return Traffic(fetch_R=none_R, refetch_R=none_R, return_R=none_R, state_R=none_R, resident_R=extra_R)


def instances(popularity_E: IntArray, slots: int) -> IntArray:
    """Algorithm 1: `slots` instances in proportion to popularity, at least one of each expert, int64 (E,)."""
    total = int(popularity_E.sum())
    share_E = popularity_E / total if total else np.full(popularity_E.size, 1 / popularity_E.size)
    goal_E = share_E * slots
    count_E = np.floor(np.maximum(goal_E, 1)).astype(np.int64)
    excess_E = count_E - goal_E
    surplus = int(count_E.sum()) - slots
    for _ in range(surplus):
        expert = int(np.argmax(np.where(count_E > 1, excess_E, -np.inf)))
        count_E[expert] -= 1
        excess_E[expert] -= 1
    for _ in range(-surplus):
        expert = int(np.argmin(excess_E))
        count_E[expert] += 1
        excess_E[expert] += 1
    return count_E


def _contiguous(copies_E: IntArray, slots: int, ranks: int) -> IntArray:
    """Experts in id order over the slots, rank by rank, int64 (R, E)."""
    copies_RE = np.zeros((ranks, copies_E.size), dtype=np.int64)
    expert_C = np.repeat(np.arange(copies_E.size), copies_E)
    np.add.at(copies_RE, (np.arange(expert_C.size) // slots, expert_C), 1)
    return copies_RE
