"""The walk through layer/backward.py.

Shape letters: R ranks, E experts, Q seats of all ranks, V stands, P parts of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.call_memory.sizes import INDEX, Cells
from lrmoe.planning.call_memory.wire import Walk
from lrmoe.planning.cells import all_parts, largest_run, seat_table, stands
from lrmoe.planning.copies import open_sums, return_messages
from lrmoe.planning.moments import Held, Moments
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray
from lrmoe.planning.transfers import transfers

_DOT_ROWS = 4096  # pairs whose outputs meet their gradient together


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """The largest block of some pairs.

    Attributes:
        rows: int64 (P, R). gathers_h, computes_h, gathers_x: what it does with first projections and inputs.
    """

    rows: IntArray
    gathers_h: bool
    computes_h: bool
    gathers_x: bool


class BackwardWalk(Walk):
    """Backward of a call."""

    def _backward(
        self,
        moments: Moments,
        plan: LayerPlan,
        kept_RQ: IntArray,
        kept: IntArray,
        sent_R: IntArray,
        *,
        overlaps: bool,
    ) -> None:
        sizes, shape = self.sizes, self.sizes.shape
        again = not self.alone and not self.keeps_rows(plan)
        foreign, cast = self._borrow(moments)
        alpha = moments.take("scratch", sizes.alpha_bytes * sent_R)
        weight = None
        if sizes.scored:
            if not sizes.early:
                self._choose(moments, plan, sent_R)
            weight = moments.take("scratch", (sizes.sum_bytes + (0 if sizes.early else 4)) * sent_R)
        cells_RV, identity, position = self._stands(plan, kept_RQ, again)
        moments.brief("scratch", 0 if identity else 4 * INDEX * kept)
        route = moments.take("scratch", (0 if identity else INDEX * kept) + (4 * kept if position else 0))
        if sizes.alpha_bytes != sizes.sum_bytes:
            moments.take("scratch", sizes.sum_bytes * sent_R)
        parts = plan.backward_chunks
        wide = parts > 1 and sizes.sum_bytes != shape.element_bytes
        projections = sizes.projections
        home_bytes = sizes.sum_bytes if wide else shape.element_bytes
        grads = [moments.take("grads", self.local * size * home_bytes) for size in projections]
        slots = moments.take("replicas", self.foreign_R * sum(projections) * sizes.sum_bytes)
        if sizes.needs_alpha and not sizes.keeps_outputs:
            moments.take("outputs", sizes.tokens_R * sizes.slots * sizes.sum_bytes)
        overlaps = overlaps and not (self.alone or again or parts > 1)
        overlaps = overlaps and sizes.needs_x and sizes.needs_gate_up
        staging = self._staging(wide) if overlaps else None
        self._backward_parts(moments, plan, cells_RV, again, identity, position, foreign, staging)
        if sizes.keeps_outputs and sizes.needs_alpha:
            self._full_alpha(moments, sent_R)
        moments.free(cast)
        if staging is None:
            moments.free(foreign)
            moments.brief("replicas", self._staging(wide))
        moments.free(slots, alpha, weight, route)
        for size, sums in zip(projections, grads, strict=True):
            if home_bytes != sizes.weight_bytes:
                moments.take("grads", self.local * size * sizes.weight_bytes)
                moments.free(sums)

    def _stands(self, plan: LayerPlan, kept_RQ: IntArray, again: bool) -> tuple[IntArray, bool, bool]:
        """Cells of stands; whether pairs keep the forward's order; whether their positions travel."""
        seats, none_RQ = self.seats, np.zeros_like(kept_RQ)
        exact = plan.exact
        if exact and np.array_equal(kept_RQ.sum(axis=0), seats.backward_Q):
            cells = (none_RQ, kept_RQ) if again else (kept_RQ, none_RQ)
            position = plan.backward_chunks > 1 and not again
            return stands(seats.starts_R, *cells), not seats.spread, position
        moves = transfers(kept_RQ, seats)
        stay_RQ, carry_RQ = (moves.table(*kept_RQ.shape, stay=stay) for stay in (True, False))
        if again:
            stay_RQ, carry_RQ = none_RQ, stay_RQ + carry_RQ
        return stands(seats.starts_R, stay_RQ, carry_RQ), False, not (again or self.sizes.early)

    def _backward_parts(
        self,
        moments: Moments,
        plan: LayerPlan,
        cells_RV: IntArray,
        again: bool,
        identity: bool,
        position: bool,
        foreign: Held,
        staging: IntArray | None,
    ) -> None:
        sizes, seats, parts = self.sizes, self.seats, plan.backward_chunks
        starts_R = 2 * seats.starts_R
        adds = parts > 1 and sizes.needs_x
        accumulated = moments.take("outputs", sizes.tokens_R * sizes.shape.hidden * sizes.sum_bytes * adds)
        cells_PRV = all_parts(cells_RV, starts_R, parts)
        every = Cells.of(sizes, seats, cells_PRV, starts_R)
        carry_V = _carry_columns(starts_R)
        carried: Cells | None = every if again else Cells.of(sizes, seats, cells_PRV * carry_V, starts_R)
        if carried is not None and not carried.pairs_in.any():
            carried = None
        self._backward_part(
            moments, plan, cells_PRV, every, carried, again, identity, position, foreign, staging
        )
        moments.fold()
        if sizes.needs_x and (parts > 1 and sizes.sum_bytes != sizes.shape.element_bytes):
            moments.take("outputs", sizes.tokens_R * self.row)
            moments.free(accumulated)

    def _backward_part(
        self,
        moments: Moments,
        plan: LayerPlan,
        cells_PRV: IntArray,
        every: Cells,
        carried: Cells | None,
        again: bool,
        identity: bool,
        position: bool,
        foreign: Held,
        staging: IntArray | None,
    ) -> None:
        """One part. Args: staging: bytes (R,) that copies' gradients need, where work is left until rows travel."""
        sizes, parts = self.sizes, plan.backward_chunks
        p, q = every.pairs_out, every.pairs_in
        vectors = INDEX * 2 * (parts > 1) + (0 if identity and parts == 1 else INDEX + sizes.sum_bytes)
        vectors += INDEX + 4 * (position and parts > 1)
        held = [moments.take("scratch", vectors * p)]
        if not self.alone:
            held.append(moments.take("scratch", INDEX * q))
        columns = 1 + position
        g, index = self._send(moments, "backward", every, columns)
        inputs = input_index = mine = None
        if carried is not None:
            if not again:
                mine = moments.take("scratch", p + INDEX * (carried.pairs_in + carried.pairs_out))
            inputs, input_index = self._send(moments, "backward", carried, 0)
        dx = moments.take("backward", q * self.row) if sizes.needs_x else None
        dots = moments.take("scratch", sizes.sum_bytes * q)
        dh = None if staging is None else moments.take("scratch", q * 2 * self.width)
        blocks = self._blocks(plan, cells_PRV, again, position)
        index_x = self._experts_backward(
            moments, plan, cells_PRV, blocks, again, position, leaves=dh is not None
        )
        moments.free(g, mine)
        if dh is None:
            moments.free(inputs, input_index, index_x)
        if dx is not None:
            rows, sent = self._return(moments, "backward", every, dx)
            if staging is not None:
                moments.free(foreign)
                travelling = self._later(moments, blocks, staging)
                moments.free(dh, inputs, input_index, index_x)
            moments.free(sent)
            out = self._sum_by_token(moments, "outputs", every, weighted=False)
            moments.free(rows)
            if parts > 1:
                moments.free(out)
        if sizes.needs_alpha and not sizes.keeps_outputs:
            moments.brief("scratch", 0 if self.alone else sizes.sum_bytes * (q + p))
        moments.free(dots, index, *held)
        if staging is not None:
            moments.free(travelling)

    def _blocks(
        self, plan: LayerPlan, cells_PRV: IntArray, again: bool, position: bool
    ) -> tuple[_Block, _Block]:
        """The largest block of pairs that stay, and of those that move."""
        sizes, seats, parts = self.sizes, self.seats, plan.backward_chunks
        starts_R = 2 * seats.starts_R
        rows_PV, table = cells_PRV.sum(axis=1), seat_table(seats.starts_R)
        stay, move = (
            largest_run(_halves(rows_PV, starts_R, second=second), table, self.local, sizes.block_rows)
            for second in (False, True)
        )
        stashed = self.keeps_rows(plan)
        scattered = position or (sizes.early and parts > 1)
        in_order = sizes.early and stashed and parts == 1 and not (self.alone or sizes.lean)
        return (
            _Block(
                rows=stay, gathers_h=stashed and scattered, computes_h=not stashed, gathers_x=not in_order
            ),
            _Block(rows=move, gathers_h=False, computes_h=True, gathers_x=True),
        )

    def _experts_backward(
        self,
        moments: Moments,
        plan: LayerPlan,
        cells_PRV: IntArray,
        blocks: tuple[_Block, _Block],
        again: bool,
        position: bool,
        *,
        leaves: bool,
    ) -> Held | None:
        """Scratch of the experts; returns the index of inputs from which weights' gradients are computed later."""
        sizes, seats = self.sizes, self.seats
        rows_PV, parts, kept = cells_PRV.sum(axis=1), plan.backward_chunks, None
        stays = _halves(rows_PV, 2 * seats.starts_R, second=False)
        staying = np.stack([np.add.reduceat(rows, seats.starts_R[:-1]) for rows in stays])
        if sizes.early:
            kept = moments.take("scratch", (1 + sizes.lean) * INDEX * staying * (parts > 1 and not again))
        elif not again and not self.alone:
            received = seats.assign_RQ.sum(axis=0)
            m = np.add.reduceat(received, seats.starts_R[:-1])
            moments.brief("scratch", (3 if position else 1) * INDEX * m)
            kept = moments.take("scratch", INDEX * m + (2 * INDEX * staying + INDEX * m if position else 0))
        elif self.alone and position:
            kept = moments.take("scratch", INDEX * rows_PV.sum(axis=1)[:, None])
        for block in blocks:
            self._block_backward(moments, block, leaves=leaves)
        moments.free(kept)
        if not leaves or sizes.early or (sizes.lean and not position):
            return None
        return moments.take("scratch", INDEX * (staying if position else m))

    def _block_backward(self, moments: Moments, block: _Block, *, leaves: bool) -> None:
        """Scratch of the largest block: see `experts._block_backward` and the activation's backward.

        Args:
            leaves: the gradient at the first projection lies elsewhere, and weights' are computed from it later.
        """
        sizes, shape, rows = self.sizes, self.sizes.shape, block.rows
        gathers_h = block.gathers_h and not sizes.reads_stash_by_index
        h = 2 * self.width * (gathers_h or block.computes_h)
        x = self.row * (block.gathers_x and ((sizes.needs_gate_up and not leaves) or block.computes_h))
        dh = 0 if leaves else 2 * self.width
        narrow = sizes.sum_bytes != shape.element_bytes
        # gradient rows, inputs, first projection; gradients at phi and at the first projection
        inside = self.row + x + h + self.width + dh + sizes.sum_bytes
        # act, phi, one more; compiled, phi takes the place of its gradient and nothing else is needed
        phi = 0 if sizes.fused else self.width
        more = 2 * phi + (3 * shape.width * sizes.sum_bytes if narrow else self.width) * (not sizes.fused)
        gate_up, down = (self._product(rows, size) for size in sizes.projections)
        y = self.row if not self.alone and not sizes.lean and sizes.needs_x else 0
        moments.brief(
            "scratch",
            np.maximum.reduce([
                rows * (inside + more),
                rows * (inside + phi) + down,
                rows * (dh + x) + (0 if leaves else gate_up),
                rows * (dh + y),
            ]),
        )  # fmt: skip

    def _later(self, moments: Moments, blocks: tuple[_Block, _Block], staging: IntArray) -> Held:
        """Weights' gradients of foreign seats; those of home seats, while the copies' travel."""
        rows = [block.rows * self.row * block.gathers_x for block in blocks]
        for inputs, block in zip(rows, blocks, strict=True):  # of foreign seats, whose sums may be wider
            moments.brief("scratch", inputs + self._product(block.rows, self.sizes.projections[0]))
        travelling = moments.take("replicas", staging)
        for inputs in rows:
            moments.brief("scratch", inputs)
        return travelling

    def _product(self, rows: IntArray, size: int) -> IntArray:
        """Bytes of one expert's weight gradient, `size` numbers, before it is added to a sum that is wider."""
        element = self.sizes.shape.element_bytes
        wide = (rows.shape[0] > 1) | (self.foreign_R > 0)
        return (rows > 0) * wide * size * (element if self.sizes.sum_bytes != element else 0)

    def _staging(self, wide: bool) -> IntArray:
        """Bytes (R,) of gradients of copies that arrive, and of sums beside them."""
        projections = sum(self.sizes.projections)
        if not self.seats.spread or not projections:
            return np.zeros(self.ranks, dtype=np.int64)
        messages = return_messages(self.seats)
        staging = messages.window_R
        if self.sizes.sum_bytes != self.sizes.shape.element_bytes and not wide:
            staging = staging + open_sums(self.seats, messages).max(axis=0, initial=0)
        return staging * projections * self.sizes.sum_bytes

    def _full_alpha(self, moments: Moments, sent_R: IntArray) -> None:
        """Gradient of every pair's routing weight from kept outputs, some rows at a time."""
        sizes, hidden = self.sizes, self.sizes.shape.hidden
        moments.take("outputs", sizes.tokens_R * sizes.slots * sizes.sum_bytes)
        rows = np.minimum(sent_R, _DOT_ROWS)
        narrow = sizes.sum_bytes != sizes.shape.element_bytes
        scratch = moments.take("scratch", (2 * INDEX + sizes.sum_bytes) * sent_R)
        moments.brief("scratch", rows * hidden * sizes.sum_bytes * (3 if narrow else 2))
        moments.free(scratch)


def _carry_columns(starts_R: IntArray) -> IntArray:
    """1 at the stands of pairs that carry their input, int64 (V,)."""
    found = np.zeros(int(starts_R[-1]), dtype=np.int64)
    for begin, end in zip(starts_R[:-1].tolist(), starts_R[1:].tolist(), strict=True):
        found[(begin + end) // 2 : end] = 1
    return found


def _halves(rows_PV: IntArray, starts_R: IntArray, *, second: bool) -> IntArray:
    """Rows of the stands where pairs stay, or carry, seat after seat, int64 (P, Q)."""
    carries = _carry_columns(starts_R).astype(bool)
    return rows_PV[:, carries == second]
