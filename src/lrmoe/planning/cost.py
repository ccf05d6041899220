"""Time of one layer call, by phase, from a plan: latency + bytes / bandwidth + FLOP / FLOP rate.

Every phase takes as long as its slowest rank; phases follow one another (nothing overlaps), as telemetry's critical
path adds them up. Within a phase traffic of the two link classes (inside the node, between nodes) runs side by side,
and so do the two directions. Backward GEMMs cost twice the forward ones. All of it is a model: constants and what they
assume are in calibration.Constants.

Shape letters: R ranks, D destination ranks, E experts, J instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lrmoe.errors import PlanError
from lrmoe.planning.calibration import PHASES, Calibration
from lrmoe.planning.hardware import Hardware
from lrmoe.planning.memory import ExpertShape, keeps_inputs
from lrmoe.planning.moves import backward_moves, ratio
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import FloatArray, IntArray, Topology

_GRADIENT_BYTES = 4  # replicas' weight gradients travel home in fp32
_SCALAR_BYTES = 4  # a score, a norm or a routing weight


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Predicted milliseconds of one layer call.

    Attributes:
        forward, backward: phase -> ms of the slowest rank; "pack" and "replicas" occur in both.
        labels: phase -> "modelled" or "calibrated".
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    labels: Mapping[str, str]

    @property
    def phases(self) -> dict[str, float]:
        """phase -> ms of forward and backward together, in the order of PHASES."""
        return {p: self.forward.get(p, 0.0) + self.backward.get(p, 0.0) for p in PHASES}

    @property
    def forward_ms(self) -> float:
        """Forward of the call."""
        return sum(self.forward.values())

    @property
    def backward_ms(self) -> float:
        """Backward of the call."""
        return sum(self.backward.values())

    @property
    def total_ms(self) -> float:
        """Forward and backward of the call."""
        return self.forward_ms + self.backward_ms


def predict_layer(
    shape: ExpertShape,
    hardware: Hardware,
    plan: LayerPlan,
    *,
    calibration: Calibration | None = None,
    top_k: int = 8,
    stash: bool = True,
    planning_ms: float | None = None,
) -> LayerTime:
    """Predicted time of one layer call.

    Args:
        shape: expert sizes and bytes per element.
        hardware: the devices; ranks of one node (plan.topology.node_R) use its inner link, others the network.
        plan: where pairs run in both passes, and what weights move.
        calibration: constants; None: the stated assumptions.
        top_k: pairs per token (for passes over tokens).
        stash: whether the first projection's output is kept (else it is computed again for the kept rows).
        planning_ms: time of planning itself; None: modelled from the number of ranks and experts.

    Raises:
        PlanError: top_k below 1, a negative planning time, or a calibration of another device.
    """
    if top_k < 1:
        raise PlanError(f"top_k={top_k}: must be at least 1")
    if planning_ms is not None and planning_ms < 0:
        raise PlanError(f"planning_ms={planning_ms}: must not be negative")
    chosen = Calibration() if calibration is None else calibration
    chosen.check(hardware.name)
    model = _Model(shape=shape, hardware=hardware, plan=plan, calibration=chosen, top_k=top_k)
    forward = model.forward(planning_ms)
    backward = model.backward(stash)
    used = model.constants_used()
    return LayerTime(
        forward=model.scaled(forward),
        backward=model.scaled(backward),
        labels={phase: chosen.label(phase, used[phase]) for phase in PHASES},
    )


def replica_copies(plan: LayerPlan, moved_R: IntArray) -> FloatArray:
    """Expert copies in each rank's busier direction when weights go out (or gradients home) once.

    An expert with several copies goes out by a binary tree: its home sends at most two, receivers pass on the rest.
    Traffic that a plan states otherwise than one move per foreign instance is taken as evenly sent.

    Args:
        plan: the instances. moved_R: int64 (R,), experts that each rank receives (gradients: sends).

    Returns:
        float64 (2, R): inside nodes, between nodes.
    """
    topology, foreign = plan.topology, plan.foreign_J
    expert_J, rank_J = plan.instance_expert_J[foreign], plan.instance_rank_J[foreign]
    crosses_J = topology.node_R[topology.home_E[expert_J]] != topology.node_R[rank_J]
    if not np.array_equal(moved_R, plan.replicas_R):
        outside = (topology.ranks - topology.ranks // topology.nodes) / max(topology.ranks - 1, 1)
        share = float(crosses_J.mean()) if crosses_J.size else outside
        return np.stack([moved_R * (1 - share), moved_R * share])
    return np.stack(
        [_tree(topology, expert_J[crosses_J == side], rank_J[crosses_J == side]) for side in (0, 1)]
    )


def _tree(topology: Topology, expert_J: IntArray, rank_J: IntArray) -> FloatArray:
    """Copies in each rank's busier direction, float64 (R,)."""
    ranks = topology.ranks
    copies_E = np.bincount(expert_J, minlength=topology.experts)
    from_home_E = np.minimum(copies_E, 2)
    sent_R = np.bincount(topology.home_E, weights=from_home_E, minlength=ranks)
    relay_J = ratio(copies_E - from_home_E, copies_E)[expert_J]
    sent_R = sent_R + np.bincount(rank_J, weights=relay_J, minlength=ranks)
    received_R = np.bincount(rank_J, minlength=ranks).astype(np.float64)
    return np.maximum(sent_R, received_R)


