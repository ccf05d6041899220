"""How many pairs of each expert backward keeps when experts have replicas: least peak, then least loss, kept in place.

Dropping is one more rank of capacity `drop_cap` that every expert may use, so the least peak is
    T = max over non-empty sets D of ranks of max(ceil((f(D) - cap) / |D|), ceil(f_m(D) / |D|)),
f(D) = pairs and f_m(D) = floors of the experts whose instances all lie in D. Given T, the loss sum_i S_i^2 / q_i (added
variance of a sampled estimator; i the cells of score_bins.py with sums of scores S_i and q_i <= n_i kept pairs; without
history one cell per expert and S = count) is made small subject to
    sum_e (x[e, d] / n[e]) q[e] <= T   for every rank d, x the pairs that run on d in forward, q[e] over e's cells.
Stationarity: one price p[d] per rank, P_e = sum_d (x[e, d] / n[e]) p[d], q_i = min(n_i, S_i / sqrt(P_e)): one sampling
constant (equal fractions, without history) for all experts whose ranks cost the same.

Shape letters: R ranks, E experts, J instances.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.errors import InfeasibleError
from lrmoe.planning.flow import UNLIMITED, Network
from lrmoe.planning.problem import FloatArray, IntArray, Problem
from lrmoe.planning.quotas import cut_ranks, overload_goal
from lrmoe.planning.score_bins import Cells

_ROUNDS = 16
_LEAST_DRAWN = 0.45  # of the kept pairs: no step is larger than the fourth power of the ratio
_CLOSE = 2e-3  # relative distance of a rank's load from its target at which prices stand


@dataclass(frozen=True, kw_only=True, eq=False)
class Quotas:
    """Kept pairs.

    Attributes:
        quota_E: int64 (E,). stay_J: int64 (J,), about where they lie in forward; its sums over instances are quota_E.
        peak: the least possible peak of these quotas under the drop cap (or what `overload` aimed at).
        wire_rows: most rows that may enter a rank at that peak, or None (wires.py).
    """

    quota_E: IntArray
    stay_J: IntArray
    peak: int
    wire_rows: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Places:
    """Instances, and the most that ranks may keep."""

    problem: Problem
    expert_J: IntArray
    rank_J: IntArray
    cap_R: IntArray

    def on_ranks(self, pairs_J: IntArray) -> IntArray:
        return _sums(self.rank_J, pairs_J, self.problem.topology.ranks)

    def peak(self, pairs_J: IntArray) -> int:
        """Largest load; out of reach where a rank passes its cap."""
        load_R = self.on_ranks(pairs_J)
        return UNLIMITED if bool((load_R > self.cap_R).any()) else int(load_R.max())

    def of_experts(self, pairs_J: IntArray) -> IntArray:
        return _sums(self.expert_J, pairs_J, self.problem.topology.experts)


def replica_quotas(
    problem: Problem, expert_J: IntArray, rank_J: IntArray, pairs_J: IntArray, cap_R: IntArray | None = None
) -> Quotas:
    """Quotas for a placement with replicas: legal for `problem` and of least peak.

    Args:
        problem: counts, drop cap, floors, mode, score history; the network is no limit here (wires.py).
        expert_J, rank_J, pairs_J: int64 (J,), instances and their forward pairs.
        cap_R: int64 (R,), most kept pairs of each rank (kept to as far as the drop cap allows), or None.
    """
    if cap_R is None:
        cap_R = np.full(problem.topology.ranks, UNLIMITED)
    places = _Places(problem=problem, expert_J=expert_J, rank_J=rank_J, cap_R=cap_R.copy())
    goal = overload_goal(problem)
    load_R = places.on_ranks(pairs_J)
    if problem.drop_cap == 0 or (goal and bool((load_R <= np.minimum(goal, places.cap_R)).all())):
        return Quotas(quota_E=problem.counts_E, stay_J=pairs_J, peak=int(load_R.max()))
    kept_J = _keep(places, pairs_J, goal)
    peak = places.peak(kept_J)
    lowest = max(-(-(problem.pairs - problem.drop_cap) // problem.topology.ranks), goal)
    if peak > lowest or goal:
        return _exact(places, pairs_J, kept_J, lowest)
    return Quotas(quota_E=places.of_experts(kept_J), stay_J=kept_J, peak=peak)


def _exact(places: _Places, pairs_J: IntArray, kept_J: IntArray, lowest: int) -> Quotas:
    """Least peak over all quotas and all routings; then quotas in place on forward pairs moved as that peak needs."""
    problem = places.problem
    network, _, drops = _network(places, kept_J, problem.counts_E - places.of_experts(kept_J))
    best = _lower(network, places, lowest)
    rest, instances, _ = _network(places, pairs_J, None)
    rest.relieve([*np.minimum(best, places.cap_R).tolist(), 0, 0])
    moved_J = np.array([rest.used(arc) for arc in instances], dtype=np.int64)
    goal = best if problem.drop == "overload" else 0
    again_J = kept_J if np.array_equal(moved_J, pairs_J) else _keep(places, moved_J, goal)
    if places.peak(again_J) <= best:
        quota_E = places.of_experts(again_J)
        stay_J = again_J if again_J is kept_J else in_place(quota_E, places.expert_J, pairs_J)
        return Quotas(quota_E=quota_E, stay_J=stay_J, peak=best)
    # Floors lie where no water level reaches the peak: the network's own quotas do.
    if problem.drop == "overload":
        network, _, drops = _network(places, pairs_J, np.zeros_like(problem.counts_E))
        _fewest(network, np.minimum(best, places.cap_R).tolist(), problem.drop_cap)
    quota_E = problem.counts_E - np.array([network.used(arc) for arc in drops], dtype=np.int64)
    return Quotas(quota_E=quota_E, stay_J=in_place(quota_E, places.expert_J, pairs_J), peak=best)


def _lower(network: Network, places: _Places, lowest: int) -> int:
    """The least peak under the caps of the ranks, or without them where even the whole drop cannot meet them."""
    cap, before = places.cap_R.tolist(), (list(network.load), list(network.room))
    try:
        return network.lower(lowest, cap, places.problem.drop_cap)
    except InfeasibleError:
        places.cap_R[:] = UNLIMITED
        network.load, network.room = before
        return network.lower(lowest, None, places.problem.drop_cap)


def _fewest(network: Network, limit: list[int], drop_cap: int) -> None:
    """Bring all ranks to their limits with the fewest drops: what no move can place is dropped, and nothing else."""
    if network.relieve([*limit, 0, 0]) is not None:
        excess = sum(max(load - most, 0) for load, most in zip(network.load, limit, strict=False))
        network.relieve([*limit, min(excess, drop_cap), 0])


def _network(
    places: _Places, start_J: IntArray, dropped_E: IntArray | None
) -> tuple[Network, list[int], list[int]]:
    """Arcs of all instances, and of the drop where `dropped_E` says what is dropped at first."""
    problem = places.problem
    network = Network(places.on_ranks(start_J).tolist(), problem.topology.experts, wires=False)
    triples = zip(places.expert_J.tolist(), places.rank_J.tolist(), start_J.tolist(), strict=True)
    instances = [network.join(network.expert(e), rank, UNLIMITED, pairs) for e, rank, pairs in triples]
    if dropped_E is None:
        return network, instances, []
    may = (problem.counts_E - problem.floor_E).tolist()
    dropped = dropped_E.tolist()
    network.load[network.dropped] = sum(dropped)
    drops = [
        network.join(network.expert(e), network.dropped, most - now, now)
        for e, (most, now) in enumerate(zip(may, dropped, strict=True))
    ]
    return network, instances, drops


def _keep(places: _Places, pairs_J: IntArray, goal: int) -> IntArray:
    """Kept pairs of each instance, int64 (J,): ranks cut to one water level, experts cut by prices."""
    problem = places.problem
    load_R, low_J = places.on_ranks(pairs_J), _floors(problem, places.expert_J, pairs_J)
    drops_R = cut_ranks(problem, load_R, places.on_ranks(low_J), goal, places.cap_R)
    if not drops_R.any():
        return pairs_J
    wanted_J = _priced(places, pairs_J, load_R - drops_R)
    return _fill_ranks(load_R - drops_R, wanted_J, low_J, pairs_J, places.rank_J)


def _floors(problem: Problem, expert_J: IntArray, pairs_J: IntArray) -> IntArray:
    """Each expert's floor, laid on its fullest instances, int64 (J,)."""
    order = np.lexsort((-pairs_J, expert_J))
    pairs, expert = pairs_J[order], expert_J[order]
    before = np.cumsum(pairs) - pairs
    first = np.concatenate(([True], expert[1:] != expert[:-1]))
    before -= before[first][np.cumsum(first) - 1]
    low = np.empty_like(pairs_J)
    low[order] = np.clip(problem.floor_E[expert] - before, 0, pairs)
    return low


