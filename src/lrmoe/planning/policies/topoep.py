"""TopoEP stand-in: TAOT. No public description of TopoEP exists; TAOT serves as the topology-aware baseline.

Source: TAOT (Baidu Baige), arXiv 2608.03676, design issue baidu-baige/LoongForge 28, and the assignment algorithms
of a public Megatron-LM fork (offloading_planner.py); it extends ECHO (Megatron-LM pull request 2368).
Inputs: counts of the current call. Acts: every layer call. Moves: weights of clones forward and again backward (the
slots serve all layers), gradients home; optimizer states stay. Slots: `slots` clone slots per rank, shared.
Three phases: transport of excess between ranks (Sinkhorn) as a hint, slot by slot a proposal matching of spilling
experts and ranks, a split per source (proportional floors, then intervals).
The fork's other split ("auction", which serves a source's own rank last) is not offered.
Ours: whole-pair means (pairs // R) as in ECHO, ties to the lower index, the exponential from its series so that every
machine gets the same bits. On one node hint and bonus do not tell ranks apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.policies._layout import (
    check_option,
    check_slots,
    home_layout,
    make_plan,
    slots_of,
    split_each,
)
from lrmoe.planning.problem import FloatArray, IntArray, Problem
from lrmoe.planning.split import bfs_dfs

INFO = PolicyInfo(
    title="TopoEP stand-in (TAOT)",
    source="no public description of TopoEP; TAOT, arXiv 2608.03676, extending ECHO (Megatron-LM PR 2368)",
    inputs="current counts",
    acts="every call",
    moves="clone weights forward and again backward, gradients home",
    slots="shared",
    note="a stand-in: TAOT is the topology-aware baseline in TopoEP's place",
)


@dataclass(frozen=True, kw_only=True)
class TopoEP:
    """The TAOT planner, standing in for TopoEP.

    Attributes:
        slots: clone slots per rank (K); None takes the problem's.
        cross_cost: cost of a transfer between nodes, in transfers inside one (lambda).
        iterations: Sinkhorn iterations.

    Raises:
        PlanError: an option out of range.
    """

    slots: int | None = None
    cross_cost: float = 3.0
    iterations: int = 50

    def __post_init__(self) -> None:
        check_slots(self.slots)
        check_option(self.cross_cost >= 1, "cross_cost", self.cross_cost, "at least 1")
        check_option(self.iterations >= 1, "iterations", self.iterations, "at least 1")

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan one call."""
        copies_RE = home_layout(problem.topology)
        quota_RE = np.zeros_like(copies_RE)
        for expert, rank, pairs in self.clones(problem):
            copies_RE[rank, expert] = 1
            quota_RE[rank, expert] = pairs
        home_E = problem.topology.home_E

        def spill(expert: int, hosts_J: IntArray) -> IntArray:
            counts_R = problem.counts_RE[:, expert]
            sent_RJ = np.zeros((counts_R.size, hosts_J.size), dtype=np.int64)
            away_J = hosts_J != home_E[expert]
            sent_RJ[:, away_J] = bfs_dfs(counts_R, quota_RE[hosts_J[away_J], expert])
            sent_RJ[:, ~away_J] = (counts_R - sent_RJ.sum(axis=1))[:, None]
            return sent_RJ

        return make_plan(problem, copies_RE, split_each(problem.counts_RE, copies_RE, spill))

    def clones(self, problem: Problem) -> list[tuple[int, int, int]]:
        """Expert, rank and pairs of every clone, in the order of matching."""
        topology = problem.topology
        load_R = problem.counts_E.reshape(topology.ranks, -1).sum(axis=1)
        mean = problem.pairs // topology.ranks
        spill_E = spills(problem.counts_E, topology.ranks, mean)
        experts = np.flatnonzero(spill_E)
        if experts.size == 0:
            return []
        spare_R = np.maximum(mean - load_R, 0)
        prefer_XR = self._preference(problem, experts, load_R, mean)
        spill_X = spill_E[experts]
        open_XR = np.ones(prefer_XR.shape, dtype=bool)
        open_XR[np.arange(experts.size), topology.home_E[experts]] = False
        found = []
        for _ in range(slots_of(problem, self.slots)):
            for x, rank, pairs in _match(prefer_XR, spill_X, spare_R, open_XR):
                found.append((int(experts[x]), rank, pairs))
        return found

    def _preference(self, problem: Problem, experts: IntArray, load_R: IntArray, mean: int) -> FloatArray:
        """What a rank is worth to a spilling expert besides its room, in pairs, float64 (X, R)."""
        topology = problem.topology
        home_X = topology.home_E[experts]
        plan_RR, excess_R = self._transport(load_R, topology.node_R)
        hint_XR = plan_RR[home_X] / np.maximum(excess_R[home_X], 1)[:, None]
        same_XR = topology.node_R[home_X][:, None] == topology.node_R
        bonus_XR = np.where(same_XR, 1.0, 1 / self.cross_cost)
        bonus_XR[np.arange(experts.size), home_X] = 0.0
        alpha = mean / topology.experts_per_rank
        return alpha * bonus_XR + 0.1 * alpha * hint_XR

    def _transport(self, load_R: IntArray, node_R: IntArray) -> tuple[FloatArray, FloatArray]:
        """Phase 1: excess of each rank (R,) spread over the room of others by entropic transport, (R, R)."""
        mean = load_R.sum() / load_R.size
        excess_R, room_R = np.maximum(load_R - mean, 0.0), np.maximum(mean - load_R, 0.0)
        if excess_R.sum() > room_R.sum() > 0:
            excess_R = excess_R * (room_R.sum() / excess_R.sum())
        near, far = _exp_minus(1 / self.cross_cost), _exp_minus(1.0)
        kernel_RR = np.where(node_R[:, None] == node_R, near, far)
        u_R, v_R = np.ones(load_R.size), np.ones(load_R.size)
        for _ in range(self.iterations):
            # The kernel is symmetric; sums over axis 0 add row by row, in one order on every machine.
            u_R = excess_R / np.maximum((kernel_RR * v_R[:, None]).sum(axis=0), 1e-300)
            v_R = room_R / np.maximum((kernel_RR * u_R[:, None]).sum(axis=0), 1e-300)
        plan_RR = u_R[:, None] * kernel_RR * v_R
        over_R = plan_RR.sum(axis=0)
        shrink_R = np.where(over_R > room_R, room_R / np.maximum(over_R, 1e-300), 1.0)
        return plan_RR * shrink_R, excess_R


