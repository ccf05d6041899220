"""UltraEP: replicas of overloaded experts, solved anew for every call from its exact counts.

Source: arXiv 2606.04101 and the solver of its public code (Dots-Infra/UltraEP v1.0.0, csrc/kernels/placement.cu).
Inputs: exact counts of the current call. Acts: every layer call; backward reuses the plan.
Moves: replica weights in forward and again in backward, fp32 gradients back to the masters; masters and optimizer
states stay. Slots: `slots` per rank, shared by all layers, at most one instance of an expert on a rank.
Ours: the search between coarse bound and highest load probes three points a round, as four lanes would; where the
topology has several nodes each node is one NVLink domain with a mean of its own.
"""

from __future__ import annotations

import heapq
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
from lrmoe.planning.problem import IntArray, Problem
from lrmoe.planning.split import local_first, quota_prop

INFO = PolicyInfo(
    title="UltraEP",
    source="arXiv 2606.04101; github.com/Dots-Infra/UltraEP v1.0.0 (MIT)",
    inputs="current counts",
    acts="every call",
    moves="replica weights forward and again backward, fp32 gradients home",
    slots="shared",
    note="replicas stay inside a node where the topology has several (one NVLink domain)",
)

_TRIES = 3  # of the fast path
_STEP = 100  # each try adds 1 / 100 of the highest load
_SLACK = 100  # the first try allows 1 / 100 above the lowest bound (beta = 1.01)
_LANES = 4

Replica = tuple[int, int, int]  # expert, rank, pairs


