"""Bytes that one layer call needs on a rank, by part, from a plan: arithmetic on row counts, before anything runs.

Shape letters: R ranks, E experts, L local experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from lrmoe.planning.plan import LayerPlan

_NORM_BYTES = 4  # an fp32 norm per pair travels home with the expert's output


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Sizes of one expert: hidden size, expert width, bytes of an element in the compute dtype."""

    hidden: int
    width: int
    element_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one hidden row."""
        return self.hidden * self.element_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of one expert's weights (gate, up, down)."""
        return 3 * self.hidden * self.width * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a call runs, as far as memory is concerned.

    Attributes:
        differentiable: whether a backward follows. stash: whether the first projection's output stays for it.
        norms: whether projection-input norms are kept for scores. input_gradient: whether rows' gradients return.
        weight_gradient: whether the experts' weights get gradients.
    """

    differentiable: bool
    stash: bool
    norms: bool
    input_gradient: bool
    weight_gradient: bool


def predict_bytes(shape: ExpertShape, plan: LayerPlan, rank: int, run: Execution) -> dict[str, int]:
    """Predicted bytes of each memory part on one rank.

    How many kept rows each source sends is known only after selection; its share of the quotas stands for it.
    """
    local, alone = plan.topology.experts_per_rank, plan.topology.ranks == 1
    sent, received = int(plan.counts_RE[rank].sum()), int(plan.forward_load_R[rank])
    kept_here = int(plan.backward_load_R[rank])
    kept_sent = sum(
        q * c // n for q, c, n in zip(plan.quota_E, plan.counts_RE[rank], plan.counts_E, strict=True) if n
    )
    weights = local * shape.weight_bytes
    stash_row = 2 * shape.width * shape.element_bytes if run.stash else 0
    crossing = 0 if alone else sent + received
    back_rows = (kept_here if run.input_gradient else 0) + (0 if alone else kept_here + int(kept_sent))
    back_rows += int(kept_sent) if run.input_gradient and not alone else 0
    return {
        "weights": weights,
        "grads": weights if run.differentiable and run.weight_gradient else 0,
        "replicas": 0,
        "dispatched": crossing * shape.row_bytes,
        "stash": received * stash_row + (sent * _NORM_BYTES if run.norms else 0),
        "backward": back_rows * shape.row_bytes if run.differentiable else 0,
        "outputs": (received if alone else sent + received) * shape.row_bytes,
    }
