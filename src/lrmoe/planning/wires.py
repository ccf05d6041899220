"""Quotas where the network is a limit too: rows that enter a rank from others are capped, or count as compute rows.

Assumption: every source keeps the same share of an expert's pairs, so of q[e] kept pairs C[d, e] q[e] / n[e] wait on
rank d itself (rounded down) and need no wire to an instance there; every other kept pair that d runs enters it.
A level T allows load T and W(T) = min(wire_rows, T / wire_weight) entering rows. Cuts of that network (cuts.py) give: T
is possible for quotas q iff for all disjoint sets D, B of ranks

    sum over e with I(e) inside D + B of q[e] (1 - sum of C[d, e] / n[e] over d in I(e) and B)  <=  |D| T + |B| W(T)

which is linear in q. The least drops for a level are a covering program whose rows are found one by one, as cuts of
the flow of the last solution; they are convex in T, so Newton steps from below end at the least possible level. Then
quotas are made whole, near the least loss among those that the cuts found allow.

Shape letters: R ranks, E experts, J instances, K cuts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lrmoe.errors import InfeasibleError
from lrmoe.planning.covering import Cover
from lrmoe.planning.cuts import Cuts, Places
from lrmoe.planning.flow import UNLIMITED
from lrmoe.planning.prices import Quotas, in_place, replica_quotas
from lrmoe.planning.problem import FloatArray, IntArray, Problem
from lrmoe.planning.quotas import fill, overload_goal
from lrmoe.planning.routing import route
from lrmoe.planning.score_bins import Cells

_ROUNDS = 40
_TRIES = 256  # levels above the bound that are tried for whole quotas


def wired(problem: Problem) -> bool:
    """Whether the network limits this call."""
    return problem.wire_rows is not None or problem.wire_weight > 0


def wired_quotas(
    problem: Problem, expert_J: IntArray, rank_J: IntArray, pairs_J: IntArray, cap_R: IntArray | None = None
) -> Quotas:
    """Quotas of least max(load, wire_weight * rows entering) over ranks, rows entering within `wire_rows`.

    Args:
        problem: counts, drop cap, floors, mode, score history, `wire_rows`, `wire_weight`.
        expert_J, rank_J, pairs_J: int64 (J,), instances in the order (rank, expert) and their forward pairs.
        cap_R: int64 (R,), most kept pairs of each rank (kept to where the drop cap allows), or None.

    Raises:
        InfeasibleError: not even the whole drop brings the rows that enter some rank down to `wire_rows`.
    """
    places = Places(problem=problem, expert_J=expert_J, rank_J=rank_J, pairs_J=pairs_J)
    free = replica_quotas(problem, expert_J, rank_J, pairs_J, cap_R)
    most_R = np.full(problem.topology.ranks, UNLIMITED) if cap_R is None else cap_R
    least = route(
        expert_J, rank_J, free.stay_J, problem.topology.ranks
    ).least_peak  # no network makes it smaller
    level = max(least, overload_goal(problem))
    cuts = Cuts(places, most_R, problem.wire_rows, problem.wire_weight)
    if cuts.blocked(free.quota_E, level) is None:
        return replace(free, peak=level, wire_rows=cuts.wire(level))
    if not _carried(places):
        raise InfeasibleError(_explain(places))
    found = _least(cuts)
    if found is None and cap_R is not None:
        cuts = Cuts(places, np.full_like(most_R, UNLIMITED), problem.wire_rows, problem.wire_weight)
        found = _least(cuts)
    if found is None:
        raise InfeasibleError(_explain(places))
    level, quota_E = found
    return Quotas(
        quota_E=quota_E,
        stay_J=in_place(quota_E, expert_J, pairs_J),
        peak=level,
        wire_rows=cuts.wire(level),
    )


def _wires_only(places: Places, *, careful: bool = True) -> Cuts:
    """Cuts where loads have no limit: the level plays no part."""
    free_R = np.full(places.problem.topology.ranks, UNLIMITED)
    return Cuts(places, free_R, places.problem.wire_rows, 0.0, loads=False, careful=careful)


def _carried(places: Places) -> bool:
    """Whether the drop cap suffices for the cap on wires, in fractions: quick, and most refusals end here."""
    cover = _wires_only(places).solve(1)
    return not cover.short and cover.total <= places.problem.drop_cap + 1e-6


def _least(cuts: Cuts, level: int = 0) -> tuple[int, IntArray] | None:
    """The least level of at least `level` where whole quotas are found, and those; None where no level will do."""
    problem = cuts.places.problem
    if cuts.loads:
        mean = -(-(problem.pairs - problem.drop_cap) // problem.topology.ranks)
        level = max(level, mean, overload_goal(problem))
    step, patience = 1, 16 if cuts.small else 2
    for number in range(_TRIES):
        reached = _bound(cuts, level, problem.drop_cap)
        if reached is None:
            return None
        level, cover = reached
        quota_E = _quotas(cuts, cover, level)
        if quota_E is not None:
            return level, quota_E
        if level > problem.pairs * max(problem.wire_weight, cuts.weight, 1.0):
            return None
        level, step = level + step, step * 2 if number >= patience else step
    return None


def _bound(cuts: Cuts, level: int, drop_cap: int) -> tuple[int, Cover] | None:
    """The least level of at least `level` whose least drops (in fractions) fit the cap, by Newton steps from below."""
    small = 1e-6
    while True:
        cover = cuts.solve(level)
        excess = cover.short or cover.total - drop_cap
        if excess <= small:
            return level, cover
        rate = float((cover.price_K * cuts.rates(level)).sum())
        if rate <= 1e-12:
            return None
        level += max(1, math.ceil(excess / rate - small))


def _quotas(cuts: Cuts, cover: Cover, level: int) -> IntArray | None:
    """Whole quotas at a level: near the least loss, else with the fewest drops; None where none is found."""
    problem = cuts.places.problem
    kept_E = problem.counts_E - cover.drops_E
    least = max(problem.pairs - problem.drop_cap, int(problem.floor_E.sum()))
    most = max(math.floor(float(kept_E.sum()) + 1e-6), least)
    if problem.drop == "always":
        totals = [least, *([most] if most > least else [])]
    else:
        totals = [t for t in (most, most - 1, most - 2, most - 4, most - 8) if t > least] + [least]
    for total in totals:
        priced_E = _priced(cuts, total, level)
        best = _mix(cuts, kept_E, priced_E, total, level)
        for share in (best, 0.0) if best > 0 else (0.0,):
            mixed_E = kept_E + share * (priced_E - kept_E)
            quota_E = cuts.whole(_shrunk(problem, mixed_E, total), mixed_E, total, level)
            if quota_E is not None:
                return quota_E
    return None


def _shrunk(problem: Problem, mixed_E: FloatArray, total: int) -> IntArray:
    """Whole numbers of the sum `total`, at most one above the real ones and in proportion to them."""
    whole_E = np.floor(mixed_E + 1e-6).astype(np.int64)
    low_E = problem.floor_E
    if int(whole_E.sum()) <= total:
        return np.clip(whole_E, low_E, problem.counts_E)
    return fill(total, mixed_E, low_E, np.clip(whole_E, low_E, problem.counts_E))


def _priced(cuts: Cuts, total: int, level: int) -> FloatArray:
    """Real quotas near the least loss with prices on the cuts and on the sum, float64 (E,)."""
    problem = cuts.places.problem
    low, high = problem.floor_E.astype(np.float64), problem.counts_E.astype(np.float64)
    table_KE = np.vstack([*cuts.rows, np.ones_like(high)])
    limit_K = np.maximum(np.append(cuts.limits(level), float(total)), 1e-9)
    cells = Cells.of(problem)
    constant = cells.constant(float(total))
    price_K = np.ones(limit_K.size)
    quota = high
    for _ in range(_ROUNDS):
        paid = (table_KE * price_K[:, None]).sum(axis=0)
        quota = np.clip(cells.kept(constant / np.sqrt(np.maximum(paid, 1e-12))), low, high)
        ratio = (table_KE * quota).sum(axis=1) / limit_K
        price_K = np.clip(price_K * ratio * ratio, 1e-9, 1e12)
    return quota


def _mix(cuts: Cuts, kept_E: FloatArray, priced_E: FloatArray, total: int, level: int) -> float:
    """How far quotas may go from those of fewest drops towards the priced ones inside all cuts and above `total`."""
    change_E, share = priced_E - kept_E, 1.0
    for row_E, limit in zip(cuts.rows, cuts.limits(level).tolist(), strict=True):
        slope = float((row_E * change_E).sum())
        if slope > 1e-9:
            share = min(share, max(limit - float((row_E * kept_E).sum()), 0.0) / slope)
    falls = -float(change_E.sum())
    if falls > 1e-9:
        share = min(share, max(float(kept_E.sum()) - total, 0.0) / falls)
    return share


def _explain(places: Places) -> str:
    """The numbers a user needs: who takes in too much, and what would do."""
    problem, ranks = places.problem, places.problem.topology.ranks
    free_R = np.full(ranks, UNLIMITED)
    only_wires = Cuts(places, free_R, None, 1.0, loads=False)
    found = _least(only_wires, (problem.wire_rows or 0) + 1)
    if found is None:  # no set of quotas at all: cannot be, because a wire of all pairs carries every plan
        raise AssertionError("a network without limit cannot carry the call")
    least, quota_E = found
    blocked = only_wires.blocked(quota_E, least - 1)
    rank = int(np.flatnonzero(blocked.entered_R)[0]) if blocked else 0
    share = _drop_share(places)
    drop = f", max_drop of at least {share:.3f}" if share else ""
    return (
        f"rank {rank} must take in {least} rows over the network in backward although {problem.drop_cap} of "
        f"{problem.pairs} pairs may be left out (max_drop={problem.max_drop}), and its cap is "
        f"wire_rows={problem.wire_rows}. What would work: wire_rows of at least {least}{drop}, or replicas nearer to "
        "the sources (slots, local_rows)"
    )


def _drop_share(places: Places) -> float | None:
    """A share of drops, in thousandths, that the cap on wires needs; None where the floors forbid every one."""
    problem = places.problem
    cover = _wires_only(places).solve(1)
    if cover.short:
        return None
    thousandths = math.ceil(1000 * cover.total / max(problem.pairs, 1))
    for one in range(thousandths, min(thousandths + 4, 1000)):
        asked = replace(places, problem=replace(problem, max_drop=one / 1000, drop="always"))
        cuts = _wires_only(asked, careful=False)
        cover = cuts.solve(1)
        if cover.total <= asked.problem.drop_cap + 1e-6 and _quotas(cuts, cover, 1) is not None:
            return one / 1000
    return None