@dataclass(frozen=True, kw_only=True)
class UltraEP:
    """The UltraEP planner.

    Attributes:
        slots: extra slots per rank; None takes the problem's.
        balance_threshold: peaks up to this many mean loads are left alone (at least 1).
        min_tokens_per_replica: least pairs worth a replica outside the fast path.
        allow_zero_master: whether a master may export all of its pairs.
        split: "local_first" or "quota_prop", the two per-source splits of the public code.
        confine: whether replicas stay inside their node.

    Raises:
        PlanError: an option out of range.
    """

    slots: int | None = None
    balance_threshold: float = 1.0
    min_tokens_per_replica: int = 1024
    allow_zero_master: bool = False
    split: str = "local_first"
    confine: bool = True

    def __post_init__(self) -> None:
        check_slots(self.slots)
        check_option(self.balance_threshold >= 1, "balance_threshold", self.balance_threshold, "at least 1")
        check_option(
            self.min_tokens_per_replica >= 1,
            "min_tokens_per_replica",
            self.min_tokens_per_replica,
            "at least 1",
        )
        check_option(
            self.split in ("local_first", "quota_prop"), "split", self.split, "'local_first' or 'quota_prop'"
        )

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan one call."""
        copies_RE = home_layout(problem.topology)
        quota_RE = copies_RE * problem.counts_E
        home_E = problem.topology.home_E
        for solver in self._domains(problem):
            for expert, rank, pairs in solver.solve()[0]:
                copies_RE[rank, expert] = 1
                quota_RE[rank, expert] += pairs
                quota_RE[home_E[expert], expert] -= pairs

        def by_quota(expert: int, hosts_J: IntArray) -> IntArray:
            counts_R, quota_J = problem.counts_RE[:, expert], quota_RE[hosts_J, expert]
            if self.split == "quota_prop":
                return quota_prop(counts_R, quota_J)
            return local_first(counts_R, hosts_J, quota_J)

        return make_plan(problem, copies_RE, split_each(problem.counts_RE, copies_RE, by_quota))

    def caps(self, problem: Problem) -> list[int]:
        """The cap tau found for each domain: no rank is planned more pairs."""
        return [solver.solve()[1] for solver in self._domains(problem)]

    def _domains(self, problem: Problem) -> list[_Solver]:
        topology = problem.topology
        node_R = topology.node_R if self.confine else np.zeros(topology.ranks, dtype=np.int64)
        return [
            _Solver(self, problem, np.flatnonzero(node_R == node))
            for node in range(int(node_R.max(initial=0)) + 1)
        ]


class _Solver:
    """Search for the least cap tau under which every rank of one domain can export its excess."""

    def __init__(self, policy: UltraEP, problem: Problem, ranks: IntArray) -> None:
        self.policy = policy
        self.slots = slots_of(problem, policy.slots)
        self.ranks: list[int] = ranks.tolist()
        n = problem.topology.experts_per_rank
        load_DL = problem.counts_E.reshape(-1, n)[ranks]
        self.load_D = load_DL.sum(axis=1)
        self.sources: list[int] = np.argsort(-self.load_D, kind="stable").tolist()
        order_DL = np.argsort(-load_DL, axis=1, kind="stable")
        self.experts: list[list[int]] = (order_DL + ranks[:, None] * n).tolist()
        self.loads: list[int] = problem.counts_E.tolist()
        mean = float(self.load_D.sum()) / ranks.size
        self.low = int(np.ceil(mean * policy.balance_threshold))
        self.high = max(self.low, int(self.load_D.max()))

    def solve(self) -> tuple[list[Replica], int]:
        """Replicas and the cap they meet: first quick tries a little above the mean, then a search."""
        tau = -(-self.low * (_SLACK + 1) // _SLACK)
        for _ in range(_TRIES):
            tau = min(tau, self.high)
            if (found := self.oracle(tau, None)) is not None:
                return found, tau
            tau += max(1, -(-self.high // _STEP))
        return self._search(self.policy.min_tokens_per_replica)

    def _search(self, floor: int) -> tuple[list[Replica], int]:
        """The smallest cap that holds with replicas of at least `floor` pairs, from the coarse bound up."""
        low = self._coarse()
        if (found := self.oracle(low, floor)) is not None:
            return found, low
        high, found = self.high, []  # at the highest load nothing has to move
        while high - low > 1:
            points = {low + (high - low) * k // _LANES for k in range(1, _LANES)} - {low}
            for tau in sorted(points):
                plan = self.oracle(tau, floor)
                if plan is not None:
                    high, found = tau, plan
                    break
                low = tau
        return found, high

    def _coarse(self) -> int:
        """Smallest cap at which the free room could take the excess if slots were no limit."""
        low, high = self.low, self.high
        while low < high:
            middle = (low + high) // 2
            if np.maximum(self.load_D - middle, 0).sum() <= np.maximum(middle - self.load_D, 0).sum():
                high = middle
            else:
                low = middle + 1
        return low

    def oracle(self, tau: int, floor: int | None) -> list[Replica] | None:
        """Replicas that bring every rank to `tau`, or None. `floor` None: the least share adapts to what is left."""
        over_D: list[int] = (self.load_D - tau).tolist()
        if sum(over_D) > 0:
            return None
        open_ranks = [(over, d) for d, over in enumerate(over_D) if over < 0 and self.slots > 0]
        state = _Room(open_ranks, [self.slots] * len(over_D), floor)
        for source in self.sources:
            need = over_D[source]
            if need <= 0:
                break
            for expert in self.experts[source]:
                left = max(self.loads[expert] - (not self.policy.allow_zero_master), 0)
                need -= state.export(expert, min(need, left), need)
                if need == 0:
                    break
            if need > 0:
                return None
        return [(expert, self.ranks[d], pairs) for expert, d, pairs in state.records]


class _Room:
    """Room and free slots of the ranks of a domain while replicas are handed out.

    `heap` holds (-room, rank) of ranks with both; all ranks on it may take the expert being exported.
    """

    def __init__(self, open_ranks: list[tuple[int, int]], free: list[int], floor: int | None) -> None:
        self.heap = open_ranks
        heapq.heapify(self.heap)
        self.free = free
        self.floor = floor
        self.records: list[Replica] = []

    def export(self, expert: int, left: int, need: int) -> int:
        """Give replicas of one expert, for at most `left` pairs, to the emptiest ranks; returns the pairs exported."""
        done = 0
        used = []  # ranks that host the expert now
        while done < left and self.heap:
            room, rank = -self.heap[0][0], self.heap[0][1]
            least = max(1, -(-(need - done) // len(self.heap))) if self.floor is None else self.floor
            pairs = min(left - done, room)
            if pairs < least:
                break
            heapq.heappop(self.heap)
            self.records.append((expert, rank, pairs))
            self.free[rank] -= 1
            used.append((pairs - room, rank))
            done += pairs
        for entry in used:
            if entry[0] < 0 and self.free[entry[1]] > 0:
                heapq.heappush(self.heap, entry)
        return done
