"""The walk through layer/forward.py.

Shape letters: R ranks, E experts, Q seats of all ranks, V stands, P parts of a pass.
"""

from __future__ import annotations

from lrmoe.planning.call_memory.sizes import INDEX, Cells
from lrmoe.planning.call_memory.wire import Walk
from lrmoe.planning.cells import all_parts
from lrmoe.planning.moments import Held, Moments
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray

_SORT = 25  # bytes a pair while the pairs are sorted by expert
_CHOOSE = 96  # bytes a pair and seat on offer while seats are chosen


class ForwardWalk(Walk):
    """Forward of a call."""

    def _forward(self, moments: Moments, plan: LayerPlan) -> IntArray:
        """Leaves what backward finds; returns bytes that go when backward has ended (nothing needs them)."""
        sizes, tokens = self.sizes, self.sizes.tokens_R
        pairs = tokens * sizes.slots
        order = moments.take("scratch", INDEX * pairs)
        moments.brief("scratch", _SORT * pairs)
        lease = self._borrow(moments)
        sent = self.seats.assign_RQ.sum(axis=1)
        place = sending = None
        if self.seats.spread:
            moments.brief("scratch", (4 * INDEX if not sizes.lean else _CHOOSE) * sent)
            place = moments.take("scratch", INDEX * sent)
            sending = moments.take("scratch", INDEX * sent)
        if plan.forward_chunks == 1:
            self._forward_part(moments, self.forward_cells, keeps=self.keeps_rows(plan), kept=True)
        else:
            self._forward_parts(moments, plan)
        moments.free(lease, sending)
        if not sizes.differentiable:
            moments.free(order, place)
        return sent

    def _forward_parts(self, moments: Moments, plan: LayerPlan) -> None:
        sizes, sent = self.sizes, self.seats.assign_RQ.sum(axis=1)
        out_size = sizes.tokens_R * sizes.shape.hidden
        total = moments.take("outputs", out_size * sizes.sum_bytes)
        if sizes.norms:
            moments.take("stash", 4 * sent)
        if sizes.keeps_outputs:
            moments.take("outputs", sent * self.row)
        cells_PRQ = all_parts(self.seats.assign_RQ, self.seats.starts_R, plan.forward_chunks)
        cells = Cells.of(sizes, self.seats, cells_PRQ, self.seats.starts_R)
        index = moments.take("scratch", 2 * INDEX * cells.pairs_out)
        self._forward_part(moments, cells, keeps=False, kept=False)
        moments.free(index)
        moments.fold()
        if sizes.sum_bytes != sizes.shape.element_bytes:
            moments.take("outputs", out_size * sizes.shape.element_bytes)
            moments.free(total)

    def _forward_part(self, moments: Moments, cells: Cells, *, keeps: bool, kept: bool) -> None:
        """One part; with `kept` its output stays, and what backward reads."""
        sizes = self.sizes
        held: list[Held] = []
        if not self.alone:
            held.append(moments.take("scratch", INDEX * cells.pairs_in))
        held.append(moments.take("scratch", INDEX * cells.pairs_out))
        columns = 1 if sizes.lean else 0
        received, index = self._send(moments, "dispatched", cells, columns)
        y = moments.take("outputs", cells.pairs_in * self.row)
        if keeps:
            moments.take("stash", cells.pairs_in * 2 * self.width)
        norm = moments.take("scratch", 4 * cells.pairs_in) if sizes.norms else None
        self._block_forward(moments, cells.block, stashed=keeps)
        if not keeps:
            moments.free(received)
        back = self._return(moments, "outputs", cells, y)
        if norm is not None:
            there = moments.take("scratch", 4 * cells.pairs_in)
            home = moments.take("stash" if kept else "scratch", 4 * cells.pairs_out)
            moments.free(norm, there)
            if not kept:
                held.append(home)
        out = self._sum_by_token(moments, "outputs", cells, weighted=True)
        if not (sizes.keeps_outputs and kept):
            moments.free(back)
        moments.free(*held, None if keeps else index, None if kept else out)
        if keeps and not sizes.lean:
            moments.free(index)

    def _block_forward(self, moments: Moments, rows: IntArray, *, stashed: bool) -> None:
        """Scratch of the largest block: input rows, first projection, activation and its factor, outputs."""
        h = 0 if stashed else 2 * self.width
        y = self.row if not self.alone and not self.sizes.lean else 0
        moments.brief("scratch", rows * (h + max(self.row, 2 * self.width, self.width + y)))