def _priced(places: _Places, pairs_J: IntArray, keep_R: IntArray) -> FloatArray:
    """Real kept pairs of each instance by multiplicative price updates, float64 (J,); loads come near keep_R."""
    problem, expert_J, rank_J = places.problem, places.expert_J, places.rank_J
    ranks, experts = keep_R.size, problem.topology.experts
    high, low = problem.counts_E.astype(np.float64), problem.floor_E.astype(np.float64)
    share_J = pairs_J / np.maximum(high, 1.0)[expert_J]
    cells, target = Cells.of(problem), np.maximum(keep_R, 1).astype(np.float64)
    constant = cells.constant(float(keep_R.sum()))
    # Drawn pairs go with the root of the price, those kept whole stay: the fewer are drawn, the larger a step must be.
    roots = int(4 / max(cells.drawn(constant), _LEAST_DRAWN))
    price = np.ones(ranks)
    for _ in range(_ROUNDS):
        total = np.bincount(expert_J, share_J * price[rank_J], minlength=experts)
        quota = np.clip(cells.kept(constant / np.sqrt(np.maximum(total, 1e-12))), low, high)
        kept_J = share_J * quota[expert_J]
        ratio = np.bincount(rank_J, kept_J, minlength=ranks) / target
        if float(np.abs(ratio - 1.0).max()) < _CLOSE:
            break
        price = np.clip(price * _half_power(ratio, roots), 1e-9, 1e12)
    return kept_J


