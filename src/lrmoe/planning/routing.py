"""Where kept pairs run among the instances that exist: the least possible peak, and few pairs moved.

With k[e] pairs per expert and instance sets I(e), the least integer peak is max over non-empty sets D of ranks of
ceil(f(D) / |D|), f(D) = sum of k[e] over experts with I(e) inside D: the cheapest finite cut of the network
source -> expert -> instance ranks -> sink with exactly D on the source side costs N - f(D) + T |D|, and capacities are
integers. `flow.Network` reaches it for every input.

Shape letters: R ranks, E experts, J instances.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lrmoe.planning.flow import UNLIMITED, Network
from lrmoe.planning.problem import IntArray

SLACKS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """Pairs each instance runs.

    Attributes:
        pairs_J: int64 (J,). least_peak: the least possible peak. moved: pairs that run elsewhere than they stayed.
        load_R: int64 (R,). cost: largest load, with `move_rows` more for every pair moved in.
    """

    pairs_J: IntArray
    least_peak: int
    moved: int
    load_R: IntArray
    cost: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Limits:
    """Bounds beside the peak.

    Attributes:
        cap_R: int64 (R,), most pairs of each rank, or None.
        wire_R: int64 (R,), most pairs that may enter each rank from others, or None.
        local_J: int64 (J,), pairs whose source is the instance's own rank; read with `wire_R`.
    """

    cap_R: IntArray | None = None
    wire_R: IntArray | None = None
    local_J: IntArray | None = None


class Case:
    """One routing question as lists, and its start: every pair where it stays."""

    def __init__(
        self, expert_J: IntArray, rank_J: IntArray, stay_J: IntArray, ranks: int, limits: Limits
    ) -> None:
        self.rank, self.stay, self.ranks = rank_J.tolist(), stay_J.tolist(), ranks
        self.load = np.bincount(rank_J, stay_J, minlength=ranks).astype(np.int64).tolist()
        if sum(self.stay) >= 2**53:  # bincount's weights are floats
            self.load = [0] * ranks
            for rank, pairs in zip(self.rank, self.stay, strict=True):
                self.load[rank] += pairs
        self.cap = None if limits.cap_R is None else limits.cap_R.tolist()
        self.wire = None if limits.wire_R is None else limits.wire_R.tolist()
        self.local = [UNLIMITED] * len(self.rank) if limits.local_J is None else limits.local_J.tolist()
        self.groups = _groups(expert_J)

    @property
    def within(self) -> bool:
        """Whether every rank keeps its caps where pairs stay."""
        capped = self.cap is not None and any(a > b for a, b in zip(self.load, self.cap, strict=True))
        return not capped and self.wire is None

    def network(self) -> tuple[Network, dict[int, list[int]]]:
        """Arcs of the instances that share their expert (all of them where wires count)."""
        wires = self.wire is not None
        groups = self.groups if wires else [group for group in self.groups if len(group) > 1]
        network = Network(self.load, len(groups), wires=wires)
        arcs: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            node = network.expert(number)
            for j in group:
                rank, pairs = self.rank[j], self.stay[j]
                if not wires:
                    arcs[j] = [network.join(node, rank, UNLIMITED, pairs)]
                    continue
                inside = min(pairs, self.local[j])
                arcs[j] = [
                    network.join(node, rank, self.local[j] - inside, inside),
                    network.join(node, network.wire(rank), UNLIMITED, pairs - inside),
                ]
        if self.wire is not None:
            _join_wires(network, self.wire)
        return network, arcs


def _groups(expert_J: IntArray) -> list[list[int]]:
    """Instances of each expert, in the order of experts."""
    order = np.argsort(expert_J, kind="stable")
    starts = np.flatnonzero(np.diff(expert_J[order])) + 1
    edges = [0, *starts.tolist(), len(order)]
    listed = order.tolist()
    return [listed[a:b] for a, b in pairwise(edges) if b > a]


def _join_wires(network: Network, wire: list[int]) -> None:
    """Wires with what enters now; what a wire cannot carry is taken off and must be placed anew."""
    for rank, most in enumerate(wire):
        node = network.wire(rank)
        inward = [arc for arc in network.arcs[node] if arc & 1]
        entering = sum(network.room[arc] for arc in inward)
        excess = max(entering - most, 0)
        for arc in inward:
            taken = min(excess, network.room[arc])
            if taken:
                excess -= taken
                network.room[arc] -= taken
                network.load[rank] -= taken
                network.load[network.unplaced] += taken
                network.join(network.unplaced, network.head[arc], taken)
        entering = min(entering, most)
        network.join(node, rank, most - entering, entering)


def route(
    expert_J: IntArray,
    rank_J: IntArray,
    stay_J: IntArray,
    ranks: int,
    *,
    limits: Limits | None = None,
    move_rows: float = 0.0,
) -> Routing:
    """Spread pairs over the instances of their experts at the least peak, starting from where they stay.

    Where a moved pair counts `move_rows` rows more at its new rank, peaks up to 8 % above the least one (and staying
    put) are tried too, and the smallest max over ranks of load + move_rows * moved in wins.

    Args:
        expert_J, rank_J: int64 (J,), at most one instance of an expert on a rank.
        stay_J: int64 (J,), pairs that each instance runs if nothing moves.
        ranks: number of ranks. limits: caps on ranks and wires, or None.

    Raises:
        InfeasibleError: the caps cannot be met.
    """
    case = Case(expert_J, rank_J, stay_J, ranks, limits or Limits())
    floor = -(-sum(case.stay) // ranks)
    least, pairs = _at(case, floor)
    best = _judge(case, pairs, least, move_rows)
    if move_rows <= 0 or best.moved == 0:
        return best
    for slack in SLACKS[1:]:
        level = least + int(slack * least)
        best = _better(best, _judge(case, _at(case, level)[1], least, move_rows))
    if case.within:
        best = _better(best, _judge(case, case.stay, least, move_rows))
    return best


def _at(case: Case, level: int) -> tuple[int, list[int]]:
    """The least level of at least `level`, and pairs per instance at it with few moves."""
    if case.within and max(case.load, default=0) <= level:
        return level, case.stay
    network, arcs = case.network()
    reached = network.lower(level, case.cap)
    pairs = list(case.stay)
    for j, mine in arcs.items():
        pairs[j] = sum(network.used(arc) for arc in mine)
    _send_back(case, pairs, network.load[: case.ranks], reached)
    return reached, pairs


def _send_back(case: Case, pairs: list[int], load: list[int], level: int) -> None:
    """Return moved pairs to where they stayed as long as one of them can go back at the same peak. In place."""
    room = [min(level, cap) - now for cap, now in zip(case.cap or [level] * case.ranks, load, strict=True)]
    entering = [0] * case.ranks
    if case.wire is not None:
        for j, rank in enumerate(case.rank):
            entering[rank] += max(pairs[j] - case.local[j], 0)
    active = [group for group in case.groups if any(pairs[j] != case.stay[j] for j in group)]
    changed = True
    while changed:
        changed = False
        for group in active:
            for b in group:
                for a in group if pairs[b] < case.stay[b] else ():
                    amount = min(pairs[a] - case.stay[a], case.stay[b] - pairs[b], room[case.rank[b]])
                    if case.wire is not None:
                        free = case.wire[case.rank[b]] - entering[case.rank[b]]
                        amount = min(amount, free + max(case.local[b] - pairs[b], 0))
                    if amount > 0:
                        _shift(case, pairs, room, entering, a, b, amount)
                        changed = True


def _shift(
    case: Case, pairs: list[int], room: list[int], entering: list[int], a: int, b: int, amount: int
) -> None:
    """Move pairs from instance a to instance b and keep the accounts."""
    for j, change in ((a, -amount), (b, amount)):
        before = max(pairs[j] - case.local[j], 0)
        pairs[j] += change
        entering[case.rank[j]] += max(pairs[j] - case.local[j], 0) - before
        room[case.rank[j]] -= change


def _judge(case: Case, pairs: list[int], least: int, move_rows: float) -> Routing:
    load, moved_in = [0] * case.ranks, [0] * case.ranks
    for rank, now, stay in zip(case.rank, pairs, case.stay, strict=True):
        load[rank] += now
        if now > stay:
            moved_in[rank] += now - stay
    return Routing(
        pairs_J=np.array(pairs, dtype=np.int64),
        least_peak=least,
        moved=sum(moved_in),
        load_R=np.array(load, dtype=np.int64),
        cost=max(one + move_rows * more for one, more in zip(load, moved_in, strict=True)),
    )


def _better(best: Routing, other: Routing) -> Routing:
    return other if (other.cost, other.moved) < (best.cost, best.moved) else best
