"""Steps of the walk that forward and backward share: weights, rows there, results back, sums per token.

Shape letters: R ranks, E experts, Q seats of all ranks, V stands, P parts of a pass.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from lrmoe.planning.call_memory.sizes import INDEX, CallSizes, Cells
from lrmoe.planning.cells import expected_kept
from lrmoe.planning.moments import Held, Moments
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats, seats_of

_SELECT = 112  # bytes a pair while scores are turned into the kept set
_WIDEN_TOKENS = 512  # tokens whose rows `ops.combine` widens together


class Walk:
    """One plan's call under given sizes, and the steps that both passes take."""

    def __init__(self, sizes: CallSizes, plan: LayerPlan, *, seats: Seats | None = None) -> None:
        self.sizes, self.plan = sizes, plan
        self.seats = seats_of(plan) if seats is None else seats
        self.ranks = plan.topology.ranks
        self.alone = self.ranks == 1
        local, shape = plan.topology.experts_per_rank, sizes.shape
        self.local = local
        self.foreign_R = np.bincount(self.seats.rank_Q[self.seats.foreign_Q], minlength=self.ranks).astype(
            np.int64
        )
        self.row = shape.row_bytes
        self.width = shape.width * shape.element_bytes

    def keeps_rows(self, plan: LayerPlan) -> bool:
        """Whether rows stay at their seats for backward."""
        return self.sizes.differentiable and plan.forward_chunks == 1 and not plan.recompute

    @cached_property
    def forward_cells(self) -> Cells:
        """Cells of the whole forward."""
        return Cells.of(self.sizes, self.seats, self.seats.assign_RQ[None], self.seats.starts_R)

    @cached_property
    def kept_RQ(self) -> IntArray:
        """About what backward keeps of every cell."""
        if self.plan.exact:
            return self.seats.assign_RQ
        return expected_kept(self.seats, self.plan.quota_E)

    def _borrow(self, moments: Moments) -> tuple[Held, Held]:
        """Copies of weights: of foreign seats; and in the compute dtype, with inputs, where theirs is another."""
        shape, sizes = self.sizes.shape, self.sizes
        foreign = moments.take("replicas", self.foreign_R * shape.weight_bytes)
        cast = np.zeros(self.ranks, dtype=np.int64)
        if sizes.weight_bytes != shape.element_bytes:
            cast = cast + self.local * shape.weight_bytes
        if sizes.input_bytes != shape.element_bytes:
            cast = cast + sizes.tokens_R * self.row
        return foreign, moments.take("replicas", cast)

    def _choose(self, moments: Moments, plan: LayerPlan, sent_R: IntArray) -> None:
        """Scores to the homes of experts, weights back."""
        home_R = plan.counts_E.reshape(self.ranks, -1).sum(axis=1)
        moments.brief("scratch", 12 * sent_R + _SELECT * home_R)

    def _send(
        self, moments: Moments, part: str, cells: Cells, columns: int, flags: int = 0
    ) -> tuple[Held | None, Held | None]:
        """Rows, columns and bytes beside them to the seats: (received rows, their columns and index)."""
        if self.alone:
            return None, None
        sizes = self.sizes
        wire = columns * 4 if sizes.sum_bytes == 4 else 8 * (columns > 0) + 4 * (columns > 1)
        wire += flags
        lean = None
        if sizes.lean:
            moments.brief("scratch", 3 * INDEX * cells.pairs_out + 5 * self.ranks * sizes.tokens_R)
            lean = moments.take("scratch", INDEX * cells.rows_out + 4 * cells.pairs_out)
            wire += 4
        send = moments.take(part, cells.rows_out * self.row)
        found = None
        if wire:
            packed = moments.take("scratch", wire * cells.pairs_out)
            moments.brief("scratch", 2 * wire * cells.pairs_in)
            moments.free(packed)
            found = moments.take("scratch", wire * cells.pairs_in)
        received = moments.take(part, cells.rows_in * self.row)
        moments.free(send)
        if sizes.lean:
            moments.brief("scratch", 3 * INDEX * cells.pairs_in)
            moments.free(lean)
            index = moments.take("scratch", INDEX * cells.pairs_in + INDEX * cells.rows_out)
            return received, _joined(moments, found, index)
        return received, found

    def _return(self, moments: Moments, part: str, cells: Cells, rows: Held) -> tuple[Held, Held | None]:
        """Results back at their sources, and what was sent: the rows here, or sums of them in their stead."""
        if self.alone:
            return rows, None
        sent = rows
        if self.sizes.lean:
            entries = moments.take(
                "scratch", (INDEX + self.sizes.sum_bytes) * cells.pairs_in + INDEX * cells.rows_in
            )
            moments.brief("scratch", INDEX * cells.pairs_in)
            sent = self._combine(moments, part, cells.rows_in, cells.pairs_in, mixed=part == "outputs")
            moments.free(entries)
        back = moments.take(part, (cells.rows_out if self.sizes.lean else cells.pairs_out) * self.row)
        if self.sizes.lean:
            moments.free(rows)
        return back, sent

    def _sum_by_token(self, moments: Moments, part: str, cells: Cells, *, weighted: bool) -> Held:
        sizes, tokens = self.sizes, self.sizes.tokens_R
        pairs = cells.rows_out if sizes.lean else cells.pairs_out
        factor = sizes.alpha_bytes if weighted and not sizes.lean else 0
        entries = moments.take("scratch", (2 * INDEX + factor) * pairs + INDEX * tokens)
        out = self._combine(moments, part, tokens, pairs, mixed=weighted and not sizes.lean)
        moments.free(entries)
        return out

    def _combine(self, moments: Moments, part: str, groups: IntArray, rows: IntArray, *, mixed: bool) -> Held:
        """Sums of rows; where factors are wider than the rows, rows of a block of groups are widened."""
        sizes, hidden = self.sizes, self.sizes.shape.hidden
        out = moments.take(part, groups * self.row)
        if sizes.fused:
            narrow = mixed and not sizes.lean and sizes.alpha_bytes < sizes.sum_bytes
            moments.brief("scratch", 4 * rows * narrow)  # factors in fp32
            return out
        bags = INDEX * rows if sizes.shape.element_bytes == 8 else 0  # fp64: every row's bag
        starts = moments.take("scratch", 3 * INDEX * groups + bags)
        if mixed and sizes.sum_bytes != sizes.shape.element_bytes:
            block = np.minimum(rows, _WIDEN_TOKENS * sizes.slots)
            wide = hidden * sizes.sum_bytes
            more = np.maximum(
                block * self.row, np.minimum(groups, _WIDEN_TOKENS) * (wide + 3 * INDEX) + 4 * block
            )
            moments.brief("scratch", block * wide + more + INDEX * block)
        moments.free(starts)
        return out


def _joined(moments: Moments, first: Held | None, second: Held) -> Held:
    """Two buffers of one part as one."""
    if first is None:
        return second
    return Held(part=first.part, size=first.size + second.size)
