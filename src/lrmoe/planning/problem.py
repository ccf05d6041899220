"""The question put to a planner: loads, layout, limits.

Shape letters: R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lrmoe.errors import PlanError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

MAX_PAIRS = 2**62  # sums of counts must not leave int64


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks of the expert-parallel group and the home of every expert.

    Experts live in contiguous blocks: home(e) = e // (experts / ranks).

    Raises:
        PlanError: fewer experts than ranks, or experts not divisible by ranks.
    """

    ranks: int
    experts: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.experts < 1:
            raise PlanError(f"ranks={self.ranks}, experts={self.experts}: both must be at least 1")
        if self.experts % self.ranks:
            raise PlanError(
                f"experts={self.experts} cannot be split evenly over ranks={self.ranks}: "
                "the number of experts must be a multiple of the expert-parallel size"
            )

    @property
    def experts_per_rank(self) -> int:
        """Experts homed on each rank."""
        return self.experts // self.ranks

    @property
    def home_E(self) -> IntArray:
        """Home rank of every expert, int64 (E,)."""
        return np.arange(self.experts, dtype=np.int64) // self.experts_per_rank


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One layer call as a planner sees it.

    Attributes:
        counts_RE: int64 (R, E), pairs from source rank r routed to expert e.
        topology: ranks, experts, homes.
        max_drop: cap on the share of all pairs that backward may leave out, in [0, 1).
        drop: "always" (leave out the whole cap) or "overload" (the fewest that reach `peak_target`).
        min_keep: least kept pairs of an expert that has any.
        peak_target: in mean loads of the complete call; read by "overload" only.
        score_mean_E: float64 (E,) or None, running mean of the score per pair of each expert, from past calls.

    Raises:
        PlanError: negative or non-integer counts, a wrong shape, or sums that would leave int64.
    """

    counts_RE: IntArray
    topology: Topology
    max_drop: float = 0.0
    drop: str = "always"
    min_keep: int = 1
    peak_target: float = 1.0
    score_mean_E: FloatArray | None = None

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts_RE)
        if not np.issubdtype(counts.dtype, np.integer):
            raise PlanError(f"counts_RE has dtype {counts.dtype}: must be an integer dtype")
        shape = (self.topology.ranks, self.topology.experts)
        if counts.shape != shape:
            raise PlanError(f"counts_RE has shape {counts.shape}: must be (ranks, experts) = {shape}")
        if counts.size and int(counts.min()) < 0:
            raise PlanError(f"counts_RE holds {int(counts.min())}: counts must be non-negative")
        if sum(int(row) for row in counts.astype(object).sum(axis=1)) >= MAX_PAIRS:
            raise PlanError("counts_RE sums to 2^62 or more: too many pairs for one call")
        if not 0 <= self.max_drop < 1:
            raise PlanError(f"max_drop={self.max_drop}: must lie in [0, 1)")
        if self.drop not in ("always", "overload"):
            raise PlanError(f"drop={self.drop!r}: must be 'always' or 'overload'")
        object.__setattr__(self, "counts_RE", np.ascontiguousarray(counts, dtype=np.int64))

    @property
    def counts_E(self) -> IntArray:
        """Pairs of each expert over all sources, int64 (E,)."""
        return self.counts_RE.sum(axis=0)

    @property
    def pairs(self) -> int:
        """All pairs of the call."""
        return int(self.counts_RE.sum())

    @property
    def drop_cap(self) -> int:
        """Most pairs that backward may leave out: floor(max_drop * pairs)."""
        return int(self.max_drop * self.pairs)

    @property
    def floor_E(self) -> IntArray:
        """Least quota of each expert: min(count, min_keep), int64 (E,)."""
        return np.minimum(self.counts_E, self.min_keep)
