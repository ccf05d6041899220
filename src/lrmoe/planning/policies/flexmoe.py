"""FlexMoE: when the monitored balance is bad, expand, shrink and migrate copies while a cost model sees a gain.

Source: SIGMOD'23, arXiv 2304.03946 (abstract; no full text or code found). Two public reimplementations give a rule:
`variant="laer"` follows LAER-MoE's (expand, shrink, migrate; PKU-DAIR/Hetu-Galvatron branch laer-moe, rule only),
`variant="pack"` EP_balance's (expand, then pack). Inputs: past counts for the layout, current counts for the split.
Acts: where the most loaded rank of the last call, under the layout it would meet now, exceeds `threshold` mean loads;
looked at in the first call with a history and every `interval` calls after it (SYMI reports 50 to 100 iterations).
Moves: a copy's weights and optimizer states when it appears; gradients are summed over copies every call. Slots: n +
`slots` per rank, resident per layer. Copies of one expert may share a rank.
Ours: the threshold's default, the seconds in variant pack, several nodes in variant laer where an expert has no copy
in a node (that node is passed over). Start: every expert at home; variant laer fills its extra slots evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.policies._layout import (
    check_option,
    check_slots,
    due,
    even_layout,
    home_layout,
    make_plan,
    past_counts,
    previous_layout,
    resident_traffic,
    slot_loads,
    slots_of,
    split_evenly,
)
from lrmoe.planning.policies.laer import floor_copies, place
from lrmoe.planning.problem import IntArray, Problem, Topology

INFO = PolicyInfo(
    title="FlexMoE",
    source="SIGMOD'23, arXiv 2304.03946 (abstract); rule from two public reimplementations",
    inputs="history",
    acts="every 50 calls, above 1.2 mean loads",
    moves="weights and optimizer states of new copies; gradients summed over copies every call",
    slots="resident",
    note="variant pack by default (the better balanced), laer as an option; threshold and interval are ours",
)

_ROUNDS = 10  # of variant laer


@dataclass(frozen=True, kw_only=True)
class FlexMoE:
    """The FlexMoE planner.

    Attributes:
        variant: "laer" or "pack", see the module.
        slots: extra slots per rank; None takes the problem's.
        threshold: largest over mean rank load above which the layout is changed; in variant pack also the largest
            copy over the mean rank load above which a further copy is considered.
        interval: calls between two looks.
        pair_seconds: seconds of one pair's forward and backward (variant pack).
        sync_seconds: seconds to all-reduce the gradients of one further copy (variant pack).

    Raises:
        PlanError: an option out of range.
    """

    variant: str = "pack"
    slots: int | None = None
    threshold: float = 1.2
    interval: int = 50
    pair_seconds: float = 7.1e-8
    sync_seconds: float = 3.8e-4

    def __post_init__(self) -> None:
        check_option(self.variant in ("laer", "pack"), "variant", self.variant, "'laer' or 'pack'")
        check_slots(self.slots)
        check_option(self.threshold >= 1, "threshold", self.threshold, "at least 1")
        check_option(self.interval >= 1, "interval", self.interval, "at least 1")
        check_option(self.pair_seconds > 0, "pair_seconds", self.pair_seconds, "positive")
        check_option(self.sync_seconds >= 0, "sync_seconds", self.sync_seconds, "at least 0")

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan one call."""
        topology, extra = problem.topology, slots_of(problem, self.slots)
        per_rank = topology.experts_per_rank + extra
        old_RE = previous_layout(problem, per_rank)
        if old_RE is None:
            old_RE = self._start(topology, extra)
        new_RE = old_RE
        past_RE = past_counts(problem, 1)
        if past_RE is not None and due(problem, self.interval, first=1):
            load_E = past_RE.sum(axis=0)
            if self.triggered(load_E, old_RE):
                new_RE = self._changed(load_E, old_RE, topology, per_rank)
        traffic = resident_traffic(old_RE, new_RE, slots=extra)
        node_R = topology.node_R if self.variant == "laer" else None
        assign_RJ = split_evenly(problem.counts_RE, new_RE, node_R)
        return make_plan(problem, new_RE, assign_RJ, traffic=traffic)

    def triggered(self, load_E: IntArray, copies_RE: IntArray) -> bool:
        """Whether these loads (E,) are too uneven under this layout (R, E)."""
        load_R = slot_loads(load_E, copies_RE)
        return int(load_R.max()) * load_R.size > self.threshold * int(load_E.sum())

    def _start(self, topology: Topology, extra: int) -> IntArray:
        if self.variant == "pack":
            return home_layout(topology)
        per_rank = topology.experts_per_rank + extra
        floor = floor_copies(topology, per_rank)
        if floor == 1:
            return even_layout(topology, extra)
        one_E = np.ones(topology.experts, dtype=np.int64)
        count_E = np.full(topology.experts, floor, dtype=np.int64)
        return place(one_E, count_E, per_rank, topology)

    def _changed(self, load_E: IntArray, copies_RE: IntArray, topology: Topology, per_rank: int) -> IntArray:
        if self.variant == "laer":
            return _rounds(load_E, copies_RE, topology, per_rank)
        return pack(load_E, self._copies(load_E, topology, per_rank), per_rank, topology.ranks)

    def _copies(self, load_E: IntArray, topology: Topology, per_rank: int) -> IntArray:
        """Variant pack: copies of each expert, int64 (E,); one more for the largest while it pays for its sum."""
        count_E = np.ones(topology.experts, dtype=np.int64)
        mean = int(load_E.sum()) / topology.ranks
        free = topology.ranks * per_rank - topology.experts
        while free > 0:
            each_E = load_E / count_E
            top = int(np.argmax(each_E))
            if each_E[top] <= self.threshold * mean:
                break
            trial_E = count_E.copy()
            trial_E[top] += 1
            now = max(float(each_E.max()), mean) * self.pair_seconds
            then = max(float((load_E / trial_E).max()), mean) * self.pair_seconds + self.sync_seconds
            if then >= now:
                break
            count_E, free = trial_E, free - 1
        return count_E


