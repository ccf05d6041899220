"""How many pairs of each expert backward keeps.

With every expert at home, dropping is one more rank of capacity `drop_cap` that every expert may use, so the least
peak is a water level: cut the most loaded ranks down to one common height. Inside a rank all choices give the same
peak, and the kept pairs go where least is lost: one sampling constant c keeps min(1, c * score) of every pair, which is
the variance optimum of the sampled estimator. What it keeps of an expert is read off past scores (score_bins.py);
without history all experts keep equal fractions.
"""

from __future__ import annotations

import numpy as np

from lrmoe.planning.problem import FloatArray, IntArray, Problem
from lrmoe.planning.score_bins import Cells


def fill(total: int, weight_E: FloatArray, low_E: IntArray, high_E: IntArray) -> IntArray:
    """Integers q with sum q = total, low <= q <= high, and q as near as possible to c * weight for one constant c.

    Entries that one constant would push past a bound are fixed there and the constant is found again for the rest,
    until stable; the remainder goes by largest fraction, ties to the lower index.

    Args:
        total: sum of the result; clipped to [sum low, sum high].
        weight_E: float64 (E,), non-negative.
        low_E, high_E: int64 (E,), bounds with low <= high.

    Returns:
        int64 (E,).
    """
    total = min(max(total, int(low_E.sum())), int(high_E.sum()))
    value = _clamped_share(float(total), weight_E, low_E.astype(np.float64), high_E.astype(np.float64))
    result = np.clip(np.floor(value).astype(np.int64), low_E, high_E)
    _spread_remainder(result, value - result, total, low_E, high_E)
    return result


