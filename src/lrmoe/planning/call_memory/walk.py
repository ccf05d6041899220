"""Memory of one layer call, moment by moment, as the runtime allocates and frees: what a byte budget is held against.

The walk below follows layer/forward.py and layer/backward.py line by line, all ranks and all parts of a pass at once.
Index vectors and other scratch count with the rest; what operators use inside themselves does not. Where only a source
knows a number (tokens that share a row of a lean wire), the most that it can be stands for it.

Shape letters: R ranks, E experts, Q seats of all ranks, V stands, P parts of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.call_memory.backward import BackwardWalk
from lrmoe.planning.call_memory.forward import ForwardWalk
from lrmoe.planning.moments import Moments
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class CallMemory:
    """Bytes of one call, parameters included: the largest moment of each pass, and of each part in it, int64 (R,)."""

    forward_R: IntArray
    backward_R: IntArray
    kept_R: IntArray
    forward: dict[str, IntArray]
    backward: dict[str, IntArray]

    @property
    def peak_R(self) -> IntArray:
        """Bytes per rank at the largest moment."""
        return np.maximum(self.forward_R, self.backward_R)

    def part(self, name: str, rank: int) -> int:
        """Most bytes of a part on a rank, in either pass."""
        return max(int(found[name][rank]) if name in found else 0 for found in (self.forward, self.backward))


class CallWalk(ForwardWalk, BackwardWalk):
    """One plan's call under given sizes; `memory` walks through it."""

    def memory(
        self, plan: LayerPlan, kept_RQ: IntArray | None = None, *, overlaps: bool = False
    ) -> CallMemory:
        """Walk through the call.

        Args:
            plan: this walk's plan, with any chunks and recompute.
            kept_RQ: int64 (R, Q), kept pairs of every cell where they are known.
            overlaps: input gradients travel, and gradients of copies, beside the first projection's weight gradients.
        """
        moments = Moments()
        moments.take("weights", self.local * self.sizes.shape.params * self.sizes.weight_bytes)
        # What a source keeps is chosen later; its vectors, which no chunks make smaller, are as long as can be.
        most_RQ = np.minimum(self.seats.assign_RQ, plan.quota_E[self.seats.expert_Q])
        known = (most_RQ, self.kept_RQ) if kept_RQ is None else (kept_RQ, kept_RQ)
        saved = self._forward(moments, plan, known[1], known[0].sum(axis=1))
        forward_R, forward = moments.peaks(self.ranks)
        kept_R = moments.now(self.ranks)
        moments.mark()
        if self.sizes.differentiable:
            self._backward(moments, plan, known[1], known[0].sum(axis=1), saved, overlaps=overlaps)
        backward_R, backward = moments.peaks(self.ranks)
        return CallMemory(
            forward_R=_with_slack(forward_R),
            backward_R=_with_slack(backward_R),
            kept_R=kept_R,
            forward=forward,
            backward=backward,
        )


def _with_slack(size_R: IntArray) -> IntArray:
    """Single numbers and small tables are not walked through: 1/256 and 2 KiB more."""
    return size_R + (size_R >> 8) + 2048
