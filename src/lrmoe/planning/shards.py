"""Sharded storage: how every expert's weights are cut over all ranks, and what a layout makes the ranks exchange.

    one expert's projection, flattened   [ rank 0 | rank 1 | ... | rank R-1 : padding ]    R shards of equal size

Only elements travel, never padding. Shape letters: R ranks, E experts, Q seats of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lrmoe.errors import PlanError
from lrmoe.planning.memory import GRADIENT_BYTES, Execution
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray, Topology
from lrmoe.planning.seats import Seats


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one projection of every expert is cut.

    Attributes:
        rows, columns: its shape.
        ranks: equal parts, the last ones padded with zeros.

    Raises:
        PlanError: a size below 1.
    """

    rows: int
    columns: int
    ranks: int

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "ranks"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def size(self) -> int:
        """Elements of one expert."""
        return self.rows * self.columns

    @property
    def shard(self) -> int:
        """Elements of one expert on each rank, padding included."""
        return -(-self.size // self.ranks)

    def span(self, rank: int) -> slice:
        """The elements of one expert that a rank holds; fewer than `shard`, or none, where the rest is padding."""
        return slice(min(rank * self.shard, self.size), min((rank + 1) * self.shard, self.size))

    def width(self, rank: int) -> int:
        """Their number."""
        span = self.span(rank)
        return span.stop - span.start


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardExchange:
    """Sizes of one exchange between shards and seats, in elements, as one rank sees them.

    Attributes:
        shards_R: elements of this rank's shards that each rank's seats are built from (and whose gradients come back).
        seats_R: elements of this rank's seats that lie on each rank.
        kept: elements of this rank's shards, padding included.
        rank: this rank.
    """

    shards_R: tuple[int, ...]
    seats_R: tuple[int, ...]
    kept: int
    rank: int

    @classmethod
    def of(cls, seats: Seats, cuts: Sequence[Cut], rank: int) -> ShardExchange:
        """The exchange of the projections `cuts` of all seats."""
        count_R = np.diff(seats.starts_R)
        widths_R = [sum(cut.width(r) for cut in cuts) for r in range(seats.topology.ranks)]
        return cls(
            shards_R=tuple(int(count) * widths_R[rank] for count in count_R),
            seats_R=tuple(int(count_R[rank]) * width for width in widths_R),
            kept=seats.topology.experts * sum(cut.shard for cut in cuts),
            rank=rank,
        )

    @property
    def fetch_sent(self) -> int:
        """Elements that leave this rank when seats are built."""
        return sum(self.shards_R) - self.shards_R[self.rank]

    @property
    def return_sent(self) -> int:
        """Elements that leave this rank when gradients return."""
        return sum(self.seats_R) - self.seats_R[self.rank]

    def fetch_peak(self, element_bytes: int) -> int:
        """Most bytes that building the seats takes, what is built (`built`) included; several ranks."""
        return (self.built + max(sum(self.shards_R), self.built)) * element_bytes

    def return_peak(self, element_bytes: int, sum_bytes: int) -> int:
        """Most bytes that returning gradients takes, the summed ones included, the seats' own not; several ranks.

        Args:
            element_bytes: of a gradient element as it travels. sum_bytes: of one in the sums, 4 or 8.
        """
        received = sum(self.shards_R) * element_bytes
        return received + max(self.built * element_bytes, self.kept * sum_bytes)

    @property
    def built(self) -> int:
        """Elements of this rank's seats."""
        return sum(self.seats_R)


def storage_bytes(
    cuts: Sequence[Cut], plan: LayerPlan, rank: int, run: Execution, element_bytes: int
) -> dict[str, int]:
    """Bytes of a call's parts that sharded storage makes different from owned, as the ledger books them; several ranks.

    Weights are shards, their gradients have the dtype of sums, and every instance of the plan is built in a slot.
    """
    wide = max(element_bytes, GRADIENT_BYTES) if run.differentiable and run.weight_gradient else 0
    shards = plan.topology.experts * sum(cut.shard for cut in cuts)
    seats = int((plan.instance_rank_J == rank).sum()) * sum(cut.size for cut in cuts)
    return {
        "weights": shards * element_bytes,
        "grads": shards * wide,
        "replicas": seats * (element_bytes + wide),
    }


def copies_in_turn(expert_Q: IntArray) -> list[IntArray]:
    """Seats by turn: the first seat of every expert, the second of those that have two, ...

    Adding one turn after another adds the copies of an expert in the order of its seats, and no expert twice at once.
    """
    order_Q = np.argsort(expert_Q, kind="stable")
    sorted_Q = expert_Q[order_Q]
    turn_Q = np.arange(expert_Q.size) - np.searchsorted(sorted_Q, sorted_Q)
    return [np.sort(order_Q[turn_Q == turn]) for turn in range(int(turn_Q.max(initial=-1)) + 1)]


def expert_cuts(hidden: int, width: int, ranks: int) -> tuple[Cut, Cut]:
    """The cuts of the two projections of an expert: gate and up (2I, H), down (H, I)."""
    return Cut(rows=2 * width, columns=hidden, ranks=ranks), Cut(rows=hidden, columns=width, ranks=ranks)


def home_seats(topology: Topology) -> Seats:
    """One seat for every expert, at its home, without pairs: the layout that owned storage has between calls."""
    experts = topology.experts
    return Seats(
        topology=topology,
        expert_Q=np.arange(experts, dtype=np.int64),
        rank_Q=topology.home_E,
        assign_RQ=np.zeros((topology.ranks, experts), dtype=np.int64),
        backward_Q=np.zeros(experts, dtype=np.int64),
    )