def _half_power(value: FloatArray, halves: int) -> FloatArray:
    """value ** (halves / 2) for halves >= 4, by products and one root: the same bits on every host."""
    result = value * value
    for _ in range(halves - 4):
        result = result * np.sqrt(value)
    return result


def _fill_ranks(
    keep_R: IntArray, wanted_J: FloatArray, low_J: IntArray, high_J: IntArray, rank_J: IntArray
) -> IntArray:
    """Integers near `wanted_J` inside the bounds whose sum on every rank is keep_R. rank_J must not decrease."""
    ranks = keep_R.size
    result = np.clip(np.floor(wanted_J).astype(np.int64), low_J, high_J)
    fraction = wanted_J - result
    while True:
        missing_R = keep_R - _sums(rank_J, result, ranks)
        if not missing_R.any():
            return result
        sign_J = np.sign(missing_R)[rank_J]
        free_J = np.where(sign_J > 0, high_J - result, np.where(sign_J < 0, result - low_J, 0))
        step = _steps(np.abs(missing_R), free_J, sign_J * fraction, rank_J)
        result += sign_J * step
        fraction -= sign_J * step


def _steps(missing_R: IntArray, free_J: IntArray, order_J: FloatArray, rank_J: IntArray) -> IntArray:
    """One round of filling: shares of the room where much is missing, single pairs by largest fraction else."""
    ranks, open_J = missing_R.size, free_J > 0
    room_R, open_R = _sums(rank_J, free_J, ranks), np.bincount(rank_J[open_J], minlength=ranks)
    if bool((missing_R > open_R).any()):
        share_R = np.where(missing_R > open_R, missing_R / np.maximum(room_R, 1), 0.0)
        bulk = np.minimum(np.floor(free_J * share_R[rank_J]).astype(np.int64), free_J)
        if bulk.any():
            return bulk
    order = np.lexsort((-order_J, ~open_J, rank_J))
    start_R = np.searchsorted(rank_J, np.arange(ranks))
    place = np.empty_like(order)
    place[order] = np.arange(order.size) - start_R[rank_J]
    return ((place < missing_R[rank_J]) & open_J).astype(np.int64)


def in_place(quota_E: IntArray, expert_J: IntArray, pairs_J: IntArray) -> IntArray:
    """Quotas laid on instances in proportion to their forward pairs, int64 (J,): rounded down or up, exact sums."""
    order = np.argsort(expert_J, kind="stable")
    pairs, expert = pairs_J[order], expert_J[order]
    upto = np.cumsum(pairs)
    first = np.concatenate(([True], expert[1:] != expert[:-1]))
    upto -= (upto - pairs)[first][np.cumsum(first) - 1]
    count_E = _sums(expert_J, pairs_J, quota_E.size)
    wide = (int(count_E.max(initial=0)) + 1) * (int(quota_E.max(initial=0)) + 1) >= 2**62
    product = upto.astype(object) * quota_E[expert] if wide else upto * quota_E[expert]
    ends = (product // np.maximum(count_E[expert], 1)).astype(np.int64)
    result = np.empty_like(pairs_J)
    result[order] = np.diff(ends, prepend=0) + np.where(first, np.concatenate(([0], ends[:-1])), 0)
    return result


def _sums(index_J: IntArray, value_J: IntArray, size: int) -> IntArray:
    """Sums of values by index, in integers, int64 (size,)."""
    result = np.zeros(size, dtype=np.int64)
    np.add.at(result, index_J, value_J)
    return result
