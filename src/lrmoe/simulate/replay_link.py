"""What a replay does not measure: the exchange between ranks, from bytes and a stated link.

Every phase takes as long as the rank whose busier direction moves most bytes. There is no latency and no overlap.

Shape letters: R ranks, E experts, V stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lrmoe.planning.cost import rank_traffic, replica_copies
from lrmoe.planning.memory import GRADIENT_BYTES, ExpertShape
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import FloatArray, IntArray
from lrmoe.planning.seats import Seats
from lrmoe.simulate.replay_routes import Backward

_SCALAR = 4  # a score, norm, weight, position or dot product
_COUNT = 8  # an expert's count in the all-gather before planning, a seat's before re-routing
RULE = "a balanced layer's exchange takes one third of its time with nothing dropped"

Bytes = dict[str, FloatArray]  # phase -> bytes of each rank's busier direction, (R,)


def forward_bytes(plan: LayerPlan, seats: Seats, shape: ExpertShape, *, scored: bool) -> Bytes:
    """Bytes of the forward exchange, one row per pair.

    Args:
        scored: whether a norm per pair comes home beside the expert's output.
    """
    rows_R, ranks = _rows(seats, seats.rank_Q, seats.assign_RQ), plan.topology.ranks
    gathered = float(_COUNT * plan.topology.experts * (ranks - 1))
    return {
        "plan": np.full(ranks, gathered),
        "dispatch": rows_R * shape.row_bytes,
        "combine": rows_R * (shape.row_bytes + (_SCALAR if scored else 0)),
        "replicas": _copies(plan, plan.moved.fetch_R) * shape.weight_bytes,
    }


def backward_bytes(
    plan: LayerPlan, seats: Seats, kept: Backward, shape: ExpertShape, *, scored: bool
) -> Bytes:
    """Bytes of the backward exchange: scores and weights of selection, kept rows out and home, replicas.

    A gradient row has its scale beside it, and its position where rows are read from a stash of another order. Pairs
    that are computed again carry their input. Replicas fetch their weights again and send fp32 gradients home.
    """
    rank_V = np.repeat(np.arange(plan.topology.ranks), np.diff(kept.wire.starts_R))
    rows_R = _rows(seats, rank_V, kept.wire.counts_RV)
    again_R = np.zeros_like(rows_R) if kept.again is None else _rows(seats, rank_V, kept.again.counts_RV)
    beside = _SCALAR * (1 if kept.position_R is None else 2)
    gradients = shape.params * GRADIENT_BYTES
    found = {
        "exchange": rows_R * (shape.row_bytes + beside) + again_R * shape.row_bytes,
        "return": rows_R * (shape.row_bytes + _SCALAR),
        "replicas": _copies(plan, plan.moved.refetch_R) * shape.weight_bytes
        + _copies(plan, plan.moved.return_R) * gradients,
    }
    if scored:
        homes = rank_traffic(plan.topology, plan.topology.home_E, plan.counts_RE).sum(axis=0)
        found["select"] = homes * 2 * _SCALAR
        table = float(_COUNT * seats.expert_Q.size * (plan.topology.ranks - 1))
        found["reroute"] = np.full(plan.topology.ranks, table)
    return found


def _rows(seats: Seats, rank_V: IntArray, counts_RV: IntArray) -> FloatArray:
    """Rows in each rank's busier direction, over links inside and between nodes alike."""
    found: FloatArray = rank_traffic(seats.topology, rank_V, counts_RV).sum(axis=0)
    return found


def _copies(plan: LayerPlan, moved_R: IntArray) -> FloatArray:
    if not moved_R.any():
        return np.zeros(plan.topology.ranks)
    found: FloatArray = replica_copies(plan, moved_R).sum(axis=0)
    return found


def exchange_ms(found: Mapping[str, FloatArray], link_bytes_per_s: float) -> dict[str, float]:
    """Phase -> milliseconds of the rank that moves most."""
    return {name: float(bytes_R.max()) / link_bytes_per_s * 1e3 for name, bytes_R in found.items()}


def link_of_rule(compute_ms: float, passes: Sequence[Mapping[str, FloatArray]]) -> float:
    """Bytes per second at which RULE holds.

    Args:
        compute_ms: fixed ownership's measured time of both passes, mean over ranks: a balanced layer's.
        passes: fixed ownership's bytes; their means over ranks are a balanced layer's.
    """
    moved = sum(float(bytes_R.mean()) for found in passes for bytes_R in found.values())
    return moved / (compute_ms / 2 / 1e3)
