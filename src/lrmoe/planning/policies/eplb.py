"""EPLB: replicate the experts that were hot, pack the copies with equal counts per rank, every few calls.

Source: deepseek-ai/EPLB eplb.py (MIT), the hierarchical and the global mode. Inputs: past counts for the layout,
current counts for the split. Acts: at the first call that has a history and every `interval` calls after it.
Moves: any slot may change hands; its weights and optimizer states move then. Slots: `slots` extra ones per rank,
resident per layer. Copies of one expert may share a rank.
Ours: the load estimate is the mean of the last `window` calls (the repository leaves it to the user), pairs are
spread evenly over copies, optimizer states live with every copy (EPLB itself is for inference), which ranks get
which pack is left as the algorithm numbers them. Start: every expert at home, extra slots filled evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.errors import PlanError
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.policies._layout import (
    check_option,
    check_slots,
    due,
    even_layout,
    make_plan,
    past_counts,
    previous_layout,
    resident_traffic,
    slots_of,
    split_evenly,
)
from lrmoe.planning.problem import IntArray, Problem

INFO = PolicyInfo(
    title="EPLB",
    source="github.com/deepseek-ai/EPLB (MIT)",
    inputs="history",
    acts="first call with a history, then every 3 calls",
    moves="weights and optimizer states of every slot that changes",
    slots="resident",
    note="mean of the last 3 calls as load estimate, even split over copies, states with every copy (ours)",
)


@dataclass(frozen=True, kw_only=True)
class EPLB:
    """The EPLB planner.

    Attributes:
        mode: "auto" (hierarchical where the groups divide over the nodes, as the repository decides),
            "hierarchical" or "global".
        groups: expert groups (group-limited routing); 1 where the model has none.
        slots: extra slots per rank; None takes the problem's.
        interval: calls between two layouts.
        window: past calls averaged into the load estimate.

    Raises:
        PlanError: an option out of range, or groups that do not divide over nodes and experts.
    """

    mode: str = "auto"
    groups: int = 1
    slots: int | None = None
    interval: int = 3
    window: int = 3

    def __post_init__(self) -> None:
        check_option(
            self.mode in ("auto", "hierarchical", "global"),
            "mode",
            self.mode,
            "'auto', 'hierarchical' or 'global'",
        )
        for name in ("groups", "interval", "window"):
            check_option(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        check_slots(self.slots)

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan one call."""
        topology, extra = problem.topology, slots_of(problem, self.slots)
        per_rank = topology.experts_per_rank + extra
        old_RE = previous_layout(problem, per_rank)
        if old_RE is None:
            old_RE = even_layout(topology, extra)
        new_RE = old_RE
        past_RE = past_counts(problem, self.window)
        if past_RE is not None and due(problem, self.interval, first=1):
            new_RE = self._layout(past_RE.sum(axis=0), problem, per_rank)
        traffic = resident_traffic(old_RE, new_RE, slots=extra)
        return make_plan(problem, new_RE, split_evenly(problem.counts_RE, new_RE), traffic=traffic)

    def _layout(self, load_E: IntArray, problem: Problem, per_rank: int) -> IntArray:
        topology = problem.topology
        groups, nodes = self.groups, topology.nodes
        if topology.experts % groups:
            raise PlanError(f"groups={groups}: must divide experts={topology.experts}")
        if self.mode == "hierarchical" and groups % nodes:
            raise PlanError(f"groups={groups}: mode='hierarchical' needs a multiple of nodes={nodes}")
        if self.mode == "global" or groups % nodes:
            groups, nodes = 1, 1
        load_G = load_E.reshape(groups, -1).sum(axis=1)
        node_G = balanced_packing(load_G.astype(np.float64), nodes)
        copies_RE = np.zeros((topology.ranks, topology.experts), dtype=np.int64)
        ranks = topology.ranks // nodes
        for node in range(nodes):
            size = topology.experts // groups
            experts = (np.flatnonzero(node_G == node)[:, None] * size + np.arange(size)).reshape(-1)
            count = replicate(load_E[experts], ranks * per_rank)
            copy_expert = np.repeat(experts, count)
            weight = np.repeat(load_E[experts] / count, count)
            rank = balanced_packing(weight, ranks) + node * ranks
            np.add.at(copies_RE, (rank, copy_expert), 1)
        return copies_RE


def replicate(load_E: IntArray, slots: int) -> IntArray:
    """Copies of each expert: one each, every further slot to the expert with the most load per copy, int64 (E,)."""
    count_E = np.ones(load_E.size, dtype=np.int64)
    for _ in range(slots - load_E.size):
        count_E[int(np.argmax(load_E / count_E))] += 1
    return count_E


def balanced_packing(weight_I: np.ndarray, packs: int) -> IntArray:
    """Items by weight, each into the lightest pack with a free place; equal numbers per pack. Pack of each, int64 (I,).

    Args:
        weight_I: float64 (I,), I a multiple of packs.
    """
    room = np.full(packs, weight_I.size // packs)
    total = np.zeros(packs)
    result = np.empty(weight_I.size, dtype=np.int64)
    for item in np.argsort(-weight_I, kind="stable").tolist():
        pack = int(np.argmin(np.where(room > 0, total, np.inf)))
        result[item] = pack
        total[pack] += weight_I[item]
        room[pack] -= 1
    return result
