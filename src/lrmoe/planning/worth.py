"""Whether replicas are worth their traffic: a comparison of seconds, in rows of compute.

A call costs, on its slowest rank in each part, as telemetry's critical path adds them up:

    compute    (forward peak + 2 * backward peak) / 3
    crossing   cross_rows * rows that enter or leave a rank, the larger; half in forward, half in backward
    copies     copy_rows * copies that a rank receives or sends, the larger

Placements weighed: none, the lowest peak, a few peaks between the two (fewer copies), and the best of these with copies
that make pairs local. Peaks in backward are those of forward places cut to one water level by the drop cap, which the
quotas never exceed. Integers, and floats in a fixed order: the same on every rank.

Shape letters: R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from lrmoe.planning.copies import DIRECT
from lrmoe.planning.matching import Matching
from lrmoe.planning.placement import Placement, matched, placed, relaxed, unmatched
from lrmoe.planning.problem import Problem
from lrmoe.planning.quotas import overload_goal

SHIFTS = (5, 3, 1)  # levels weighed: 1/32, 1/8 and 1/2 of the way from the lowest peak to the fixed one


def worthwhile(problem: Problem, level: int | None = None) -> Placement | None:
    """The placement that costs least, or None where that is every expert at home.

    Args:
        problem: counts, slots, drop cap, `copy_rows` and `cross_rows`.
        level: load that placement need not go below, as in `place`.
    """
    scale, home = Scale(problem), unmatched(problem)
    at_home = scale.rows(home)
    best, least = home, at_home
    if scale.floor < at_home:
        for found in family(problem, home, level):
            rows = scale.rows(found)
            if rows < least:
                best, least = found, rows
    best = _nearer(scale, best, least, home.peak)
    return placed(best, problem.topology) if best.moved else None


def family(problem: Problem, home: Matching, level: int | None) -> list[Matching]:
    """The lowest peak, then peaks nearer to the fixed one as long as they could save copies for more than they cost.

    Args:
        home: every expert at home. level: as in `place`.
    """
    question = _unlocalised(problem)
    full = matched(question, level)
    found, saves = [full], 3 * problem.copy_rows * (busiest(full) - 1)
    for shift in SHIFTS:
        step = home.peak - full.peak >> shift
        if 0 < step < saves:
            found.append(relaxed(problem, home, full.peak + step))
    return found


def _unlocalised(problem: Problem) -> Problem:
    """The problem without its own rule for locality, which prices replace."""
    return problem if problem.local_rows is None else replace(problem, local_rows=None)


def busiest(match: Matching) -> int:
    """Copies that cross in the busier direction of the busiest rank when all weights go out once (copies.py)."""
    ranks = len(match.load)
    received, sent = [0] * ranks, [0] * ranks
    holders: dict[int, list[int]] = {}
    for rank, expert in match.moved:
        received[rank] += 1
        holders.setdefault(expert, []).append(rank)
    for expert, copies in holders.items():
        home = expert // match.local
        if len(copies) <= DIRECT:
            sent[home] += len(copies)
            continue
        tree = [home, *sorted(copies, key=lambda rank: (rank - home) % ranks)]
        for place in range(1, len(tree)):
            sent[tree[place - (1 << place.bit_length() - 1)]] += 1
    return max(max(received), max(sent))


@dataclass(frozen=True, eq=False)
class Scale:
    """What placements of one call cost, in rows."""

    problem: Problem

    def rows(self, match: Matching) -> float:
        """Rows that the call costs with these copies."""
        problem = self.problem
        load = self._load(match)
        level = self._level(load)
        kept = [min(rows, level) for rows in load]
        rows = (max(load) + 2 * max(kept)) / 3 + problem.copy_rows * busiest(match)
        if problem.cross_rows == 0:
            return rows
        enter, leave = self.crossing(match)
        share = sum(kept) / max(sum(load), 1)
        again = max(e * k / max(f, 1) for e, k, f in zip(enter, kept, load, strict=True))
        forward, backward = max(*enter, *leave), max(again, max(leave) * share)
        return rows + problem.cross_rows * (forward + backward) / 2

    def crossing(self, match: Matching) -> tuple[list[int], list[int]]:
        """Rows that enter and that leave each rank in forward: what its instances do not run of its own pairs."""
        counts_RE, local = self.problem.counts_RE, list(self._home_local)
        for expert in {expert for _, expert in match.moved}:
            home = expert // match.local
            local[home] -= max(int(counts_RE[home, expert]) - match.left[expert], 0)
        for (rank, expert), pairs in match.moved.items():
            local[rank] += min(int(counts_RE[rank, expert]), pairs)
        enter = [rows - own for rows, own in zip(self._load(match), local, strict=True)]
        leave = [rows - own for rows, own in zip(self._sent, local, strict=True)]
        return enter, leave

    def wanted(self, match: Matching, rank: int) -> tuple[int, int]:
        """The expert homed elsewhere that most pairs of a rank still go away for, and how many a copy could take."""
        if not match.free[rank]:
            return 0, 0
        row, first = self.problem.counts_RE[rank].copy(), rank * match.local
        row[first : first + match.local] = 0
        for holder, expert in match.moved:
            if holder == rank:
                row[expert] = 0
        expert = int(row.argmax())
        return expert, min(int(row[expert]), match.left[expert])

    def _load(self, match: Matching) -> list[int]:
        """Rows of each rank, without what its copies are charged."""
        slots, charge = self.problem.slots, match.charge
        return [rows - charge * (slots - free) for rows, free in zip(match.load, match.free, strict=True)]

    @cached_property
    def floor(self) -> float:
        """No placement with copies costs less."""
        problem, ranks = self.problem, self.problem.topology.ranks
        mean, kept = problem.pairs / ranks, (problem.pairs - self._cap) / ranks
        largest = int(problem.counts_RE.max(initial=0))
        leave = max(sent - own for sent, own in zip(self._sent, self._home_local, strict=True))
        leave = max(leave - problem.slots * largest, 0)
        share = kept / mean if mean else 1.0
        return (mean + 2 * kept) / 3 + problem.cross_rows * leave * (1 + share) / 2 + problem.copy_rows

    def _level(self, load: list[int]) -> int:
        """Height to which ranks are cut in backward: the least that the drop cap allows, or what `overload` needs."""
        if self._cap == 0:
            return max(load)
        total, level = -self._cap, 0
        for count, rows in enumerate(sorted(load, reverse=True), start=1):
            total += rows
            level = max(level, -(-total // count))
        return max(level, self._floor, self._goal)

    @cached_property
    def _cap(self) -> int:
        return self.problem.drop_cap

    @cached_property
    def _goal(self) -> int:
        return overload_goal(self.problem)

    @cached_property
    def _floor(self) -> int:
        """Least kept pairs of a rank whose experts all stay at home."""
        ranks = self.problem.topology.ranks
        return int(self.problem.floor_E.reshape(ranks, -1).sum(axis=1).max(initial=0))

    @cached_property
    def _home_local(self) -> list[int]:
        """Pairs of each rank's own tokens for its home experts."""
        ranks = self.problem.topology.ranks
        blocks = self.problem.counts_RE.reshape(ranks, ranks, -1).sum(axis=2)
        return [int(rows) for rows in blocks.diagonal()]

    @cached_property
    def _sent(self) -> list[int]:
        return [int(rows) for rows in self.problem.counts_RE.sum(axis=1)]


def _nearer(scale: Scale, match: Matching, rows: float, peak: int) -> Matching:
    """The same with copies that make pairs local, round by round for the ranks that most crosses.

    A round goes down the ranks to the first that no copy helps: those below it cross less anyway.

    Args:
        rows: what `match` costs; it ends where one round more would not lower that. peak: not to be passed.
    """
    while scale.problem.cross_rows > 0:
        enter, leave = scale.crossing(match)
        most = [max(both) for both in zip(enter, leave, strict=True)]
        more = match.copy()
        for rank in sorted(range(len(most)), key=lambda rank: (-most[rank], rank)):
            expert, pairs = scale.wanted(more, rank)
            if pairs * scale.problem.cross_rows <= scale.problem.copy_rows:
                break
            more.give(expert, rank, pairs)
        if len(more.moved) == len(match.moved):
            break
        cost = scale.rows(more)
        if cost >= rows or more.peak > peak:
            break
        match, rows = more, cost
    return match
