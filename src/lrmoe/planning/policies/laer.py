"""LAER-MoE: every call each rank gathers the experts that the last call's loads suggest, out of shards on all ranks.

Source: ASPLOS'26, arXiv 2602.11686; PKU-DAIR/Hetu-Galvatron branch laer-moe (solver.py, greedy_balancer.cpp; rule
only, that branch carries no licence). Inputs: the last call's counts for placement, current counts for routing.
Acts: every call. Moves: the C experts of every rank are rebuilt from shards each forward (and again in backward),
their gradients scattered back; optimizer states are sharded 1/R everywhere and never move. Slots: C = n + `slots`
live ones, rebuilt per layer (shared). Copies of one expert may share a rank.
Ours: nodes come from the topology (the code fixes 8 ranks); the time estimate counts whole pairs; a traffic of
(R - 1) / R * C experts is rounded up. Start: every expert at home, extra slots filled evenly.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lrmoe.planning.plan import LayerPlan, Traffic
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.policies._layout import (
    check_option,
    check_slots,
    even_layout,
    make_plan,
    past_counts,
    slots_of,
    split_evenly,
)
from lrmoe.planning.problem import IntArray, Problem, Topology

INFO = PolicyInfo(
    title="LAER-MoE",
    source="ASPLOS'26, arXiv 2602.11686; PKU-DAIR/Hetu-Galvatron branch laer-moe (rule only)",
    inputs="history",
    acts="every call",
    moves="all C experts of every rank gathered from shards forward and backward, gradients scattered",
    slots="shared",
    note="C = n + S live slots; needs sharded storage of weights; nodes of the topology instead of a fixed 8",
)


@dataclass(frozen=True, kw_only=True)
class Laer:
    """The LAER-MoE planner.

    Attributes:
        slots: live slots beyond E / R; None takes the problem's.
        regather: whether backward gathers the weights again.
        pair_bytes: bytes of a pair's row on the wire.
        pair_seconds: seconds of a pair's forward.
        checkpoint: whether activations are recomputed (one more forward in the time estimate).
        self_bandwidth, intra_bandwidth, inter_bandwidth: bytes/s to itself, inside a node, between nodes.

    Raises:
        PlanError: an option out of range.
    """

    slots: int | None = None
    regather: bool = True
    pair_bytes: float = 4096.0
    pair_seconds: float = 2.36e-8
    checkpoint: bool = False
    self_bandwidth: float = 1e18
    intra_bandwidth: float = 216.27e9
    inter_bandwidth: float = 88.95e9

    def __post_init__(self) -> None:
        check_slots(self.slots)
        for name in ("pair_bytes", "pair_seconds", "self_bandwidth", "intra_bandwidth", "inter_bandwidth"):
            check_option(getattr(self, name) > 0, name, getattr(self, name), "positive")

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan one call."""
        topology, extra = problem.topology, slots_of(problem, self.slots)
        past_RE = past_counts(problem, 1)
        copies_RE = even_layout(topology, extra)
        if past_RE is not None:
            copies_RE = self._best(past_RE, topology, topology.experts_per_rank + extra)
        # "Lite" routing: evenly over the copies in the source's node, over all copies where it has none.
        assign_RJ = split_evenly(problem.counts_RE, copies_RE, topology.node_R)
        return make_plan(problem, copies_RE, assign_RJ, traffic=self._traffic(copies_RE))

    def _best(self, past_RE: IntArray, topology: Topology, per_rank: int) -> IntArray:
        """The candidate layout with the least estimated time on the last call's counts."""
        load_E = past_RE.sum(axis=0)
        layouts = [
            place(load_E, count_E, per_rank, topology) for count_E in _candidates(load_E, per_rank, topology)
        ]
        if len(layouts) == 1:
            return layouts[0]
        return min(layouts, key=lambda copies_RE: self._seconds(past_RE, copies_RE, topology))

    def _seconds(self, past_RE: IntArray, copies_RE: IntArray, topology: Topology) -> float:
        """4 exchanges of all sources plus 3 (or 4) forwards of the most loaded rank."""
        assign_RJ = split_evenly(past_RE, copies_RE, topology.node_R)
        sent_RR = np.zeros((topology.ranks, topology.ranks), dtype=np.int64)
        np.add.at(sent_RR.T, np.nonzero(copies_RE)[0], assign_RJ.T)
        same = topology.node_R[:, None] == topology.node_R
        inside, local = int(sent_RR[same].sum()), int(np.trace(sent_RR))
        exchange = self.pair_bytes * (
            local / self.self_bandwidth
            + (inside - local) / self.intra_bandwidth
            + (int(sent_RR.sum()) - inside) / self.inter_bandwidth
        )
        compute = self.pair_seconds * int(sent_RR.sum(axis=0).max())
        return 4 * exchange + (3 + self.checkpoint) * compute

    def _traffic(self, copies_RE: IntArray) -> Traffic:
        ranks = copies_RE.shape[0]
        gathered_R = -(-(copies_RE.sum(axis=1) * (ranks - 1)) // ranks)
        none_R = np.zeros_like(gathered_R)
        return Traffic(
            fetch_R=gathered_R,
            refetch_R=gathered_R if self.regather else none_R,
            return_R=gathered_R,
            state_R=none_R,
            resident_R=none_R,
        )


def floor_copies(topology: Topology, per_rank: int) -> int:
    """Copies that every expert has at least: one a node where all slots together allow it, one otherwise."""
    nodes = topology.nodes
    return nodes if nodes * topology.experts <= topology.ranks * per_rank else 1


def _candidates(load_E: IntArray, per_rank: int, topology: Topology) -> Iterator[IntArray]:
    """Numbers of copies to try: in proportion to load, and equal ones where they come out whole."""
    yield proportional(load_E, per_rank, topology)
    copies, rest = divmod(topology.ranks * per_rank, topology.experts)
    if rest == 0:
        yield np.full(topology.experts, copies, dtype=np.int64)


def proportional(load_E: IntArray, per_rank: int, topology: Topology) -> IntArray:
    """Copies of each expert by a heap on load per copy, int64 (E,).

    Steps are one copy, and one a node for experts that have as many as there are nodes.
    """
    count_E = np.full(topology.experts, floor_copies(topology, per_rank), dtype=np.int64)
    left = topology.ranks * per_rank - int(count_E.sum())
    heap = [
        (-load / count, expert)
        for expert, (load, count) in enumerate(zip(load_E.tolist(), count_E.tolist(), strict=True))
    ]
    heapq.heapify(heap)
    while left > 0 and heap:
        _, expert = heapq.heappop(heap)
        step = topology.nodes if count_E[expert] >= topology.nodes else 1
        if step > left:
            continue
        count_E[expert] += step
        left -= step
        heapq.heappush(heap, (-int(load_E[expert]) / int(count_E[expert]), expert))
    return count_E


def place(load_E: IntArray, count_E: IntArray, per_rank: int, topology: Topology) -> IntArray:
    """Copies by load per copy, each on the least loaded rank with room in the nodes that hold fewest copies of it.

    Returns:
        int64 (R, E); a rank may hold an expert twice.
    """
    copies_RE = np.zeros((topology.ranks, topology.experts), dtype=np.int64)
    room_R = np.full(topology.ranks, per_rank)
    load_R = np.zeros(topology.ranks)
    each_E = load_E / count_E
    for expert in np.argsort(-each_E, kind="stable").tolist():
        in_node = np.zeros(topology.nodes, dtype=np.int64)
        for _ in range(int(count_E[expert])):
            open_R = room_R > 0
            copies_R = in_node[topology.node_R]
            open_R &= copies_R == copies_R[open_R].min()
            rank = int(np.argmin(np.where(open_R, load_R, np.inf)))
            copies_RE[rank, expert] += 1
            in_node[topology.node_R[rank]] += 1
            load_R[rank] += each_E[expert]
            room_R[rank] -= 1
    return copies_RE