def rank_traffic(topology: Topology, rank_J: IntArray, rows_RJ: IntArray | FloatArray) -> FloatArray:
    """Rows that cross links: float64 (2, R), for traffic inside nodes and between them the larger direction."""
    ranks = topology.ranks
    order = np.argsort(rank_J, kind="stable")
    used, starts = np.unique(rank_J[order], return_index=True)
    rows_RD = np.zeros((ranks, ranks))
    if used.size:
        rows_RD[:, used] = np.add.reduceat(rows_RJ[:, order], starts, axis=1)
    np.fill_diagonal(rows_RD, 0.0)
    same = topology.node_R[:, None] == topology.node_R[None, :]
    found = []
    for part in (np.where(same, rows_RD, 0.0), np.where(same, 0.0, rows_RD)):
        found.append(np.maximum(part.sum(axis=0), part.sum(axis=1)))
    return np.stack(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Model:
    shape: ExpertShape
    hardware: Hardware
    plan: LayerPlan
    calibration: Calibration
    top_k: int

    def forward(self, planning_ms: float | None) -> dict[str, float]:
        """Unscaled ms per phase."""
        plan, row = self.plan, self.shape.row_bytes
        sent_R = plan.assign_RJ.sum(axis=1)
        crossing = self._traffic(plan.assign_RJ)
        chunks = plan.forward_chunks
        dispatch = self._exchange_ms(crossing, row, chunks)
        return {
            "plan": self._plan_ms(planning_ms),
            "pack": self._memory_ms(0 if self._alone else 2 * sent_R.max(initial=0) * row),
            "dispatch": dispatch,
            "experts": self._gemm_ms(plan.assign_RJ.sum(axis=0), 1.0, chunks),
            "combine": self._exchange_ms(crossing, row + self._score_bytes, chunks)
            + self._memory_ms((1 + 1 / self.top_k) * sent_R.max(initial=0) * row),
            "replicas": self._weights_ms(self.shape.weight_bytes, plan.moved.fetch_R),
        }

    def backward(self, stash: bool) -> dict[str, float]:
        """Unscaled ms per phase."""
        plan, row = self.plan, self.shape.row_bytes
        moves = backward_moves(plan)
        keeps = keeps_inputs(plan)
        crossing, chunks = self._traffic(moves.rows_RJ), max(plan.backward_chunks, 1)
        kept_R, pairs_R = moves.rows_RJ.sum(axis=1), plan.counts_RE.sum(axis=1)
        kept_J, moved_J = moves.rows_RJ.sum(axis=0), moves.moved_RJ.sum(axis=0)
        # Where no rows are kept, inputs come again from the tokens, as those of moved pairs do.
        again = self._exchange_ms(self._traffic(moves.moved_RJ) if keeps else crossing, row, chunks)
        recomputed_J = moved_J if stash and keeps else kept_J
        return {
            "pack": self._memory_ms(0 if self._alone else 2 * kept_R.max(initial=0) * row),
            **self._choice_ms(pairs_R),
            "exchange": self._exchange_ms(crossing, row + _SCALAR_BYTES, chunks) + again,
            "experts_backward": self._gemm_ms(kept_J, 2.0, chunks)
            + self._gemm_ms(recomputed_J, 2 / 3, chunks),
            "return": self._exchange_ms(crossing, row + _SCALAR_BYTES, chunks)
            + self._memory_ms((1 + 1 / self.top_k) * kept_R.max(initial=0) * row),
            "replicas": self._weights_ms(self.shape.weight_bytes, plan.moved.refetch_R)
            + self._weights_ms(self._gradient_bytes, plan.moved.return_R),
        }

    def scaled(self, phases: Mapping[str, float]) -> dict[str, float]:
        """Each phase times what calibration found for it."""
        scale = self.calibration.phase_scale
        return {phase: ms * scale.get(phase, 1.0) for phase, ms in phases.items()}

    def constants_used(self) -> dict[str, tuple[str, ...]]:
        """Names of the constants that each phase's time depends on."""
        memory = ("hbm_efficiency", "phase_us")
        links = [] if self._alone else [self.hardware.inner_link]
        links += ["network"] if self.plan.topology.nodes > 1 else []
        wire = tuple(f"{link}_{what}" for link in links for what in ("efficiency", "latency_us"))
        wire += ("peer_us",) if wire else ()
        gemm = ("gemm_efficiency", "gemm_extra_rows", *memory)
        return {
            "plan": ("plan_us", *wire),
            "pack": memory,
            "dispatch": wire or memory,
            "experts": gemm,
            "combine": (*wire, *memory),
            "score": memory,
            "select": ("select_bytes", *wire, *memory),
            "reroute": ("index_bytes", *memory),
            "exchange": wire or memory,
            "experts_backward": gemm,
            "return": (*wire, *memory),
            "replicas": wire or memory,
        }

    @property
    def _alone(self) -> bool:
        return self.plan.topology.ranks == 1

    @property
    def _score_bytes(self) -> int:
        return 0 if self.plan.exact else _SCALAR_BYTES

    @property
    def _gradient_bytes(self) -> int:
        return self.shape.weight_bytes // self.shape.element_bytes * _GRADIENT_BYTES

    def _traffic(self, rows_RJ: IntArray | FloatArray) -> FloatArray:
        return rank_traffic(self.plan.topology, self.plan.instance_rank_J, rows_RJ)

    def _plan_ms(self, planning_ms: float | None) -> float:
        topology = self.plan.topology
        solve = self.calibration.constants.plan_us * (topology.ranks + topology.experts) / 1e3
        gather = np.zeros((2, topology.ranks))
        peers = topology.ranks - 1
        inner = (topology.ranks_per_node or topology.ranks) - 1
        gather[:] = np.array([[inner], [peers - inner]])
        return (solve if planning_ms is None else planning_ms) + self._exchange_ms(
            gather, 8 * topology.experts, 1
        )

    def _choice_ms(self, pairs_R: IntArray) -> dict[str, float]:
        """Score, select, reroute: nothing where every pair is kept in place."""
        if self.plan.exact:
            return {"score": 0.0, "select": 0.0, "reroute": 0.0}
        constants, most = self.calibration.constants, float(pairs_R.max(initial=0))
        to_home = self._home_traffic()
        return {
            "score": self._memory_ms(most / self.top_k * self.shape.row_bytes + 3 * _SCALAR_BYTES * most),
            "select": 2 * self._exchange_ms(to_home, _SCALAR_BYTES, 1)
            + self._memory_ms(
                float(self.plan.counts_E.reshape(len(pairs_R), -1).sum(axis=1).max()) * constants.select_bytes
            ),
            "reroute": self._memory_ms(most * constants.index_bytes),
        }

    def _home_traffic(self) -> FloatArray:
        topology = self.plan.topology
        return rank_traffic(topology, topology.home_E, self.plan.counts_RE)

    def _memory_ms(self, size: float) -> float:
        """One pass over `size` bytes of device memory."""
        if size <= 0:
            return 0.0
        constants = self.calibration.constants
        rate = self.hardware.hbm_bytes_per_s * constants.hbm_efficiency
        return constants.phase_us / 1e3 + float(size) / rate * 1e3

    def _exchange_ms(self, rows_2R: FloatArray, row_bytes: float, chunks: int) -> float:
        """An all-to-all of rows; link classes side by side, the slowest rank counts."""
        constants = self.calibration.constants
        topology = self.plan.topology
        peers = (
            (topology.ranks_per_node or topology.ranks) - 1,
            topology.ranks - (topology.ranks_per_node or topology.ranks),
        )
        slowest = 0.0
        for rows_R, link, count in zip(rows_2R, (self.hardware.inner_link, "network"), peers, strict=True):
            most = float(rows_R.max(initial=0.0))
            if most <= 0:
                continue
            rate = self.hardware.link_bytes_per_s(link) * getattr(constants, f"{link}_efficiency")
            fixed = (getattr(constants, f"{link}_latency_us") + constants.peer_us * count) / 1e3
            slowest = max(slowest, chunks * fixed + most * row_bytes / rate * 1e3)
        return slowest

    def _gemm_ms(self, rows_J: IntArray | FloatArray, forwards: float, chunks: int) -> float:
        """Grouped GEMMs of each rank's instances: `forwards` times the forward's FLOP; compute or memory bound."""
        constants, shape = self.calibration.constants, self.shape
        busy_J = (rows_J > 0).astype(np.float64)
        ranks, rank_J = self.plan.topology.ranks, self.plan.instance_rank_J
        rows_R = np.bincount(rank_J, weights=rows_J, minlength=ranks)
        groups_R = np.bincount(rank_J, weights=busy_J, minlength=ranks) * chunks
        flop_R = 6.0 * shape.hidden * shape.width * (rows_R + constants.gemm_extra_rows * groups_R)
        touched_R = rows_R * (2 * shape.hidden + 6 * shape.width) * shape.element_bytes
        touched_R = touched_R + groups_R * shape.weight_bytes
        compute_R = flop_R / (self.hardware.flops * constants.gemm_efficiency)
        memory_R = touched_R / (self.hardware.hbm_bytes_per_s * constants.hbm_efficiency)
        slowest = forwards * float(np.maximum(compute_R, memory_R).max(initial=0.0))
        return chunks * constants.phase_us / 1e3 + slowest * 1e3 if slowest > 0 else 0.0

    def _weights_ms(self, size: int, moved_R: IntArray) -> float:
        """Replica weights out, or their gradients home: `size` bytes per copy."""
        if not moved_R.any():
            return 0.0
        return self._exchange_ms(replica_copies(self.plan, moved_R), size, 1)
