"""SmartMoE: now and then permute the experts over the ranks, by their average load.

Source: ATC'23 (usenix.org/conference/atc23/presentation/zhai); the artefact's mapping.py describes the greedy rule.
Inputs: past counts only. Acts: every `interval` calls. Moves: whole experts, weights and optimizer states, when they
change ranks; nothing in between. Slots: none, n experts per rank always.
Ours: optimizer states move with the weights (the artefact shows parameters only, which would train wrongly); one
layer call counts as one iteration; the offline choice among hybrid-parallel plans has no place in a layer call.
Start: fixed ownership.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.policies._layout import (
    check_option,
    due,
    home_layout,
    make_plan,
    past_counts,
    previous_layout,
    resident_traffic,
)
from lrmoe.planning.problem import IntArray, Problem

INFO = PolicyInfo(
    title="SmartMoE",
    source="ATC'23, usenix.org/conference/atc23/presentation/zhai; artefact thu-pacman/SmartMoE-AE (rule only)",
    inputs="history",
    acts="every 10 calls",
    moves="whole experts with their optimizer states, when the placement changes",
    slots="none",
    note="a permutation of experts; starts from fixed ownership; states move with weights (ours)",
)


@dataclass(frozen=True, kw_only=True)
class SmartMoE:
    """The SmartMoE planner.

    Attributes:
        interval: calls between two looks at the placement.
        window: past calls whose counts are averaged.

    Raises:
        PlanError: an option below 1.
    """

    interval: int = 10
    window: int = 2

    def __post_init__(self) -> None:
        for name in ("interval", "window"):
            check_option(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan one call."""
        old_E = self._owners_before(problem)
        past_RE = past_counts(problem, self.window)
        new_E = old_E
        if past_RE is not None and due(problem, self.interval, first=self.interval):
            new_E = _better(past_RE.sum(axis=0), old_E, problem.topology.ranks)
        old_RE, new_RE = _layout(old_E, problem), _layout(new_E, problem)
        traffic = resident_traffic(old_RE, new_RE, slots=0)
        return make_plan(problem, new_RE, problem.counts_RE[:, np.nonzero(new_RE)[1]], traffic=traffic)

    def _owners_before(self, problem: Problem) -> IntArray:
        """Owner of every expert in the last plan, or its home, int64 (E,)."""
        copies_RE = previous_layout(problem, problem.topology.experts_per_rank)
        if copies_RE is None:
            copies_RE = home_layout(problem.topology)
        return np.argmax(copies_RE, axis=0)


def _layout(owner_E: IntArray, problem: Problem) -> IntArray:
    copies_RE = np.zeros_like(problem.counts_RE)
    copies_RE[owner_E, np.arange(owner_E.size)] = 1
    return copies_RE


def _better(load_E: IntArray, owner_E: IntArray, ranks: int) -> IntArray:
    """The greedy permutation if its most loaded rank has less than now, else the owners as they are, int64 (E,)."""
    new_E = greedy(load_E, owner_E, ranks)
    new_R, old_R = np.zeros((2, ranks), dtype=np.int64)
    np.add.at(new_R, new_E, load_E)
    np.add.at(old_R, owner_E, load_E)
    return new_E if new_R.max() < old_R.max() else owner_E


def greedy(load_E: IntArray, owner_E: IntArray, ranks: int) -> IntArray:
    """Experts by load, each to the least loaded rank with a free place; ties keep the owner, int64 (E,)."""
    places_R = np.full(ranks, load_E.size // ranks)
    load_R = np.zeros(ranks, dtype=np.int64)
    result_E = np.empty_like(owner_E)
    full = np.iinfo(np.int64).max
    for expert in np.argsort(-load_E, kind="stable").tolist():
        open_R = np.where(places_R > 0, load_R, full)
        rank, owner = int(np.argmin(open_R)), int(owner_E[expert])
        if places_R[owner] > 0 and load_R[owner] == load_R[rank]:
            rank = owner
        result_E[expert] = rank
        load_R[rank] += load_E[expert]
        places_R[rank] -= 1
    return result_E
