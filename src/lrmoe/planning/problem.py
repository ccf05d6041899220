"""The question put to a planner: loads, layout, limits, history.

Shape letters: R ranks, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lrmoe.errors import PlanError

if TYPE_CHECKING:
    from lrmoe.planning.plan import LayerPlan

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

MAX_PAIRS = 2**62  # sums of counts must not leave int64


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks of the expert-parallel group, their nodes, and the home of every expert.

    Experts live in contiguous blocks: home(e) = e // (experts / ranks); ranks fill nodes in order.

    Raises:
        PlanError: fewer experts than ranks, experts not divisible by ranks, or ranks not divisible by ranks_per_node.
    """

    ranks: int
    experts: int
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.experts < 1:
            raise PlanError(f"ranks={self.ranks}, experts={self.experts}: both must be at least 1")
        if self.experts % self.ranks:
            raise PlanError(
                f"experts={self.experts} cannot be split evenly over ranks={self.ranks}: "
                "the number of experts must be a multiple of the expert-parallel size"
            )
        if self.ranks_per_node is not None and (self.ranks_per_node < 1 or self.ranks % self.ranks_per_node):
            raise PlanError(
                f"ranks_per_node={self.ranks_per_node}: must be at least 1 and divide ranks={self.ranks}"
            )

    @property
    def experts_per_rank(self) -> int:
        """Experts homed on each rank."""
        return self.experts // self.ranks

    @property
    def home_E(self) -> IntArray:
        """Home rank of every expert, int64 (E,)."""
        return np.arange(self.experts, dtype=np.int64) // self.experts_per_rank

    @property
    def nodes(self) -> int:
        """Number of nodes; 1 where nothing is said about them."""
        return 1 if self.ranks_per_node is None else self.ranks // self.ranks_per_node

    @property
    def node_R(self) -> IntArray:
        """Node of every rank, int64 (R,)."""
        return np.arange(self.ranks, dtype=np.int64) // (self.ranks_per_node or self.ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """What a history-based policy may know: past calls of the same layer, never the current one.

    Attributes:
        counts: int64 (R, E) arrays, oldest first, at most as many as the caller keeps.
        previous: the plan of the last call, or None.
        step: calls made before this one.
    """

    counts: tuple[IntArray, ...] = ()
    previous: LayerPlan | None = None
    step: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One layer call as a planner sees it.

    Attributes:
        counts_RE: int64 (R, E), pairs from source rank r routed to expert e.
        topology: ranks, nodes, experts, homes.
        slots: foreign expert copies a rank may hold.
        max_drop: cap on the share of all pairs that backward may leave out, in [0, 1).
        drop: "always" (leave out the whole cap) or "overload" (the fewest that reach `peak_target` or the budget).
        min_keep: least kept pairs of an expert that has any.
        peak_target: in mean loads of the complete call; read by "overload" only.
        score_mean_E: float64 (E,) or None, running mean of the score per pair of each expert, from past calls.
        score_bins: float64 (E, B, 2) or None, how each expert's scores are spread (score_bins.ScoreHistory); read
            beside `score_mean_E`.
        budget_rows: rows that fit a rank, replicas included, or None for no limit.
        recompute_rows: rows that fit a rank when activations are not saved, or None where that changes nothing.
        max_chunks: most parts that a rank's rows may run in.
        replica_rows: memory of one replica, in rows.
        move_rows: extra rows (mu) that a pair counts where backward runs it at another rank than forward.
        wire_rows: most kept rows that may enter a rank from others in backward, or None.
        wire_weight: rows of compute that an entering row costs; backward minimises the larger of load and
            wire_weight * rows entering over all ranks. 0: the network is no part of the peak.
        local_rows: least pairs a replica must make local to be worth its traffic, or None for balance only.
        copy_rows: what all traffic of one foreign copy in a call costs, in rows of compute (a row: one pair's forward
            and, where there is one, backward). 0: copies are free.
        cross_rows: what a row's way between ranks costs, there and back in every pass, in rows of compute. Read where
            copies have a price.
        history: past calls, for policies that plan from them.

    Raises:
        PlanError: negative or non-integer counts, a wrong shape, sums that would leave int64, a field out of range.
    """

    counts_RE: IntArray
    topology: Topology
    slots: int = 0
    max_drop: float = 0.0
    drop: str = "always"
    min_keep: int = 1
    peak_target: float = 1.0
    score_mean_E: FloatArray | None = None
    score_bins: FloatArray | None = None
    budget_rows: int | None = None
    recompute_rows: int | None = None
    max_chunks: int = 64
    replica_rows: int = 0
    move_rows: float = 0.0
    wire_rows: int | None = None
    wire_weight: float = 0.0
    local_rows: int | None = None
    copy_rows: float = 0.0
    cross_rows: float = 0.0
    history: History | None = None

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts_RE)
        if not np.issubdtype(counts.dtype, np.integer):
            raise PlanError(f"counts_RE has dtype {counts.dtype}: must be an integer dtype")
        shape = (self.topology.ranks, self.topology.experts)
        if counts.shape != shape:
            raise PlanError(f"counts_RE has shape {counts.shape}: must be (ranks, experts) = {shape}")
        if counts.size and int(counts.min()) < 0:
            raise PlanError(f"counts_RE holds {int(counts.min())}: counts must be non-negative")
        # A float bound first: exact big integers only where the sum could really leave int64.
        if (
            float(counts.sum(dtype=np.float64)) >= MAX_PAIRS / 2
            and int(counts.astype(object).sum()) >= MAX_PAIRS
        ):
            raise PlanError("counts_RE sums to 2^62 or more: too many pairs for one call")
        if not 0 <= self.max_drop < 1:
            raise PlanError(f"max_drop={self.max_drop}: must lie in [0, 1)")
        if self.drop not in ("always", "overload"):
            raise PlanError(f"drop={self.drop!r}: must be 'always' or 'overload'")
        self._check_limits()
        object.__setattr__(self, "counts_RE", np.ascontiguousarray(counts, dtype=np.int64))

    def _check_limits(self) -> None:
        foreign = self.topology.experts - self.topology.experts_per_rank
        if not 0 <= self.slots <= max(foreign, 0):
            raise PlanError(f"slots={self.slots}: must lie in [0, {foreign}], the experts homed elsewhere")
        for name in ("budget_rows", "recompute_rows", "wire_rows", "local_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name}={value}: must be at least 1, or None for no limit")
        if self.max_chunks < 1:
            raise PlanError(f"max_chunks={self.max_chunks}: must be at least 1")
        for name in ("wire_weight", "copy_rows", "cross_rows"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name}={getattr(self, name)}: must be a finite number, not negative")
        for name in ("replica_rows", "move_rows", "min_keep"):
            if getattr(self, name) < 0:
                raise PlanError(f"{name}={getattr(self, name)}: must not be negative")

    @cached_property
    def counts_E(self) -> IntArray:
        """Pairs of each expert over all sources, int64 (E,)."""
        return self.counts_RE.sum(axis=0)

    @cached_property
    def pairs(self) -> int:
        """All pairs of the call."""
        return int(self.counts_E.sum())

    @cached_property
    def drop_cap(self) -> int:
        """Most pairs that backward may leave out: floor(max_drop * pairs), with max_drop read as a decimal."""
        over, under = _decimal(float(self.max_drop))
        return over * self.pairs // under

    @cached_property
    def floor_E(self) -> IntArray:
        """Least quota of each expert: min(count, min_keep), int64 (E,)."""
        return np.minimum(self.counts_E, self.min_keep)


@lru_cache(maxsize=1024)
def _decimal(value: float) -> tuple[int, int]:
    """The shortest decimal that reads as this number, as a fraction."""
    return Fraction(repr(value)).as_integer_ratio()
