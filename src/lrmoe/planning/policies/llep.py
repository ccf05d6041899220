"""Least-loaded expert parallelism: spill the pairs above a rank's cap, expert by expert, to the least loaded ranks.

Source: arXiv 2601.17111 (ICML'26); SalesforceAIResearch/LeastLoadedEP, compute_llep_lpt_plan (Apache-2.0).
Inputs: counts of the current call. Acts: every layer call whose most loaded rank exceeds `threshold` mean loads.
Moves: weights of spilled experts in forward, kept until backward; their gradients back to the owner. Slots: no limit
on foreign experts of its own (`slots` sets one).
Ours: where `slots` is set, only ranks with a free slot (or that hold the expert) help, and what nobody can take stays
at home; helpers are sorted again after every assignment also where the owner has no room (the public code walks its
list once there); on one rank nothing can spill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.policies._layout import (
    check_option,
    check_slots,
    held_traffic,
    home_layout,
    make_plan,
    split_each,
)
from lrmoe.planning.problem import IntArray, Problem
from lrmoe.planning.split import interval

INFO = PolicyInfo(
    title="LLEP",
    source="arXiv 2601.17111 (ICML'26); github.com/SalesforceAIResearch/LeastLoadedEP (Apache-2.0)",
    inputs="current counts",
    acts="every call above 1.3 mean loads",
    moves="weights of spilled experts, kept until backward; their gradients home",
    slots="unbounded",
)

Spread = dict[int, dict[int, int]]  # expert -> rank -> pairs, in the order of assignment


@dataclass(frozen=True, kw_only=True)
class LLEP:
    """The LLEP planner.

    Attributes:
        threshold: largest over mean load (lambda) below which every pair stays at home.
        test: what the threshold looks at: "rank" loads (public code) or "expert" loads (paper).
        alpha: cap of a rank in mean loads.
        min_tokens: chunks below this are not spilled while more than the chunk is left (m).
        slots: most foreign experts of a rank, or None for no limit.

    Raises:
        PlanError: an option out of range.
    """

    threshold: float = 1.3
    test: str = "rank"
    alpha: float = 1.0
    min_tokens: int = 1024
    slots: int | None = None

    def __post_init__(self) -> None:
        check_option(self.threshold >= 0, "threshold", self.threshold, "at least 0")
        check_option(self.test in ("rank", "expert"), "test", self.test, "'rank' or 'expert'")
        check_option(self.alpha > 0, "alpha", self.alpha, "positive")
        check_option(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        check_slots(self.slots)

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan one call."""
        copies_RE = home_layout(problem.topology)
        spread = self.spread(problem)[0]
        for expert, pairs_of in spread.items():
            copies_RE[list(pairs_of), expert] = 1

        def in_order(expert: int, hosts_J: IntArray) -> IntArray:
            pairs_of = spread[expert]
            quota = np.array(list(pairs_of.values()), dtype=np.int64)
            column = {rank: j for j, rank in enumerate(hosts_J.tolist())}
            sent_RJ = np.zeros((problem.topology.ranks, hosts_J.size), dtype=np.int64)
            sent_RJ[:, [column[rank] for rank in pairs_of]] = interval(problem.counts_RE[:, expert], quota)
            return sent_RJ

        assign_RJ = split_each(problem.counts_RE, copies_RE, in_order)
        return make_plan(problem, copies_RE, assign_RJ, traffic=held_traffic(problem, copies_RE))

    def cap(self, problem: Problem) -> int:
        """Pairs a rank may get unless the remainder of an expert is forced on it."""
        return int(self.alpha * problem.pairs // problem.topology.ranks)

    def needed(self, problem: Problem) -> bool:
        """Whether the loads are uneven enough to act."""
        load = problem.counts_E
        if self.test == "rank":
            load = load.reshape(problem.topology.ranks, -1).sum(axis=1)
        return problem.topology.ranks > 1 and int(load.max()) * load.size >= self.threshold * problem.pairs

    def spread(self, problem: Problem) -> tuple[Spread, bool]:
        """Pairs of every expert that leaves its home at least in part, and whether any had to be forced."""
        if problem.pairs == 0 or not self.needed(problem):
            return {}, False
        state = _Spill(self, problem)
        for expert in np.argsort(-problem.counts_E, kind="stable").tolist():
            state.place(expert)
        return state.spread, state.forced


class _Spill:
    """Running loads of one call: what is assigned to a rank, and what its own experts may still bring."""

    def __init__(self, policy: LLEP, problem: Problem) -> None:
        self.problem, self.policy = problem, policy
        self.cap = policy.cap(problem)
        self.pending_R = problem.counts_E.reshape(problem.topology.ranks, -1).sum(axis=1)
        self.assigned_R = np.zeros_like(self.pending_R)
        self.foreign_R = np.zeros_like(self.pending_R)
        self.home_E = problem.topology.home_E
        self.spread: Spread = {}
        self.forced = False

    def place(self, expert: int) -> None:
        """Keep what fits at home, spill the rest."""
        home, load = int(self.home_E[expert]), int(self.problem.counts_E[expert])
        self.pending_R[home] -= load
        native = min(max(self.cap - int(self.assigned_R[home] + self.pending_R[home]), 0), load)
        self.assigned_R[home] += native
        rest = load - native
        if rest == 0:
            return
        pairs_of = {home: native}
        while rest > 0:
            rank, chunk = self._helper(home, rest, pairs_of)
            if rank != home and rank not in pairs_of:
                self.foreign_R[rank] += 1
            pairs_of[rank] = pairs_of.get(rank, 0) + chunk
            self.assigned_R[rank] += chunk
            rest -= chunk
        if len(pairs_of) > 1:
            self.spread[expert] = pairs_of

    def _helper(self, home: int, rest: int, pairs_of: dict[int, int]) -> tuple[int, int]:
        """The least loaded rank that takes a chunk worth sending; all of the rest where there is none."""
        usable_R = np.ones(self.pending_R.size, dtype=bool)
        if self.policy.slots is not None:
            usable_R = self.foreign_R < self.policy.slots
            usable_R[list(pairs_of)] = True
        usable_R[home] = False
        if not usable_R.any():
            self.forced = True
            return home, rest
        load_R = self.assigned_R + self.pending_R
        chunk_R = np.minimum(self.cap - load_R, rest)
        worth_R = usable_R & (chunk_R > 0) & ((chunk_R >= self.policy.min_tokens) | (rest <= chunk_R))
        self.forced |= not worth_R.any()
        chosen_R = worth_R if worth_R.any() else usable_R
        rank = int(np.argmin(np.where(chosen_R, load_R, np.iinfo(np.int64).max)))
        return rank, int(chunk_R[rank]) if worth_R.any() else rest
