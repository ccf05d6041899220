"""What one plan costs: loads, bytes, replicas, traffic, predicted time. Arithmetic on the plan, nothing runs.

Shape letters: R ranks, J instances.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from lrmoe.planning.cost import predict_layer
from lrmoe.planning.memory import GRADIENT_BYTES
from lrmoe.planning.moves import backward_moves
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray
from lrmoe.simulate.scenario import Layer

_STATE_BYTES = 16  # per parameter: fp32 master, two Adam moments and the fp32 gradient they take in


@dataclass(frozen=True, kw_only=True)
class CallFigures:
    """One call of one system. "Peak" is the most loaded rank over the mean load of the complete call.

    Attributes:
        forward_peak, backward_peak, peak: of the passes, and the larger.
        backward_rows: rows of the most loaded rank in backward.
        kept_share: pairs that backward computes over all. overflow_share: pairs that forward does not compute.
        replicas: foreign expert copies on all ranks. extra_slots: slots beyond E / R of the rank that uses most.
        forward_subtotal, backward_subtotal: bytes of experts, replicas and token buffers on the fullest rank.
        extra_rows: replicas of that rank as rows (bytes of replicas over bytes of a pair).
        local_share: pairs that forward runs at their source rank.
        row_traffic: bytes of rows that cross ranks, all ranks, both passes, out and home.
        weight_traffic: bytes of weights, gradients and optimizer states that cross ranks, all ranks.
        forward_chunks, backward_chunks: of the plan.
        plan_ms: CPU time of planning on this machine.
        forward_ms, backward_ms, layer_ms: predicted by the cost model.
    """

    forward_peak: float
    backward_peak: float
    peak: float
    backward_rows: int
    kept_share: float
    overflow_share: float
    replicas: int
    extra_slots: int
    forward_subtotal: int
    backward_subtotal: int
    extra_rows: float
    local_share: float
    row_traffic: float
    weight_traffic: int
    forward_chunks: int
    backward_chunks: int
    plan_ms: float
    forward_ms: float
    backward_ms: float
    layer_ms: float

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def measure(plan: LayerPlan, layer: Layer, plan_ms: float) -> CallFigures:
    """Figures of one plan; `plan_ms` is the time it took to make."""
    mean = plan.pairs / plan.topology.ranks
    forward_R, backward_R = plan.forward_load_R, plan.backward_load_R
    extra_R = extra_slots(plan)
    forward, backward = (subtotal(load_R, extra_R, plan, layer) for load_R in (forward_R, backward_R))
    peaks = [int(load_R.max()) / mean if mean else 1.0 for load_R in (forward_R, backward_R)]
    time = predict_layer(layer.shape, layer.hardware, plan, top_k=layer.top_k)
    overflow = 0 if plan.overflow_RE is None else int(plan.overflow_RE.sum())
    rows, local_share = _row_traffic(plan)
    pairs = max(plan.pairs, 1)
    return CallFigures(
        forward_peak=peaks[0],
        backward_peak=peaks[1],
        peak=max(peaks),
        backward_rows=int(backward_R.max()),
        kept_share=plan.kept / pairs if plan.pairs else 1.0,
        overflow_share=overflow / pairs,
        replicas=int(plan.replicas_R.sum()),
        extra_slots=int(extra_R.max()),
        forward_subtotal=int(forward.max()),
        backward_subtotal=int(backward.max()),
        extra_rows=float(extra_R[int(np.argmax(backward))] * layer.expert_bytes / layer.row_bytes),
        local_share=local_share,
        row_traffic=2 * rows * layer.shape.row_bytes,
        weight_traffic=weight_traffic(plan, layer),
        forward_chunks=plan.forward_chunks,
        backward_chunks=plan.backward_chunks,
        plan_ms=plan_ms,
        forward_ms=time.forward_ms,
        backward_ms=time.backward_ms,
        layer_ms=time.total_ms,
    )


def extra_slots(plan: LayerPlan) -> IntArray:
    """Weight slots of each rank beyond those of its home experts, int64 (R,), held or resident."""
    copies_J = np.ones_like(plan.instance_rank_J) if plan.copies_J is None else plan.copies_J
    held_R = np.bincount(plan.instance_rank_J, weights=copies_J, minlength=plan.topology.ranks)
    extra_R = held_R.astype(np.int64) - plan.topology.experts_per_rank
    return np.maximum(np.maximum(extra_R, plan.moved.resident_R), 0)


def subtotal(load_R: IntArray, extra_R: IntArray, plan: LayerPlan, layer: Layer) -> IntArray:
    """Bytes of experts, replicas and token buffers of one pass, int64 (R,); one chunk's rows where it is chunked."""
    chunks = plan.forward_chunks if load_R is plan.forward_load_R else plan.backward_chunks
    slots_R = plan.topology.experts_per_rank + extra_R
    return slots_R * layer.expert_bytes + -(-load_R // chunks) * layer.row_bytes


def weight_traffic(plan: LayerPlan, layer: Layer) -> int:
    """Bytes of weights, gradients and optimizer states that all ranks receive or send home in one call."""
    moved, params = plan.moved, layer.shape.params
    weights = int(moved.fetch_R.sum() + moved.refetch_R.sum()) * layer.shape.weight_bytes
    gradients = int(moved.return_R.sum()) * params * GRADIENT_BYTES
    return weights + gradients + int(moved.state_R.sum()) * params * _STATE_BYTES


def _row_traffic(plan: LayerPlan) -> tuple[float, float]:
    """Rows that cross ranks one way, both passes together; share of pairs that forward runs at their source."""
    instances = np.arange(plan.instance_rank_J.size)
    sent = float(plan.assign_RJ.sum())
    local = float(plan.assign_RJ[plan.instance_rank_J, instances].sum())
    back_RJ = backward_moves(plan).rows_RJ
    crossing = float(back_RJ.sum() - back_RJ[plan.instance_rank_J, instances].sum())
    return sent - local + crossing, local / sent if sent else 1.0