def pack(load_E: IntArray, count_E: IntArray, per_rank: int, ranks: int) -> IntArray:
    """Copies by load, each to the least loaded rank with a free slot, int64 (R, E)."""
    copies_RE = np.zeros((ranks, load_E.size), dtype=np.int64)
    room_R, load_R = np.full(ranks, per_rank), np.zeros(ranks)
    each_E = load_E / count_E
    for expert in np.argsort(-each_E, kind="stable").tolist():
        for _ in range(int(count_E[expert])):
            rank = int(np.argmin(np.where(room_R > 0, load_R, np.inf)))
            copies_RE[rank, expert] += 1
            load_R[rank] += each_E[expert]
            room_R[rank] -= 1
    return copies_RE


def _rounds(load_E: IntArray, copies_RE: IntArray, topology: Topology, per_rank: int) -> IntArray:
    """Variant laer: up to ten rounds, each kept if the highest load or the spread of loads falls."""
    for _ in range(_ROUNDS):
        high, low = _extremes(load_E, copies_RE)
        if high <= low:
            break
        trial_RE = _round(load_E, copies_RE, topology, per_rank)
        if trial_RE is None:
            break
        new_high, new_low = _extremes(load_E, trial_RE)
        if new_high >= high and new_high * low >= high * new_low:
            break
        copies_RE = trial_RE
    return copies_RE


def _extremes(load_E: IntArray, copies_RE: IntArray) -> tuple[int, int]:
    """Highest and lowest rank load, as Python integers: their products may leave int64."""
    load_R = slot_loads(load_E, copies_RE)
    return int(load_R.max()), int(load_R.min())


def _round(load_E: IntArray, copies_RE: IntArray, topology: Topology, per_rank: int) -> IntArray | None:
    """One more copy of the expert with most load per copy in every node, for one of the expert with least, or None."""
    count_E = copies_RE.sum(axis=0)
    each_E = load_E // count_E
    hot = int(np.argmax(each_E))
    spare_E = count_E > floor_copies(topology, per_rank)
    spare_E[hot] = False
    if not spare_E.any():
        return None
    cold = int(np.argmin(np.where(spare_E, each_E, np.iinfo(np.int64).max)))
    copies_RE = copies_RE.copy()
    load_R = slot_loads(load_E, copies_RE)
    for node in range(topology.nodes):
        inside_R = topology.node_R == node
        if copies_RE[:, cold].sum() > floor_copies(topology, per_rank) and copies_RE[inside_R, cold].any():
            _swap(hot, cold, each_E, load_R, copies_RE, inside_R, per_rank)
    return copies_RE


def _swap(
    hot: int,
    cold: int,
    each_E: IntArray,
    load_R: IntArray,
    copies_RE: IntArray,
    inside_R: np.ndarray,
    per_rank: int,
) -> None:
    """Give the hot expert a copy in one node in place of a cold one. In place."""
    most = np.iinfo(np.int64).max
    giver = int(np.argmin(np.where(inside_R & (copies_RE[:, cold] > 0), load_R, most)))
    takers_R = inside_R & (copies_RE[:, hot] > 0) & (copies_RE[:, hot] < per_rank)
    taker = int(np.argmin(np.where(takers_R, load_R, most))) if takers_R.any() else giver
    copies_RE[giver, cold] -= 1
    if taker == giver:
        copies_RE[giver, hot] += 1
        return
    others_E = (copies_RE[taker] > 0) & (np.arange(each_E.size) != hot)
    moved = int(np.argmax(np.where(others_E, each_E, -1)))
    copies_RE[taker, hot] += 1
    copies_RE[taker, moved] -= 1
    copies_RE[giver, moved] += 1
