"""Excess-room matching: one attempt to bring every rank down to a level by copying experts.

Ranks above the level give, ranks below it take: the most loaded rank copies an expert to the emptiest one and moves
pairs to it. The last free slot of a rank is filled exactly, even if the giver falls below the level (Walker's alias
rule, 1977), so few slots suffice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

from lrmoe.planning.problem import Topology


class Matching:
    """One attempt: loads (replicas charged), free slots, pairs left at home, pairs moved by (rank, expert)."""

    def __init__(self, counts: list[int], topology: Topology, slots: int, charge: int) -> None:
        local = topology.experts_per_rank
        self.left, self.local, self.charge = list(counts), local, charge
        self.load = [sum(counts[r * local : (r + 1) * local]) for r in range(topology.ranks)]
        self.free = [slots] * topology.ranks
        self.moved: dict[tuple[int, int], int] = {}

    @property
    def peak(self) -> int:
        """Largest load, replicas charged."""
        return max(self.load)

    def fill(self, level: int, ranks: range, seed: int = 0) -> bool:
        """Match givers with takers among `ranks` until none is above `level`; whether that succeeded.

        Seed 0 is the plain rule. Others sometimes take the second of a heap, give more than needed, or choose an
        expert of half the room.
        """
        load, free, charge = self.load, self.free, self.charge
        givers = [(-load[r], r) for r in ranks if load[r] > level]
        takers = [(load[r], r) for r in ranks if free[r] and load[r] + charge < level]
        heapify(givers)
        heapify(takers)
        owned: dict[int, list[tuple[int, int]]] = {}
        state = seed * 2654435761 & 0x7FFFFFFF
        while givers:
            if not takers:
                return False
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF if seed else 0
            a, b = _take(givers, state >> 16 & 3 == 1), _take(takers, state >> 18 & 3 == 1)
            own = owned.get(a) or owned.setdefault(a, self._own(a))
            room = level - load[b] - charge
            whole = free[b] == 1 or state >> 20 & 3 == 1
            want = room if whole else min(load[a] - level, room)
            if not self._move(a, b, own, want, -(-room // free[b]) if state >> 22 & 1 else want):
                return False
            if load[a] > level:
                heappush(givers, (-load[a], a))
            elif free[a] and load[a] + charge < level:
                heappush(takers, (load[a], a))
            if free[b] and load[b] + charge < level:
                heappush(takers, (load[b], b))
        return True

    def _own(self, rank: int) -> list[tuple[int, int]]:
        return sorted((self.left[e], e) for e in range(rank * self.local, (rank + 1) * self.local))

    def _move(self, a: int, b: int, own: list[tuple[int, int]], want: int, size: int) -> bool:
        """Copy to b the smallest expert homed on a with `size` pairs left, else its largest; move up to `want`."""
        left, expert = own.pop(min(bisect_left(own, (size, -1)), len(own) - 1))
        pairs = min(want, left)
        if pairs <= 0:
            return False
        self.left[expert] = left - pairs
        insort(own, (left - pairs, expert))
        if (b, expert) not in self.moved:
            self.free[b] -= 1
            self.load[b] += self.charge
        self.moved[b, expert] = self.moved.get((b, expert), 0) + pairs
        self.load[a] -= pairs
        self.load[b] += pairs
        return True

    def across(self, level: int, topology: Topology) -> None:
        """Copies between nodes, only as many as bring every node down to the level of its ranks."""
        size, load, free = topology.ranks_per_node or topology.ranks, self.load, self.free
        spans = [range(n * size, (n + 1) * size) for n in range(topology.nodes)]
        total = [sum(load[r] for r in span) for span in spans]
        while True:
            a = max(range(len(spans)), key=lambda n: (total[n], -n))
            takers = [r for r in range(topology.ranks) if free[r] and load[r] + self.charge < level]
            takers = [r for r in takers if total[r // size] + self.charge < level * size]
            if total[a] <= level * size or not takers:
                return
            b = min(takers, key=lambda r: (total[r // size], load[r], r))
            own = sorted(
                (self.left[r * self.local + i], r * self.local + i)
                for r in spans[a]
                for i in range(self.local)
            )
            room = min(level - load[b], level * size - total[b // size]) - self.charge
            want = min(total[a] - level * size, room)
            expert = own[min(bisect_left(own, (want, -1)), len(own) - 1)][1]
            home = expert // self.local
            before = load[home], load[b]
            if not self._move(home, b, [(self.left[expert], expert)], want, want):
                return
            total[a] += load[home] - before[0]
            total[b // size] += load[b] - before[1]


def _take(heap: list[tuple[int, int]], second: bool) -> int:
    """Pop the first rank of a heap, or the second one where asked and there is one."""
    first = heappop(heap)
    if second and heap:
        other = heappop(heap)
        heappush(heap, first)
        return other[1]
    return first[1]
