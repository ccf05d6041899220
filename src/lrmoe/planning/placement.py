"""Where replicas live and how many pairs each instance runs in forward.

Matching at the lowest level that could be (matching.py) nearly always succeeds with two slots a rank. Where it fails,
varied restarts close the gap: each breaks greedy ties differently, by a fixed integer sequence, so that all ranks find
the same plan.

Shape letters: R ranks, E experts, J instances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lrmoe.planning.matching import Matching
from lrmoe.planning.problem import IntArray, Problem, Topology

RESTARTS = 1536  # attempts where the lowest level fails, times ranks squared: their time falls with the ranks
NODE_SLACKS = (0.0, 0.0025, 0.005, 0.01, 0.02)  # peak given away for fewer copies between nodes
_FINE = 1000  # levels closer than 1/1000 are not told apart

Start = Callable[[], Matching]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Instances in the order (rank, expert), every home among them, and what each runs in forward.

    Attributes:
        expert_J, rank_J, pairs_J: int64 (J,). replicas_R, load_R: int64 (R,), replicas held and pairs run.
    """

    expert_J: IntArray
    rank_J: IntArray
    pairs_J: IntArray
    replicas_R: IntArray
    load_R: IntArray


def place(problem: Problem, *, level: int | None = None) -> Placement:
    """Replicas and forward loads of a call: as near to the mean load as the slots allow, never above the fixed peak.

    Under a budget every replica is charged `replica_rows`, and the largest load plus charges is made small.

    Args:
        problem: counts, topology, slots, budget.
        level: rows (replicas charged) that no rank should pass; a higher level needs fewer replicas. None: the mean.
    """
    return placed(matched(problem, level), problem.topology)


def unmatched(problem: Problem) -> Matching:
    """Every expert at home, nothing copied yet."""
    charge = problem.replica_rows if problem.budget_rows is not None else 0
    return Matching(problem.counts_E.tolist(), problem.topology, problem.slots, charge)


def relaxed(problem: Problem, home: Matching, level: int) -> Matching:
    """What one attempt makes of `unmatched` at a level, reached or not; `home` stays as it is."""
    found = None
    if problem.topology.nodes > 1:
        found = _by_nodes(level, home.copy, problem.topology)
    if found is None:
        found = home.copy()
        found.fill(level, range(problem.topology.ranks))
    return found