def _clamped_share(total: float, weight: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """Real solution of sum clip(c * weight, low, high) = total: the constant is bracketed by its breakpoints."""
    top = float(weight.max(initial=0.0))
    # A floor under the weights lets the constant reach every bound, so that entries of weight zero fill up last.
    usable = np.where(high > low, np.maximum(weight, 1e-12 * top) if top > 0 else 1.0, 0.0)
    free = usable > 0
    if not free.any():
        return low.copy()
    points = np.sort(np.concatenate([low[free] / usable[free], high[free] / usable[free]]))
    sums = np.clip(points[:, None] * usable, low, high).sum(axis=1)
    right = min(int(np.searchsorted(sums, total)), points.size - 1)
    left = max(right - 1, 0)
    span = sums[right] - sums[left]
    share = (total - sums[left]) / span if span > 0 else 1.0
    c = points[left] + min(max(share, 0.0), 1.0) * (points[right] - points[left])
    return np.clip(c * usable, low, high)


def _spread_remainder(
    result: IntArray, fraction: FloatArray, total: int, low_E: IntArray, high_E: IntArray
) -> None:
    """Add or take single pairs, largest (smallest) fraction first, until `result` sums to `total`. In place."""
    while (missing := total - int(result.sum())) != 0:
        step = 1 if missing > 0 else -1
        order = np.argsort(-fraction if step > 0 else fraction, kind="stable")
        movable = order[(result[order] < high_E[order]) if step > 0 else (result[order] > low_E[order])]
        chosen = movable[: abs(missing)]
        result[chosen] += step
        fraction[chosen] -= step


def fewest_drops(load_R: IntArray, floor_R: IntArray, target: int) -> IntArray:
    """Pairs each rank must leave out so that none runs more than `target` (or its floor), int64 (R,)."""
    return np.maximum(load_R - np.maximum(floor_R, target), 0)


def least_peak(load_R: IntArray, floor_R: IntArray, cap: int) -> int:
    """Smallest integer T such that cutting every rank to T leaves out at most `cap` pairs (bisection)."""

    def fits(level: int) -> bool:
        return int(fewest_drops(load_R, floor_R, level).sum()) <= cap

    low, high = 0, int(load_R.max(initial=0))
    even = min(max(-(-(int(load_R.sum()) - cap) // max(load_R.size, 1)), 0), high)
    if fits(even):  # the usual case: all ranks come down to one level, and one try more proves it least
        high = even
        if even > 0 and not fits(even - 1):
            return even
    else:
        low = even + 1
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def overload_goal(problem: Problem) -> int:
    """The load that is low enough, 0 where the whole cap is dropped whatever the loads."""
    if problem.drop == "always":
        return 0
    return int(np.ceil(problem.peak_target * problem.pairs / problem.topology.ranks))


def cut_ranks(
    problem: Problem, load_R: IntArray, floor_R: IntArray, goal: int, cap_R: IntArray | None = None
) -> IntArray:
    """Pairs each rank leaves out, int64 (R,): least peak first, then exactly the cap where `drop` says always.

    Ranks are brought under their caps `cap_R` first where the drop cap suffices for that. Below the least peak only
    single pairs are left of the cap; they come off the ranks at the water level.
    """
    cap, drops = problem.drop_cap, np.zeros_like(load_R)
    if cap_R is not None:
        over = fewest_drops(load_R, np.maximum(floor_R, cap_R), 0)
        drops = over if int(over.sum()) <= cap else drops
    rest_R = load_R - drops
    level = least_peak(rest_R, floor_R, cap - int(drops.sum()))
    drops = drops + fewest_drops(rest_R, floor_R, max(level, goal))
    if problem.drop == "overload":
        return drops
    rest = cap - int(drops.sum())
    movable = np.flatnonzero((load_R - drops >= level) & (load_R - drops > floor_R))[:rest]
    drops[movable] += 1
    return drops


def home_quotas(problem: Problem, cap_R: IntArray | None = None) -> IntArray:
    """Quotas with every expert at home: int64 (E,), legal for `problem`, of least peak.

    Ranks keep at most cap_R pairs, int64 (R,), where that is given and the drop cap suffices for it. One rank has no
    peak to lower: there `overload` only keeps to its cap.
    """
    topology, counts = problem.topology, problem.counts_E
    alone = problem.drop == "overload" and topology.ranks == 1
    if problem.drop_cap == 0 or (alone and cap_R is None):
        return counts
    shape = (topology.ranks, topology.experts_per_rank)
    counts_RL, floor_RL = counts.reshape(shape), problem.floor_E.reshape(shape)
    cells, local = Cells.of(problem), topology.experts_per_rank
    load_R, floor_R = counts_RL.sum(axis=1), floor_RL.sum(axis=1)
    goal = problem.pairs if alone else overload_goal(problem)
    drops_R = cut_ranks(problem, load_R, floor_R, goal, cap_R)
    quota_RL = counts_RL.copy()
    for rank in np.flatnonzero(drops_R):
        keep = int(load_R[rank] - drops_R[rank])
        own = cells.part(slice(int(rank) * local, (int(rank) + 1) * local))
        wanted_L = own.kept(own.constant(float(keep)))
        quota_RL[rank] = fill(keep, wanted_L, floor_RL[rank], counts_RL[rank])
    return quota_RL.reshape(-1)


def split_quota(quota_E: IntArray, counts_RE: IntArray, offset_E: IntArray | None = None) -> IntArray:
    """Each source's share of the quotas, int64 (R, E): exact column sums, never above a source's count.

    Sources are laid end to end; source r takes the integers in its interval of the quota line, so every share is the
    proportional one rounded down or up. With a uniform offset it is rounded up with a probability equal to its
    fraction (systematic rounding), which keeps sampling within shares unbiased.

    Args:
        quota_E: int64 (E,), at most the counts.
        counts_RE: int64 (R, E).
        offset_E: int64 (E,), in [0, count of the expert), or None for 0.
    """
    total_E = counts_RE.sum(axis=0)
    upto_RE = np.cumsum(counts_RE, axis=0)
    # Python integers where the product could leave int64.
    wide = (int(total_E.max(initial=0)) + 1) * (int(quota_E.max(initial=0)) + 1) >= 2**62
    product = upto_RE.astype(object) * quota_E if wide else upto_RE * quota_E
    if offset_E is not None:
        product = product + offset_E
    ends = (product // np.maximum(total_E, 1)).astype(np.int64)
    return np.diff(ends, axis=0, prepend=0)
