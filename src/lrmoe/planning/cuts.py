"""Cuts of the backward network with capped wires: which sets of ranks cannot carry what only they may run.

Shape letters: R ranks, E experts, J instances, K cuts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lrmoe.planning.covering import Cover, Covering
from lrmoe.planning.flow import UNLIMITED
from lrmoe.planning.prices import in_place
from lrmoe.planning.problem import FloatArray, IntArray, Problem
from lrmoe.planning.routing import Case, Limits

BoolArray = NDArray[np.bool_]
_FINE = 1024  # parts of a pair in flows of real quotas
_REPAIRS = 48
_PARTNERS = 24  # experts whose changes are tried in pairs
_TABLE = 4096  # cuts times experts up to which single pairs are searched
_SMALL = 8  # steps (of both signs) that are tried in pairs


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Instances in the order (rank, expert) and their forward pairs, int64 (J,) each."""

    problem: Problem
    expert_J: IntArray
    rank_J: IntArray
    pairs_J: IntArray

    @cached_property
    def share_J(self) -> FloatArray:
        """Share of the expert's pairs whose source is the instance's own rank, float64 (J,)."""
        own_J = self.problem.counts_RE[self.rank_J, self.expert_J]
        return own_J / np.maximum(self.problem.counts_E, 1)[self.expert_J]


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocked:
    """Ranks that block: `full_R` by their load, `entered_R` by what enters them; `excess` pairs cannot run."""

    full_R: BoolArray
    entered_R: BoolArray
    excess: int


