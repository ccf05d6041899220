"""Bytes that one layer call needs on a rank, by part, from a plan: arithmetic on row counts, before anything runs.

`predict_bytes` is what telemetry puts beside the ledger's measurements of one call. `call_bytes` adds what the ledger
does not book (scratch of the GEMMs) and execution in chunks. Whole models are in model_memory.py.

Shape letters: R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lrmoe.errors import PlanError
from lrmoe.planning.moves import backward_moves
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray

_NORM_BYTES = 4  # an fp32 norm per pair travels home with the expert's output
GRADIENT_BYTES = 4  # fp32: what replicas send home, and the usual gradient buffer beside bf16 weights
PUBLISHED_HIDDEN_ROWS = (
    5  # token buffer of the published account: bf16 hidden rows per pair (20 KiB at hidden 2048)
)


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Sizes of one expert: hidden size, expert width, bytes of an element in the compute dtype."""

    hidden: int
    width: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name in ("hidden", "width", "element_bytes"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def row_bytes(self) -> int:
        """Bytes of one hidden row."""
        return self.hidden * self.element_bytes

    @property
    def params(self) -> int:
        """Parameters of one expert (gate, up, down)."""
        return 3 * self.hidden * self.width

    @property
    def weight_bytes(self) -> int:
        """Bytes of one expert's weights."""
        return self.params * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a call runs, as far as memory is concerned.

    Attributes:
        differentiable: whether a backward follows. stash: whether the first projection's output stays for it.
        norms: whether projection-input norms are kept for scores. input_gradient: whether rows' gradients return.
        weight_gradient: whether the experts' weights get gradients.
        early: whether forward fixes the kept set, and keeps only what stays at its place.
    """

    differentiable: bool
    stash: bool
    norms: bool
    input_gradient: bool
    weight_gradient: bool
    early: bool = False


def training_execution(plan: LayerPlan, *, stash: bool) -> Execution:
    """How a training call of `plan` runs: gradients for everything, norms where pairs are left out."""
    return Execution(
        differentiable=True,
        stash=stash and not plan.recompute,
        norms=not plan.exact,
        input_gradient=True,
        weight_gradient=True,
    )


def predict_bytes(shape: ExpertShape, plan: LayerPlan, rank: int, run: Execution) -> dict[str, int]:
    """Predicted bytes of each memory part on one rank, as the ledger books them.

    How many kept rows each source sends is known only after selection; its share of the quotas stands for it.
    """
    rows, alone = _plan_rows(plan, slice(rank, rank + 1)), plan.topology.ranks == 1
    weights = plan.topology.experts_per_rank * shape.weight_bytes
    stash_row = 2 * shape.width * shape.element_bytes if run.stash else 0
    crossing = rows.sent * 0 if alone else rows.sent + rows.received
    parts = {
        "dispatched": crossing * shape.row_bytes,
        "stash": _stashed(rows, run) * stash_row + rows.sent * _NORM_BYTES * int(run.norms or run.early),
        "backward": (_gradient_rows(rows, run, alone) + _sent_again(rows, run, alone)) * shape.row_bytes,
        "outputs": (rows.received if alone else rows.sent + rows.received) * shape.row_bytes,
    }
    return {
        "weights": weights,
        "grads": weights if run.differentiable and run.weight_gradient else 0,
        "replicas": int(held_R(plan)[rank]) * replica_bytes(shape, run),
        **{part: int(size[0]) for part, size in parts.items()},
    }


def replica_bytes(shape: ExpertShape, run: Execution) -> int:
    """Bytes of one replica during a call: weights, and an fp32 gradient where weights get one."""
    gradient = GRADIENT_BYTES if run.differentiable and run.weight_gradient else 0
    return shape.weight_bytes + shape.params * gradient


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Row counts of one pass, int64 (R,) each: what a source sends, what runs here, what runs here anew."""

    sent: IntArray
    received: IntArray
    kept_sent: IntArray
    kept_here: IntArray
    moved_sent: IntArray
    moved_here: IntArray

    def cut(self, forward_chunks: int, backward_chunks: int) -> Rows:
        """Rows of the largest chunk of each pass."""
        sizes = (forward_chunks,) * 2 + (backward_chunks,) * 4
        names = ("sent", "received", "kept_sent", "kept_here", "moved_sent", "moved_here")
        return Rows(**{name: -(-getattr(self, name) // c) for name, c in zip(names, sizes, strict=True)})


def _plan_rows(plan: LayerPlan, ranks: slice = slice(None)) -> Rows:
    kept_RE = split_floor(plan.quota_E, plan.counts_RE[ranks], plan.counts_E)
    none = np.zeros(kept_RE.shape[0], dtype=np.int64)
    moved_sent, moved_here = none, none
    if plan.backward_J is not None or plan.foreign_J.any():
        moved_RJ = backward_moves(plan).moved_RJ
        moved_sent = np.ceil(moved_RJ.sum(axis=1)).astype(np.int64)[ranks]
        to_J = np.bincount(plan.instance_rank_J, weights=moved_RJ.sum(axis=0), minlength=plan.topology.ranks)
        moved_here = np.ceil(to_J).astype(np.int64)[ranks]
    return Rows(
        sent=plan.assign_RJ[ranks].sum(axis=1),
        received=plan.forward_load_R[ranks],
        kept_sent=kept_RE.sum(axis=1),
        kept_here=plan.backward_load_R[ranks],
        moved_sent=moved_sent,
        moved_here=moved_here,
    )


def split_floor(quota_E: IntArray, counts_RE: IntArray, counts_E: IntArray) -> IntArray:
    """Each source's proportional share of the quotas, rounded down, int64 like `counts_RE`."""
    wide = int(quota_E.max(initial=0)) * int(counts_RE.max(initial=0)) >= 2**62
    product = counts_RE.astype(object) * quota_E if wide else counts_RE * quota_E
    return (product // np.maximum(counts_E, 1)).astype(np.int64)


def _stashed(rows: Rows, run: Execution) -> IntArray:
    """Rows whose first projection waits for backward."""
    return rows.kept_here - rows.moved_here if run.early else rows.received


def _gradient_rows(rows: Rows, run: Execution, alone: bool) -> IntArray:
    """Hidden rows of backward: gradients out and in, input gradients in and out, inputs of moved pairs."""
    if not run.differentiable:
        return rows.sent * 0
    directions = int(run.input_gradient)
    if alone:
        return rows.kept_here * directions
    moved = rows.moved_here + rows.moved_sent
    return (rows.kept_here + rows.kept_sent) * (1 + directions) + moved


def _sent_again(rows: Rows, run: Execution, alone: bool) -> IntArray:
    """Input rows that backward sends once more, because nothing stayed at the experts."""
    again = run.differentiable and not run.stash and not alone
    return (rows.kept_here + rows.kept_sent - rows.moved_here - rows.moved_sent) * int(again)


@dataclass(frozen=True, kw_only=True, eq=False)
class PassBytes:
    """Bytes per rank and part at the largest moment of each pass: part -> int64 (R,)."""

    forward: Mapping[str, IntArray]
    backward: Mapping[str, IntArray]

    @property
    def forward_R(self) -> IntArray:
        """Bytes per rank at the forward's largest moment."""
        return np.sum(list(self.forward.values()), axis=0)

    @property
    def backward_R(self) -> IntArray:
        """Bytes per rank at the backward's largest moment."""
        return np.sum(list(self.backward.values()), axis=0)

    @property
    def peak_R(self) -> IntArray:
        """Bytes per rank at the largest moment."""
        return np.maximum(self.forward_R, self.backward_R)

    def rank(self, rank: int) -> tuple[dict[str, int], dict[str, int]]:
        """Parts of one rank, forward and backward."""
        forward, backward = (
            {p: int(size[rank]) for p, size in x.items()} for x in (self.forward, self.backward)
        )
        return forward, backward


@dataclass(frozen=True, kw_only=True, eq=False)
class CallRows:
    """Bytes that grow with rows: kept until backward, and beside that at each pass's largest moment."""

    kept: Mapping[str, IntArray]
    forward: Mapping[str, IntArray]
    backward: Mapping[str, IntArray]


def call_bytes(
    shape: ExpertShape, plan: LayerPlan, run: Execution, *, gradient_bytes: int = GRADIENT_BYTES
) -> PassBytes:
    """Bytes of one layer call by part and rank; "scratch" is what the GEMMs need beside their operands on a GPU.

    A call in chunks, or one that the plan makes recompute from the token inputs, keeps no rows at the experts: its
    kept rows' inputs are dispatched again in backward.

    Args:
        gradient_bytes: bytes per parameter of the weights' gradient buffers.
    """
    rows, local = call_rows(shape, plan, run), plan.topology.experts_per_rank
    each = np.ones(plan.topology.ranks, dtype=np.int64)
    trains = run.differentiable and run.weight_gradient
    fixed = {
        "weights": each * (local * shape.weight_bytes),
        "grads": each * (local * shape.params * gradient_bytes if trains else 0),
        "replicas": held_R(plan) * replica_bytes(shape, run),
    }
    return PassBytes(
        forward=add_parts(fixed, rows.kept, rows.forward), backward=add_parts(fixed, rows.kept, rows.backward)
    )


def held_R(plan: LayerPlan) -> IntArray:
    """Experts whose weights a rank holds beside its own share, int64 (R,).

    Resident slots, and what was fetched for the call beyond them; an expert that a policy has moved for good is part
    of the share of the rank where it lives.
    """
    resident_R = plan.moved.resident_R
    return resident_R + np.minimum(plan.moved.fetch_R, np.maximum(plan.replicas_R - resident_R, 0))


def call_rows(shape: ExpertShape, plan: LayerPlan, run: Execution) -> CallRows:
    """What the rows of `plan` cost on every rank; what is not kept counts for the largest chunk only."""
    keeps = keeps_inputs(plan)
    rows = _plan_rows(plan)
    alone = plan.topology.ranks == 1
    whole = rows_cost(shape, rows, run, alone=alone, keeps=keeps)
    cut = rows.cut(plan.forward_chunks, plan.backward_chunks)
    part = rows_cost(shape, cut, run, alone=alone, keeps=keeps)
    return CallRows(kept=whole.kept, forward=part.forward, backward=part.backward)


def keeps_inputs(plan: LayerPlan) -> bool:
    """Whether rows stay at their experts until backward (else they are dispatched again)."""
    return plan.forward_chunks == 1 and not plan.recompute


def rows_cost(shape: ExpertShape, rows: Rows, run: Execution, *, alone: bool, keeps: bool) -> CallRows:
    """What rows cost in bytes; every entry is linear in the row counts."""
    hidden, width = shape.row_bytes, shape.width * shape.element_bytes
    stash, held = run.stash and keeps, _stashed(rows, run)
    waits = run.differentiable and keeps and not alone
    received = rows.received * 0 if alone else rows.received * hidden
    sent = rows.sent * 0 if alone else rows.sent * hidden
    again = rows.received * 0 if keeps or alone else (rows.kept_here + rows.kept_sent) * hidden
    kept = {
        "dispatched": held * (hidden * int(waits)),
        "stash": held * (2 * width * int(stash)) + rows.sent * (_NORM_BYTES * int(run.norms or run.early)),
    }
    forward = {
        "dispatched": sent + received * int(run.early or not waits),
        "outputs": sent + rows.received * hidden,
        # inputs in expert order, activations, outputs in expert order; the first projection unless it is stashed
        "scratch": rows.received * (2 * hidden + width + (0 if stash else 2 * width)),
    }
    # gradients and inputs in expert order, input gradients; first projection, its gradient, activations, theirs
    backward = {
        "dispatched": again,
        "backward": _gradient_rows(rows, run, alone) * hidden,
        "scratch": rows.kept_here * (3 * hidden + 6 * width) * int(run.differentiable),
    }
    return CallRows(kept=kept, forward=forward, backward=backward)


def add_parts(*tables: Mapping[str, IntArray]) -> dict[str, IntArray]:
    """Part -> bytes, added over tables."""
    total: dict[str, IntArray] = {}
    for table in tables:
        for part, size in table.items():
            total[part] = total[part] + size if part in total else size
    return total


def published_bytes(shape: ExpertShape, plan: LayerPlan) -> dict[str, IntArray]:
    """One call by the published account: part -> int64 (R,), "base", "replicas" and "tokens".

    Experts count bf16 weight and fp32 gradient (6 bytes per parameter); a pair at its expert's rank counts
    PUBLISHED_HIDDEN_ROWS hidden rows, in the pass that has more.
    """
    expert = shape.weight_bytes + shape.params * GRADIENT_BYTES
    rows_R = np.maximum(plan.forward_load_R, plan.backward_load_R)
    return {
        "base": np.full(plan.topology.ranks, plan.topology.experts_per_rank * expert, dtype=np.int64),
        "replicas": held_R(plan) * expert,
        "tokens": rows_R * (PUBLISHED_HIDDEN_ROWS * shape.row_bytes),
    }
