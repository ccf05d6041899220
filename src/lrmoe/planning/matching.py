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
        self.gateway: dict[int, list[int]] = {}  # experts that came to a rank from other nodes

    @property
    def peak(self) -> int:
        """Largest load, replicas charged."""
        return max(self.load)

    def copy(self) -> Matching:
        """The same attempt, to go on with apart."""
        other = Matching.__new__(Matching)
        other.local, other.charge = self.local, self.charge
        other.left, other.load, other.free = list(self.left), list(self.load), list(self.free)
        other.moved = dict(self.moved)
        other.gateway = {rank: list(experts) for rank, experts in self.gateway.items()}
        return other

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
        """What a rank can give, fewest pairs first: experts at home, and copies that came from other nodes."""
        homed = [(self.left[e], e) for e in range(rank * self.local, (rank + 1) * self.local)]
        return sorted(homed + [(self.moved[rank, e], e) for e in self.gateway.get(rank, ())])

    def _move(self, a: int, b: int, own: list[tuple[int, int]], want: int, size: int) -> bool:
        """Copy to b the smallest expert of a with `size` pairs left, else its largest; move up to `want` pairs."""
        left, expert = own.pop(min(bisect_left(own, (size, -1)), len(own) - 1))
        pairs = min(want, left)
        if pairs <= 0:
            return False
        insort(own, (left - pairs, expert))
        if expert // self.local == a:
            self.left[expert] = left - pairs
        else:
            self.moved[a, expert] = left - pairs
        if (b, expert) not in self.moved:
            self.free[b] -= 1
            self.load[b] += self.charge
        self.moved[b, expert] = self.moved.get((b, expert), 0) + pairs
        self.load[a] -= pairs
        self.load[b] += pairs
        return True

    def give(self, expert: int, rank: int, pairs: int) -> None:
        """Copy one expert to a rank and move up to `pairs` pairs there from its home."""
        self._move(expert // self.local, rank, [(self.left[expert], expert)], pairs, pairs)

    def across(self, level: int, topology: Topology) -> None:
        """Copies between nodes, only as many as bring every node down to the level of its ranks.

        Each lands on one rank of its node, which may then give it on inside the node.
        """
        size = topology.ranks // topology.nodes
        spans = [range(n * size, (n + 1) * size) for n in range(topology.nodes)]
        total, most = [sum(self.load[r] for r in span) for span in spans], level * size
        owned: dict[int, list[tuple[int, int]]] = {}
        gates = [self._gate(span) for span in spans]
        while max(total) > most:
            a = total.index(max(total))
            takers = [n for n, load in enumerate(total) if load + self.charge < most and gates[n] >= 0]
            if not takers:
                return
            b = min(takers, key=lambda n: (total[n], n))
            if a not in owned:
                owned[a] = sorted(entry for rank in spans[a] for entry in self._own(rank))
            want = min(total[a] - most, most - total[b] - self.charge)
            left, expert = owned[a].pop(min(bisect_left(owned[a], (want, -1)), len(owned[a]) - 1))
            gate = gates[b]
            if min(left, want) <= 0:
                return
            self.give(expert, gate, want)
            insort(owned[a], (self.left[expert], expert))
            self.gateway.setdefault(gate, []).append(expert)
            total[a] -= left - self.left[expert]
            total[b] = sum(self.load[r] for r in spans[b])
            for node in (b, expert // self.local // size):  # only their loads have changed
                gates[node] = self._gate(spans[node])

    def _gate(self, span: range) -> int:
        """The emptiest rank of a node that has a free slot, or -1."""
        return min((r for r in span if self.free[r]), key=lambda r: (self.load[r], r), default=-1)


def _take(heap: list[tuple[int, int]], second: bool) -> int:
    """Pop the first rank of a heap, or the second one where asked and there is one."""
    first = heappop(heap)
    if second and heap:
        other = heappop(heap)
        heappush(heap, first)
        return other[1]
    return first[1]