def local_rows(problem: Problem, expert_J: IntArray, rank_J: IntArray, quota_E: IntArray) -> IntArray:
    """Kept pairs that wait on the instance's own rank, int64 (J,): in proportion to the counts, rounded down."""
    own_J = problem.counts_RE[rank_J, expert_J]
    high = int(problem.counts_E.max(initial=0)) + 1
    wide = high * (int(quota_E.max(initial=0)) + 1) >= 2**62
    product = own_J.astype(object) * quota_E[expert_J] if wide else own_J * quota_E[expert_J]
    return (product // np.maximum(problem.counts_E, 1)[expert_J]).astype(np.int64)


class Cuts:
    """The cuts found so far, and the covering program over them.

    Args:
        places: instances. cap_R: int64 (R,), most load of each rank at any level. wire_rows: most entering rows.
        weight: rows of the level that an entering row counts. loads: whether the level limits loads at all.
        careful: whether quotas are searched pair by pair where rounding alone breaks a cut (small tables only).
    """

    def __init__(
        self,
        places: Places,
        cap_R: IntArray,
        wire_rows: int | None,
        weight: float,
        *,
        loads: bool = True,
        careful: bool = True,
    ) -> None:
        problem, self.careful = places.problem, careful
        self.places, self.weight, self.loads, self.cap_R = places, weight, loads, cap_R
        self.wire_rows = UNLIMITED if wire_rows is None else wire_rows
        self.covering = Covering((problem.counts_E - problem.floor_E).astype(np.float64))
        self.rows: list[FloatArray] = []
        self.sides: list[tuple[BoolArray, BoolArray]] = []
        self.seen: set[bytes] = set()

    @property
    def small(self) -> bool:
        """Whether quotas are searched pair by pair."""
        return self.careful and (len(self.rows) + 1) * self.places.problem.topology.experts <= _TABLE

    def wire(self, level: int) -> int:
        """Most whole rows that may enter a rank."""
        if self.weight <= 0:
            return self.wire_rows
        return min(self.wire_rows, math.floor(min(level / self.weight, float(2**53))))

    def _wire(self, level: int) -> float:
        """Most rows that may enter a rank, with fractions."""
        return float(self.wire_rows) if self.weight <= 0 else min(float(self.wire_rows), level / self.weight)

    def load_R(self, level: int) -> IntArray:
        """Most load of each rank."""
        return np.minimum(self.cap_R, level if self.loads else UNLIMITED)

    def limits(self, level: int, *, whole: bool = False) -> FloatArray:
        """Right side of every cut, float64 (K,), with whole rows on every wire or with fractions."""
        wire = float(self.wire(level)) if whole else self._wire(level)
        load_R = self.load_R(level).astype(np.float64)
        return np.array([load_R[full].sum() + wire * int(entered.sum()) for full, entered in self.sides])

    def rates(self, level: int) -> FloatArray:
        """How fast the right sides grow with the level, float64 (K,)."""
        open_R = (self.cap_R > level) & self.loads
        wire = 1 / self.weight if self.weight > 0 and level / self.weight < self.wire_rows else 0.0
        return np.array([open_R[full].sum() + wire * int(entered.sum()) for full, entered in self.sides])

    def solve(self, level: int) -> Cover:
        """Least drops, in fractions, that make the level possible."""
        counts_E = self.places.problem.counts_E.astype(np.float64)
        while True:
            full = np.array([float((row * counts_E).sum()) for row in self.rows])
            cover = self.covering.solve(full - self.limits(level))
            if cover.short or not self._grow(counts_E - cover.drops_E, level):
                return cover

    def _grow(self, kept_E: FloatArray, level: int) -> bool:
        """Add a cut that these real quotas violate; whether there was one."""
        fine = max(1, min(_FINE, 2**61 // (int(self.places.problem.counts_E.max(initial=0)) + 1) ** 2))
        blocked = self.blocked(np.floor(kept_E * fine).astype(np.int64), level, fine)
        if blocked is None:
            return False
        key = np.concatenate([blocked.full_R, blocked.entered_R]).tobytes()
        row_E = self.row(blocked)
        self.sides.append((blocked.full_R, blocked.entered_R))
        passed = float((row_E * kept_E).sum()) - float(self.limits(level)[-1])
        if key in self.seen or passed <= 1e-7 * max(level, 1):
            self.sides.pop()
            return False
        self.seen.add(key)
        self.rows.append(row_E)
        self.covering.add(row_E)
        return True

    def row(self, blocked: Blocked) -> FloatArray:
        """Left side of a cut: of each kept pair, what only these ranks may take, float64 (E,)."""
        places, experts = self.places, self.places.problem.topology.experts
        outside_J = ~(blocked.full_R | blocked.entered_R)[places.rank_J]
        free_E = np.bincount(places.expert_J, outside_J, minlength=experts) > 0
        local_E = np.bincount(
            places.expert_J, places.share_J * blocked.entered_R[places.rank_J], minlength=experts
        )
        return np.where(free_E, 0.0, np.maximum(1.0 - local_E, 0.0))

    def blocked(self, quota_E: IntArray, level: int, fine: int = 1) -> Blocked | None:
        """Whether these quotas, in parts of 1 / fine pairs, cannot run at a level: the ranks that block, or None."""
        places, ranks = self.places, self.places.problem.topology.ranks
        local_J = local_rows(places.problem, places.expert_J, places.rank_J, quota_E)
        wire = self.wire(level) if fine == 1 else self._wire(level)
        wire_R = np.full(ranks, math.floor(min(wire, 2.0**50) * fine), dtype=np.int64)
        stay_J = in_place(quota_E, places.expert_J, places.pairs_J)
        case = Case(places.expert_J, places.rank_J, stay_J, ranks, Limits(wire_R=wire_R, local_J=local_J))
        network, _ = case.network()
        limit = [min(most, 2**50) * fine for most in self.load_R(level).tolist()] + [0, 0]
        if network.relieve(limit) is None:
            return None
        reached = np.array(network.reached(limit), dtype=bool)
        full_R, wires_R = reached[:ranks], reached[network.wire(0) : network.wire(0) + ranks]
        excess = sum(max(load - most, 0) for load, most in zip(network.load, limit, strict=True))
        return Blocked(full_R=full_R, entered_R=wires_R & ~full_R, excess=excess)

    def whole(self, quota_E: IntArray, near_E: FloatArray, total: int, level: int) -> IntArray | None:
        """Quotas that run at the level and sum to `total` at least, from `quota_E` near to `near_E`; None if not found.

        On whole pairs a cut is a sum of q[e] - sum of floor(C[d, e] q[e] / n[e]) over its entered ranks: search changes
        one or two quotas at a time until every cut known holds, and flow finds the next cut.
        """
        rows, sides = list(self.rows), list(self.sides)
        result = quota_E.copy()
        self._top_up(result, near_E, total, rows, self.limits(level, whole=True))
        for _ in range(_REPAIRS if self.small else 0):
            if not Repair(self, sides, total, level).run(result):
                return None
            blocked = self.blocked(result, level)
            if blocked is None:
                return result
            sides.append((blocked.full_R, blocked.entered_R))
        fits = not self.small and int(result.sum()) >= total and self.blocked(result, level) is None
        return result if fits else None

    def _top_up(
        self, quota_E: IntArray, near_E: FloatArray, total: int, rows: list[FloatArray], limit_K: FloatArray
    ) -> None:
        """Add pairs that no known cut forbids until the sum is reached: one to each first, then more. In place."""
        missing = total - int(quota_E.sum())
        if missing <= 0:
            return
        table_KE = np.array(rows).reshape(len(rows), quota_E.size)
        slack_K = limit_K - (table_KE * quota_E).sum(axis=1)
        order = np.argsort(-(near_E - quota_E), kind="stable").tolist()
        room_E = self.places.problem.counts_E - quota_E
        for most in (1, UNLIMITED):
            for e in order:
                if missing <= 0:
                    return
                used = table_KE[:, e] > 1e-12
                fits = float((slack_K[used] / table_KE[used, e]).min()) if used.any() else float(UNLIMITED)
                more = min(int(room_E[e]), missing, most, math.floor(max(min(fits, 2.0**53), 0.0) + 1e-9))
                if more > 0:
                    quota_E[e] += more
                    room_E[e] -= more
                    missing -= more
                    slack_K = slack_K - more * table_KE[:, e]


class Repair:
    """Search for whole quotas inside the cuts given: steepest descent on what is passed or missing, in pairs."""

    def __init__(self, cuts: Cuts, sides: list[tuple[BoolArray, BoolArray]], total: int, level: int) -> None:
        places, ranks = cuts.places, cuts.places.problem.topology.ranks
        self.places, self.total = places, total
        shape = (len(sides), ranks)
        full_KR = np.array([full for full, _ in sides], dtype=bool).reshape(shape)
        self.entered_KR = np.array([entered for _, entered in sides], dtype=bool).reshape(shape)
        load_R = np.minimum(cuts.load_R(level), 2**50)
        wire = min(cuts.wire(level), 2**50)
        self.limit_K = (full_KR * load_R).sum(axis=1) + wire * self.entered_KR.sum(axis=1)
        experts = places.problem.topology.experts
        outside_KJ = ~(full_KR | self.entered_KR)[:, places.rank_J]
        self.inside_KE = np.array(
            [np.bincount(places.expert_J, outside_J, minlength=experts) == 0 for outside_J in outside_KJ]
        ).reshape(len(sides), experts)

    def _used(self, quota_E: IntArray) -> IntArray:
        """What each expert needs of each cut, int64 (K + 1, E); the last row counts what is kept, negative."""
        places, experts = self.places, quota_E.size
        local_J = local_rows(places.problem, places.expert_J, places.rank_J, quota_E)
        used_KE = np.empty((self.limit_K.size + 1, experts), dtype=np.int64)
        for k, entered_R in enumerate(self.entered_KR):
            taken_J = np.where(entered_R[places.rank_J], local_J, 0)
            local_E = np.bincount(places.expert_J, taken_J, minlength=experts).astype(np.int64)
            used_KE[k] = np.where(self.inside_KE[k], quota_E - local_E, 0)
        used_KE[-1] = -quota_E
        return used_KE

    def run(self, quota_E: IntArray) -> bool:
        """Change the quotas in place until nothing is passed and nothing is missing; whether that succeeded."""
        problem = self.places.problem
        limit_K = np.append(self.limit_K, -self.total)
        steps = [1, 2, 3, 4, *(2**n for n in range(3, int(problem.counts_E.max(initial=1)).bit_length()))]
        while True:
            used_KE = self._used(quota_E)
            over_K = used_KE.sum(axis=1) - limit_K
            now = int(np.maximum(over_K, 0).sum())
            if now == 0:
                return True
            changes, lines = [], []
            for step in (s * sign for s in steps for sign in (1, -1)):
                new_E = np.clip(quota_E + step, problem.floor_E, problem.counts_E)
                changes.append(new_E - quota_E)
                lines.append(self._used(new_E) - used_KE)
            found = _best(over_K, np.array(changes), np.array(lines), now)
            if not found:
                return False
            for expert, change in found:
                quota_E[expert] += change


def _best(over_K: IntArray, change_SE: IntArray, line_SKE: IntArray, now: int) -> list[tuple[int, int]]:
    """The one or two changes (expert, pairs) that leave least passed, if less than now: one before two, small first."""
    single_SE = np.maximum(over_K[:, None] + line_SKE, 0).sum(axis=1)
    one = np.unravel_index(int(np.argmin(single_SE)), single_SE.shape)
    if single_SE[one] < now:
        return [(int(one[1]), int(change_SE[one]))]
    few = np.argsort(single_SE.min(axis=0), kind="stable")[:_PARTNERS]
    near = line_SKE[:_SMALL, :, few]
    flat = near.transpose(1, 0, 2).reshape(over_K.size, -1)
    expert = np.tile(few, near.shape[0])
    both = np.maximum(over_K[:, None, None] + flat[:, :, None] + flat[:, None, :], 0).sum(axis=0)
    both[expert[:, None] == expert[None, :]] = now
    two = np.unravel_index(int(np.argmin(both)), both.shape)
    if both[two] >= now:
        return []
    change = change_SE[:_SMALL, few].reshape(-1)
    return [(int(expert[i]), int(change[i])) for i in two]