def matched(problem: Problem, level: int | None = None) -> Matching:
    """`place` before its result is laid out."""
    topology = problem.topology

    home = unmatched(problem)
    start, best = home.copy, home.copy()
    aim = max(-(-problem.pairs // topology.ranks), level or 0)
    if problem.slots and best.peak > aim:
        near = _by_nodes(aim, start, topology) if topology.nodes > 1 else None
        best = near or _search(best, aim, problem.slots, start)
    if problem.slots and problem.local_rows is not None:
        best = _localise(problem, best, min(aim, home.peak))
    return best


def _lower_bound(fixed: Matching, slots: int) -> int:
    """No placement gets below this: the k fullest ranks can copy out S (R - k) experts at most, the largest ones."""
    ranks, local = len(fixed.load), fixed.local
    order = sorted(range(ranks), key=lambda r: (-fixed.load[r], r))
    table = np.array(fixed.left, dtype=np.int64).reshape(ranks, local)
    bound, total, pool = -(-sum(fixed.load) // ranks), 0, np.zeros(0, dtype=np.int64)
    for k, rank in enumerate(order[: ranks - 1], start=1):
        total += fixed.load[rank]
        if -(-total // k) <= bound:
            break
        out = slots * (ranks - k)
        pool = np.sort(np.concatenate([pool, table[rank]]))[-slots * (ranks - 1) :]
        bound = max(bound, -(-(total - int(pool[-out:].sum())) // k))
    return bound


def _search(fixed: Matching, aim: int, slots: int, start: Start) -> Matching:
    """The lowest peak found: the plain rule at the level aimed at, then restarts between a bound and the best."""
    ranks = range(len(fixed.load))
    best = start()
    if best.fill(aim, ranks):
        return best
    bound = max(aim, _lower_bound(fixed, slots))
    best = min(fixed, best, key=lambda one: one.peak)
    fine, share, failed = max(bound // _FINE, 1), 2, 0
    for seed in range(min(max(RESTARTS // len(ranks) ** 2, 4), 96)):
        gap = best.peak - bound
        if gap <= fine:
            break
        trial = start()
        reached = trial.fill(best.peak - max(gap // share, fine), ranks, seed)
        best = min(best, trial, key=lambda one: one.peak)
        failed = 0 if reached else failed + 1
        if failed == 3:
            share, failed = 2 * share, 0
    return best


def _by_nodes(bound: int, start: Start, topology: Topology) -> Matching | None:
    """Few copies between nodes, then the rest inside each node; None where that costs more than 2 % of the peak."""
    size = topology.ranks // topology.nodes
    for slack in NODE_SLACKS:
        level = bound + int(slack * bound)
        trial = start()
        trial.across(level, topology)
        if all(trial.fill(level, range(n * size, (n + 1) * size)) for n in range(topology.nodes)):
            return trial
    return None


def _localise(problem: Problem, best: Matching, aim: int) -> Matching:
    """Copies that make at least `local_rows` pairs local, largest first, as far as slots and the peak found allow.

    Local means on the rank that sends them, or inside its node where there are several. First with every such pair
    moved and the ranks filled again; where that passes the peak, with as many pairs as the rank has room for.
    """
    topology, least = problem.topology, problem.local_rows or 1
    level = max(best.peak, aim)
    whole = best.copy()
    for rank, expert, pairs in _local_demand(problem, whole):
        if whole.free[rank] and whole.left[expert] >= least:
            whole.give(expert, rank, pairs)
    size = topology.ranks // topology.nodes
    if all(whole.fill(level, range(n * size, (n + 1) * size)) for n in range(topology.nodes)):
        return whole
    for rank, expert, pairs in _local_demand(problem, best):
        room = min(pairs, level - best.load[rank] - best.charge, best.left[expert])
        if best.free[rank] and room >= least:
            best.give(expert, rank, room)
    return best


def _local_demand(problem: Problem, match: Matching) -> list[tuple[int, int, int]]:
    """(rank, expert, pairs) that a copy could make local, most pairs first; the emptiest rank stands for its node."""
    topology, experts = problem.topology, np.arange(problem.topology.experts)
    groups = topology.nodes if topology.nodes > 1 else topology.ranks
    size = topology.ranks // groups
    demand_GE = problem.counts_RE.reshape(groups, size, -1).sum(axis=1)
    demand_GE[topology.home_E // size, experts] = 0
    for rank, expert in match.moved:
        demand_GE[rank // size, expert] = 0
    group_X, expert_X = np.nonzero(demand_GE >= (problem.local_rows or 1))
    order = np.lexsort((expert_X, group_X, -demand_GE[group_X, expert_X]))
    result = []
    for g, e in zip(group_X[order].tolist(), expert_X[order].tolist(), strict=True):
        rank = min((not match.free[r], match.load[r], r) for r in range(g * size, (g + 1) * size))[2]
        result.append((rank, e, int(demand_GE[g, e])))
    return result


def placed(match: Matching, topology: Topology) -> Placement:
    """Instances and pairs of a matching."""
    experts, moved = topology.experts, match.moved
    key = np.fromiter((rank * experts + e for rank, e in moved), np.int64, len(moved))
    home = topology.home_E * experts + np.arange(experts)
    key_J = np.concatenate([home, key])
    pairs_J = np.concatenate(
        [np.array(match.left, np.int64), np.fromiter(moved.values(), np.int64, len(moved))]
    )
    order = np.argsort(key_J)
    key_J = key_J[order]
    rank_J, replicas_R = key_J // experts, np.bincount(key // experts, minlength=topology.ranks)
    load = np.array(match.load, dtype=np.int64) - match.charge * replicas_R
    return Placement(
        expert_J=key_J % experts, rank_J=rank_J, pairs_J=pairs_J[order], replicas_R=replicas_R, load_R=load
    )