def _exp_minus(x: float) -> float:
    """exp(-x) for 0 <= x <= 1 from its series: multiplications and additions only."""
    term, total = 1.0, 1.0
    for k in range(1, 25):
        term = term * x / k
        total = total + term
    return 1 / total


def spills(load_E: IntArray, ranks: int, mean: int) -> IntArray:
    """ECHO's spill of each expert: small experts fill their rank up to the mean, the rest spills, int64 (E,)."""
    load_RL = load_E.reshape(ranks, -1)
    order_RL = np.argsort(load_RL, axis=1, kind="stable")
    over_RL = np.maximum(np.cumsum(np.take_along_axis(load_RL, order_RL, axis=1), axis=1) - mean, 0)
    spill_RL = np.empty_like(load_RL)
    np.put_along_axis(spill_RL, order_RL, np.diff(over_RL, axis=1, prepend=0), axis=1)
    return spill_RL.reshape(-1)


def _match(
    prefer_XR: FloatArray, spill_X: IntArray, spare_R: IntArray, open_XR: np.ndarray
) -> list[tuple[int, int, int]]:
    """Phase 2 for one slot: ranks propose to experts, experts accept their best, until nobody proposes.

    Updates what spills and what is spare in place. A match uses up one of the two, so no (expert, rank) comes twice.
    """
    free_R = np.ones(spare_R.size, dtype=bool)
    found: list[tuple[int, int, int]] = []
    while True:
        valid_XR = open_XR & free_R & (spill_X > 0)[:, None] & (spare_R > 0)
        score_XR = np.where(valid_XR, np.minimum(spill_X[:, None], spare_R) + prefer_XR, -np.inf)
        best_R = np.argmax(score_XR, axis=0)
        value_R = score_XR[best_R, np.arange(spare_R.size)]
        if not np.isfinite(value_R).any():
            return found
        for x in np.unique(best_R[np.isfinite(value_R)]).tolist():
            rank = int(np.argmax(np.where(best_R == x, value_R, -np.inf)))
            pairs = int(min(spill_X[x], spare_R[rank]))
            spill_X[x] -= pairs
            spare_R[rank] -= pairs
            free_R[rank] = False
            found.append((x, rank, pairs))
