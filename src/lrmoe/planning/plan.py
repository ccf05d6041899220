"""The answer of a planner, and the check that it is legal.

Shape letters: R ranks, E experts, J instances (one copy of one expert on one rank).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lrmoe.errors import PlanError
from lrmoe.planning.problem import IntArray, Problem, Topology

REASONS = ("off", "always", "overload", "budget", "variance", "auto")  # why pairs are left out


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """Expert weights and gradients that a plan moves, in experts per rank, int64 (R,) each.

    Attributes:
        fetch_R: weights received for the call's forward. refetch_R: received again for its backward.
        return_R: gradients sent to their homes. state_R: optimizer states received (a change of ownership).
        resident_R: foreign weight slots the rank holds all the time, per layer (shared slots are not resident).
    """

    fetch_R: IntArray
    refetch_R: IntArray
    return_R: IntArray
    state_R: IntArray
    resident_R: IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan:
    """Where every pair of one layer call runs, forward and backward, and how many pairs of each expert backward keeps.

    Attributes:
        topology: ranks, nodes, experts, homes.
        counts_RE: int64 (R, E), the counts the plan was made for.
        instance_expert_J: int64 (J,), expert of each instance, in the order (rank, expert); several copies of one
            expert on one rank are one instance.
        instance_rank_J: int64 (J,), rank of each instance.
        assign_RJ: int64 (R, J), pairs that source rank r sends to instance j.
        quota_E: int64 (E,), pairs of each expert that backward keeps.
        reason: why pairs are left out: "off", "always", "overload" or "budget"; "variance" where a limit on added
            variance asked for less, "auto" where the drop was weighed against steps.
        backward_J: int64 (J,), kept pairs that each instance runs in backward; None: every kept pair at home.
        overflow_RE: int64 (R, E), pairs that not even forward computes (capacity drop), or None.
        copies_J: int64 (J,), weight slots that each instance stands for (a system may copy one expert twice to one
            rank); None: one each. Read by policies that keep their layout from call to call.
        traffic: what the plan moves besides rows; None: each foreign instance is fetched, fetched again and returned.
        forward_chunks, backward_chunks: parts in which each rank's rows run.
        recompute: whether the budget forbids stashed activations.
    """

    topology: Topology
    counts_RE: IntArray
    instance_expert_J: IntArray
    instance_rank_J: IntArray
    assign_RJ: IntArray
    quota_E: IntArray
    reason: str = "off"
    backward_J: IntArray | None = None
    overflow_RE: IntArray | None = None
    copies_J: IntArray | None = None
    traffic: Traffic | None = None
    forward_chunks: int = 1
    backward_chunks: int = 1
    recompute: bool = False

    @classmethod
    def at_home(cls, problem: Problem, quota_E: IntArray, reason: str) -> LayerPlan:
        """The plan in which every expert has one instance, at home."""
        topology = problem.topology
        return cls(
            topology=topology,
            counts_RE=problem.counts_RE,
            instance_expert_J=np.arange(topology.experts, dtype=np.int64),
            instance_rank_J=topology.home_E,
            assign_RJ=problem.counts_RE,
            quota_E=quota_E,
            reason=reason,
        )

    @cached_property
    def counts_E(self) -> IntArray:
        """Pairs of each expert over all sources, int64 (E,)."""
        return self.counts_RE.sum(axis=0)

    @cached_property
    def pairs(self) -> int:
        """All pairs of the call."""
        return int(self.counts_E.sum())

    @cached_property
    def kept(self) -> int:
        """Pairs that backward keeps."""
        return int(self.quota_E.sum())

    @property
    def exact(self) -> bool:
        """Whether backward keeps every pair."""
        return self.kept == self.pairs

    @cached_property
    def forward_load_R(self) -> IntArray:
        """Rows each rank's experts run in forward, int64 (R,)."""
        load = np.zeros(self.topology.ranks, dtype=np.int64)
        np.add.at(load, self.instance_rank_J, self.assign_RJ.sum(axis=0))
        return load

    @cached_property
    def backward_load_R(self) -> IntArray:
        """Rows each rank's experts run in backward, int64 (R,)."""
        if self.backward_J is None:
            return self.quota_E.reshape(self.topology.ranks, -1).sum(axis=1)
        load = np.zeros(self.topology.ranks, dtype=np.int64)
        np.add.at(load, self.instance_rank_J, self.backward_J)
        return load

    @property
    def peak_rows(self) -> tuple[int, int]:
        """Rows that the most loaded rank runs, forward and backward: what `drop="auto"` takes a call's time from."""
        return int(self.forward_load_R.max(initial=0)), int(self.backward_load_R.max(initial=0))

    @cached_property
    def foreign_J(self) -> NDArray[np.bool_]:
        """Whether each instance lives away from its expert's home, bool (J,)."""
        return self.topology.home_E[self.instance_expert_J] != self.instance_rank_J

    @cached_property
    def replicas_R(self) -> IntArray:
        """Foreign instances on each rank, int64 (R,)."""
        return np.bincount(self.instance_rank_J[self.foreign_J], minlength=self.topology.ranks).astype(
            np.int64
        )

    @cached_property
    def moved(self) -> Traffic:
        """What the plan moves besides rows."""
        if self.traffic is not None:
            return self.traffic
        none = np.zeros_like(self.replicas_R)
        return Traffic(
            fetch_R=self.replicas_R,
            refetch_R=self.replicas_R,
            return_R=self.replicas_R,
            state_R=none,
            resident_R=none,
        )

    def fingerprint(self) -> int:
        """A 63-bit hash of every field but the topology: equal on all ranks iff the plans are."""
        digest = hashlib.blake2b(digest_size=8)
        flags = (self.reason, self.forward_chunks, self.backward_chunks, self.recompute)
        digest.update(repr(flags).encode())
        moved = (None,) if self.traffic is None else tuple(vars(self.traffic).values())
        for array in (
            self.counts_RE, self.instance_expert_J, self.instance_rank_J, self.assign_RJ, self.quota_E,
            self.backward_J, self.overflow_RE, self.copies_J, *moved,
        ):  # fmt: skip
            digest.update(b"-" if array is None else f"+{array.shape}".encode())
            if array is not None:
                digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        return int.from_bytes(digest.digest(), "little") >> 1

    def check(self, problem: Problem) -> None:
        """Raise PlanError where the plan is not a legal answer to `problem`."""
        self._check_types()
        self._check_words(problem)
        if not np.array_equal(self.counts_RE, problem.counts_RE):
            raise PlanError("counts_RE differs from the problem's: the plan was made for other counts")
        self._check_instances()
        self._check_conservation(problem)
        self._check_quotas(problem)
        self._check_backward()

    def _check_types(self) -> None:
        for name in (
            "counts_RE", "instance_expert_J", "instance_rank_J", "assign_RJ", "quota_E", "backward_J", "overflow_RE",
            "copies_J",
        ):  # fmt: skip
            if (array := getattr(self, name)) is not None:
                _check_integers(name, array)
        if self.traffic is None:
            return
        for name, array in vars(self.traffic).items():
            _check_integers(f"traffic.{name}", array)
            if array.shape != (self.topology.ranks,) or array.min() < 0:
                raise PlanError(f"traffic.{name} has shape {array.shape}: must be non-negative, (ranks,)")

    def _check_words(self, problem: Problem) -> None:
        if self.reason not in REASONS:
            raise PlanError(f"reason={self.reason!r}: must be one of {', '.join(map(repr, REASONS))}")
        for name in ("forward_chunks", "backward_chunks"):
            chunks = getattr(self, name)
            whole = isinstance(chunks, int | np.integer) and not isinstance(chunks, bool)
            if not whole or not 1 <= chunks <= problem.max_chunks:
                raise PlanError(f"{name}={chunks!r}: must be a whole number in [1, {problem.max_chunks}]")

    def _check_instances(self) -> None:
        ranks, experts = self.instance_rank_J, self.instance_expert_J
        if ranks.shape != experts.shape or ranks.ndim != 1:
            raise PlanError("instance_rank_J and instance_expert_J must be vectors of one length")
        if ranks.size and (ranks.min() < 0 or ranks.max() >= self.topology.ranks):
            raise PlanError(f"instance_rank_J leaves [0, {self.topology.ranks})")
        if experts.size and (experts.min() < 0 or experts.max() >= self.topology.experts):
            raise PlanError(f"instance_expert_J leaves [0, {self.topology.experts})")
        keys = ranks * self.topology.experts + experts
        if np.unique(keys).size != keys.size:
            raise PlanError("one rank holds two instances of one expert")
        copies = self.copies_J
        if copies is not None and (copies.shape != ranks.shape or (copies.size and copies.min() < 1)):
            raise PlanError("copies_J must hold at least 1 for every instance")

    def _check_conservation(self, problem: Problem) -> None:
        if self.assign_RJ.shape != (self.topology.ranks, self.instance_rank_J.size):
            raise PlanError(f"assign_RJ has shape {self.assign_RJ.shape}: must be (ranks, instances)")
        if self.assign_RJ.size and self.assign_RJ.min() < 0:
            raise PlanError("assign_RJ holds negative counts")
        sent = np.zeros_like(problem.counts_RE)
        np.add.at(sent.T, self.instance_expert_J, self.assign_RJ.T)
        if self.overflow_RE is not None:
            if self.overflow_RE.shape != sent.shape or (sent.size and self.overflow_RE.min() < 0):
                raise PlanError("overflow_RE must be non-negative, (ranks, experts)")
            sent = sent + self.overflow_RE
        if not np.array_equal(sent, problem.counts_RE):
            rank, expert = map(int, np.argwhere(sent != problem.counts_RE)[0])
            raise PlanError(
                f"source rank {rank} sends {int(sent[rank, expert])} pairs of expert {expert} "
                f"and has {int(problem.counts_RE[rank, expert])}"
            )

    def _check_quotas(self, problem: Problem) -> None:
        high, quota = problem.counts_E, self.quota_E
        if self.overflow_RE is not None:
            high = high - self.overflow_RE.sum(axis=0)
        low = np.minimum(problem.floor_E, high)
        if quota.shape != high.shape:
            raise PlanError(f"quota_E has shape {quota.shape}: must be (experts,) = {high.shape}")
        bad = np.flatnonzero((quota < low) | (quota > high))
        if bad.size:
            e = int(bad[0])
            raise PlanError(
                f"quota of expert {e} is {int(quota[e])}: must lie in [{int(low[e])}, {int(high[e])}]"
            )
        dropped = int(high.sum()) - int(quota.sum())
        if dropped > problem.drop_cap:
            raise PlanError(f"{dropped} pairs left out: the cap is {problem.drop_cap} of {problem.pairs}")

    def _check_backward(self) -> None:
        if self.backward_J is None:
            return
        if self.backward_J.shape != self.instance_rank_J.shape or (
            self.backward_J.size and self.backward_J.min() < 0
        ):
            raise PlanError(
                f"backward_J has shape {self.backward_J.shape}: must be non-negative, (instances,)"
            )
        kept = np.zeros(self.topology.experts, dtype=np.int64)
        np.add.at(kept, self.instance_expert_J, self.backward_J)
        if not np.array_equal(kept, self.quota_E):
            e = int(np.flatnonzero(kept != self.quota_E)[0])
            raise PlanError(
                f"backward runs {int(kept[e])} pairs of expert {e} and its quota is {int(self.quota_E[e])}"
            )


def _check_integers(name: str, array: object) -> None:
    kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.integer):
        raise PlanError(f"{name} has dtype {kind}: must be an array of an integer dtype")
