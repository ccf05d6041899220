"""The walk through layer/forward.py.

Shape letters: R ranks, E experts, Q seats of all ranks, V stands, P parts of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from lrmoe.planning.call_memory.sizes import INDEX, Cells
from lrmoe.planning.call_memory.wire import Walk
from lrmoe.planning.cells import all_parts
from lrmoe.planning.moments import Held, Moments
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray
from lrmoe.planning.transfers import transfers

_SORT = 25  # bytes a pair while the pairs are sorted by expert
_CHOOSE = 96  # bytes a pair and seat on offer while seats are chosen


@dataclass(frozen=True, kw_only=True, eq=False)
class _Left:
    """What one part leaves for backward, as far as it does; norms at the pairs' sources."""

    received: Held | None
    index: Held | None
    stash: Held | None
    norm: Held | None


class ForwardWalk(Walk):
    """Forward of a call."""

    def _forward(self, moments: Moments, plan: LayerPlan, kept_RQ: IntArray, kept_R: IntArray) -> IntArray:
        """Leaves what backward finds; returns how many pairs every source sends.

        Args:
            kept_RQ: about what is kept of every cell; kept_R: int64 (R,), the most that a source may keep.
        """
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
        if sizes.early and not sizes.norms:
            self._fix_kept(moments, plan, sent, kept_R)
        if plan.forward_chunks == 1:
            norm = self._forward_whole(moments, self._stays(plan, kept_RQ), keeps=self.keeps_rows(plan))
        else:
            norm = self._forward_parts(moments, plan)
        if sizes.early and sizes.norms:
            self._fix_kept(moments, plan, sent, kept_R)
            moments.free(norm)
        moments.free(*lease, sending)
        if not sizes.differentiable:
            moments.free(order, place)
        return sent

    def _stays(self, plan: LayerPlan, kept_RQ: IntArray) -> Cells | None:
        """Pairs whose rows stay at their seats where forward fixes the kept set; None: all or none of them do."""
        if not self.sizes.early or not self.keeps_rows(plan):
            return None
        stay_RQ = transfers(kept_RQ, self.seats).table(*kept_RQ.shape, stay=True)
        return Cells.of(self.sizes, self.seats, stay_RQ[None], self.seats.starts_R)

    def _fix_kept(self, moments: Moments, plan: LayerPlan, sent_R: IntArray, kept_R: IntArray) -> None:
        """The choice, and the way back that follows from it; the kept pairs' weights stay."""
        alpha = moments.take("scratch", self.sizes.alpha_bytes * sent_R)
        self._choose(moments, plan, sent_R)
        moments.take("stash", 4 * sent_R)
        moments.free(alpha)
        moments.brief("scratch", 4 * INDEX * kept_R)

    def _forward_whole(self, moments: Moments, stays: Cells | None, *, keeps: bool) -> Held | None:
        """A forward in one part; returns the norms at home."""
        chosen = stays is not None and not self.sizes.norms
        left = self._forward_part(
            moments, self.forward_cells, keeps=keeps, kept=True, stays=stays if chosen else None
        )
        if stays is not None and not chosen:
            flags = moments.take("scratch", self.forward_cells.pairs_out + INDEX * stays.pairs_in)
            moments.brief("scratch", 3 * self.forward_cells.pairs_in)
            self._keep_inputs(moments, stays)
            moments.free(left.received, left.index)
            moments.take("stash", stays.pairs_in * 2 * self.width)
            moments.free(left.stash, flags)
        return left.norm

    def _keep_inputs(self, moments: Moments, stays: Cells) -> None:
        """Input rows of the pairs that stay, in a buffer of their own."""
        if self.alone:
            return
        row = moments.take("scratch", INDEX * stays.pairs_in)
        if self.sizes.lean:
            moments.brief("scratch", (2 * INDEX + 1) * self.forward_cells.rows_in)
            moments.take("scratch", INDEX * stays.pairs_in)
        moments.take("dispatched", (stays.rows_in if self.sizes.lean else stays.pairs_in) * self.row)
        moments.free(row)

    def _forward_parts(self, moments: Moments, plan: LayerPlan) -> Held | None:
        sizes, sent = self.sizes, self.seats.assign_RQ.sum(axis=1)
        out_size = sizes.tokens_R * sizes.shape.hidden
        total = moments.take("outputs", out_size * sizes.sum_bytes)
        norm = moments.take("stash", 4 * sent) if sizes.norms else None
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
        return norm

    def _forward_part(
        self, moments: Moments, cells: Cells, *, keeps: bool, kept: bool, stays: Cells | None = None
    ) -> _Left:
        """One part; with `kept` its output stays, and what backward reads: of all pairs, or of those that stay."""
        sizes, some = self.sizes, stays is not None
        held: list[Held] = []
        if not self.alone:
            held.append(moments.take("scratch", INDEX * cells.pairs_in))
        held.append(moments.take("scratch", INDEX * cells.pairs_out))
        columns = 1 if sizes.lean else 0
        if stays is not None:
            held.append(moments.take("scratch", cells.pairs_out + INDEX * stays.pairs_in))
        received, index = self._send(moments, "dispatched", cells, columns, flags=int(some))
        y = moments.take("outputs", cells.pairs_in * self.row)
        stash = None
        if keeps:
            rows = cells.pairs_in if stays is None else stays.pairs_in
            stash = moments.take("stash", rows * 2 * self.width)
        norm = moments.take("scratch", 4 * cells.pairs_in) if sizes.norms else None
        self._block_forward(moments, cells.block, stashed=keeps and not some)
        if stays is not None:
            self._keep_inputs(moments, stays)
        if some or not keeps:
            moments.free(received)
        (back, sent), home = self._return(moments, "outputs", cells, y), None
        moments.free(sent)
        if norm is not None:
            there = moments.take("scratch", 4 * cells.pairs_in)
            home = moments.take("stash" if kept else "scratch", 4 * cells.pairs_out)
            moments.free(norm, there)
            if not kept:
                held.append(home)
        out = self._sum_by_token(moments, "outputs", cells, weighted=True)
        if not (sizes.keeps_outputs and kept):
            moments.free(back)
        moments.free(*held, None if kept else out)
        if some or not keeps or not sizes.lean:
            moments.free(index)
            index = None
        return _Left(received=received, index=index, stash=stash, norm=home)

    def _block_forward(self, moments: Moments, rows: IntArray, *, stashed: bool) -> None:
        """Scratch of the largest block: input rows, first projection, activation and its factor, outputs."""
        factor = 0 if self.sizes.fused else self.width
        h = 0 if stashed else 2 * self.width
        y = self.row if not self.alone and not self.sizes.lean else 0
        moments.brief("scratch", rows * (h + max(self.row, self.width + factor, self.width + y)))
