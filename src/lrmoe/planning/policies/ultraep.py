"""UltraEP: replicas of overloaded experts, solved anew for every call from its exact counts.

Source: arXiv 2606.04101 and the solver of its public code (Dots-Infra/UltraEP v1.0.0, csrc/kernels/placement.cu).
Inputs: exact counts of the current call. Acts: every layer call; backward reuses the plan.
Moves: replica weights in forward and again in backward, fp32 gradients back to the masters; masters and optimizer
states stay. Slots: `slots` per rank, shared by all layers, at most one instance of an expert on a rank.
Ours: the search between coarse bound and highest load probes three points a round, as four lanes would; where the
topology has several nodes each node is one NVLink domain with a mean of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.policies._layout import assemble, check_option, check_slots, home_layout, slots_of
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

        return assemble(problem, copies_RE, by_quota)

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
        self.ranks = ranks
        self.load_E = problem.counts_E
        load_R = self.load_E.reshape(problem.topology.ranks, -1).sum(axis=1)
        self.load_D = load_R[ranks]
        n = problem.topology.experts_per_rank
        by_load = np.argsort(-self.load_E.reshape(-1, n), axis=1, kind="stable")
        self.experts_D = (by_load + np.arange(problem.topology.ranks)[:, None] * n)[ranks]
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
        low, high = self._coarse(), self.high
        found, best = self.oracle(low, floor), low
        while found is None:
            # Invariant: low fails, high holds.
            points = sorted({low + (high - low) * k // _LANES for k in range(1, _LANES)} - {low} | {high})
            for tau in points:
                plan = self.oracle(tau, floor)
                if plan is not None:
                    high = tau
                    break
                low = tau
            if high - low <= 1:
                found, best = self.oracle(high, floor), high
        return found, best

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
        excess_D = np.maximum(self.load_D - tau, 0)
        room_D = np.maximum(tau - self.load_D, 0)
        if excess_D.sum() > room_D.sum():
            return None
        free_D = np.full(self.ranks.size, self.slots, dtype=np.int64)
        records: list[Replica] = []
        for source in np.argsort(-self.load_D, kind="stable").tolist():
            need = int(excess_D[source])
            if need == 0:
                break
            for expert in self.experts_D[source].tolist():
                need -= self._export(expert, need, room_D, free_D, floor, records)
                if need == 0:
                    break
            if need > 0:
                return None
        return records

    def _export(
        self,
        expert: int,
        need: int,
        room_D: IntArray,
        free_D: IntArray,
        floor: int | None,
        records: list[Replica],
    ) -> int:
        """Export up to `need` pairs of one expert; updates room, slots and records; returns what was exported."""
        load = int(self.load_E[expert])
        left = load if self.policy.allow_zero_master else max(load - 1, 0)
        open_D = (room_D > 0) & (free_D > 0)
        done = 0
        while done < need and left > 0:
            candidates = int(open_D.sum())
            if candidates == 0:
                break
            least = max(1, -(-(need - done) // candidates)) if floor is None else floor
            target = int(np.argmax(np.where(open_D, room_D, -1)))
            pairs = min(need - done, int(room_D[target]), left)
            if pairs < least:
                break
            records.append((expert, int(self.ranks[target]), pairs))
            room_D[target] -= pairs
            free_D[target] -= 1
            open_D[target] = False
            left -= pairs
            done += pairs
        return done
