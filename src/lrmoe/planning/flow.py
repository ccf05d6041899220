"""Least possible level of load when pairs may move between instances of their expert: exact, by augmenting paths.

Nodes: ranks, one place for dropped pairs, one for pairs not placed yet, a wire into every rank where rows that enter
over the network are capped, and experts. Loads live on ranks; arcs say what may still move.

    expert e -> rank d           pairs of e that d may still take (without limit, or the local ones where wires count)
    rank d   -> expert e         pairs of e that d runs now
    expert e -> wire d -> rank d pairs of e that enter d from other ranks

A search from the overloaded ranks that finds no room has reached a closed set Q, and the ranks in Q must carry all of
its load: the level is raised to the mean over Q and never beyond what is necessary. This is Newton's method for the
largest of f(D) / |D| over sets D of ranks (Dinkelbach 1967) with Dinic's blocking flows.
"""

from __future__ import annotations

from lrmoe.errors import InfeasibleError

UNLIMITED = 2**62


class Network:
    """Residual network of one expert-parallel group; loads are changed in place.

    Attributes:
        ranks: number of ranks. load: pairs on each rank, then dropped pairs, then pairs not placed yet.
        arcs: outgoing arc ids of each node; arc a ends at head[a], carries up to room[a] more, and a ^ 1 undoes it.
    """

    def __init__(self, load_R: list[int], experts: int, *, wires: bool) -> None:
        self.ranks = len(load_R)
        self.load = [*load_R, 0, 0]
        self.dropped, self.unplaced = self.ranks, self.ranks + 1
        self._wire = self.ranks + 2
        self._expert = self._wire + (self.ranks if wires else 0)
        self.arcs: list[list[int]] = [[] for _ in range(self._expert + experts)]
        self.head: list[int] = []
        self.room: list[int] = []

    def expert(self, e: int) -> int:
        """Node of an expert."""
        return self._expert + e

    def wire(self, rank: int) -> int:
        """Node of the wire into a rank."""
        return self._wire + rank

    def join(self, tail: int, head: int, room: int, used: int = 0) -> int:
        """Add an arc that carries `used` already and up to `room` more; returns its id."""
        arc = len(self.head)
        self.head += (head, tail)
        self.room += (room, used)
        self.arcs[tail].append(arc)
        self.arcs[head].append(arc + 1)
        return arc

    def used(self, arc: int) -> int:
        """What an arc carries."""
        return self.room[arc ^ 1]

    def lower(self, level: int, cap_R: list[int] | None = None, drop_cap: int = 0) -> int:
        """Move pairs until no rank runs more than the least possible level, and return that level.

        Args:
            level: where to start; the result is at least this. cap_R: most pairs of each rank, or None.
            drop_cap: most pairs that the place for dropped pairs takes.

        Raises:
            InfeasibleError: the caps of a set of ranks and of the drop cannot hold what must run there.
        """
        cap = cap_R or [UNLIMITED] * self.ranks
        while True:
            limit = [min(level, one) for one in cap] + [drop_cap, 0]
            stuck = self.relieve(limit)
            if stuck is None:
                return level
            level = self._necessary(stuck, cap, drop_cap)

    def relieve(self, limit: list[int]) -> list[int] | None:
        """Move load above the limits to where room is left: None, or the places reached when none was left."""
        load = self.load
        while True:
            sources = [place for place, most in enumerate(limit) if load[place] > most]
            if not sources:
                return None
            depth, found = self._depths(sources, limit)
            if not found:
                return [place for place in range(len(limit)) if depth[place] >= 0]
            turn = [0] * len(self.arcs)
            for source in sources:
                while load[source] > limit[source] and self._push(source, limit, depth, turn):
                    pass

    def reached(self, limit: list[int]) -> list[bool]:
        """Whether each node can be reached from a place above its limit, after `relieve` found no room."""
        sources = [place for place, most in enumerate(limit) if self.load[place] > most]
        return [one >= 0 for one in self._depths(sources, limit)[0]]

    def _necessary(self, stuck: list[int], cap: list[int], drop_cap: int) -> int:
        """Least level at which the places reached could hold their load."""
        total = sum(self.load[place] for place in stuck)
        if self.dropped in stuck:
            total -= drop_cap
        caps = sorted(cap[place] for place in stuck if place < self.ranks)
        for index, one in enumerate(caps):  # ranks before `index` are full at their caps
            level = -(-total // (len(caps) - index))
            if level <= one:
                return level
            total -= one
        raise InfeasibleError(
            f"ranks {[p for p in stuck if p < self.ranks]} must run {total} pairs more than their caps allow"
        )

    def _depths(self, sources: list[int], limit: list[int]) -> tuple[list[int], bool]:
        """Breadth-first distance of every node from the sources, -1 where unreached; whether room was found."""
        arcs, head, room, load, places = self.arcs, self.head, self.room, self.load, len(limit)
        depth = [-1] * len(arcs)
        for source in sources:
            depth[source] = 0
        front, found, step = sources, False, 0
        while front and not found:
            step += 1
            reached: list[int] = []
            for node in front:
                for arc in arcs[node]:
                    if room[arc] > 0:
                        to = head[arc]
                        if depth[to] < 0:
                            depth[to] = step
                            reached.append(to)
                            if to < places and load[to] < limit[to]:
                                found = True
            front = reached
        return depth, found

    def _push(self, source: int, limit: list[int], depth: list[int], turn: list[int]) -> bool:
        """Send what one shortest path from `source` carries; `turn` remembers arcs known to lead nowhere."""
        arcs, head, room, load = self.arcs, self.head, self.room, self.load
        path: list[int] = []
        node, places = source, len(limit)
        while not (node < places and load[node] < limit[node]):
            out, index, deeper = arcs[node], turn[node], depth[node] + 1
            while index < len(out) and not (room[out[index]] > 0 and depth[head[out[index]]] == deeper):
                index += 1
            turn[node] = index
            if index < len(out):
                path.append(out[index])
                node = head[out[index]]
            elif path:
                node = head[path.pop() ^ 1]
                turn[node] += 1
            else:
                return False
        amount = min(load[source] - limit[source], limit[node] - load[node], *(room[arc] for arc in path))
        for arc in path:
            room[arc] -= amount
            room[arc ^ 1] += amount
        load[source] -= amount
        load[node] += amount
        return True
