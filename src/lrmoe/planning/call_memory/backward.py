"""The walk through layer/backward.py.

Shape letters: R ranks, E experts, Q seats of all ranks, V stands, P parts of a pass.
"""

from __future__ import annotations

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


class BackwardWalk(Walk):
    """Backward of a call."""

    def _backward(
        self, moments: Moments, plan: LayerPlan, kept_RQ: IntArray, kept: IntArray, sent_R: IntArray
    ) -> None:
        sizes, shape = self.sizes, self.sizes.shape
        again = not self.alone and not self.keeps_rows(plan)
        lease = self._borrow(moments)
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
        self._backward_parts(moments, plan, cells_RV, again, identity, position)
        if sizes.keeps_outputs and sizes.needs_alpha:
            self._full_alpha(moments, sent_R)
        self._give_back(moments, lease, wide)
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
        self._backward_part(moments, plan, cells_PRV, every, carried, again, identity, position)
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
    ) -> None:
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
        self._experts_backward(moments, plan, cells_PRV, carried, again, position)
        moments.free(g, inputs, input_index, mine)
        if dx is not None:
            rows = self._return(moments, "backward", every, dx)
            out = self._sum_by_token(moments, "outputs", every, weighted=False)
            moments.free(rows)
            if parts > 1:
                moments.free(out)
        if sizes.needs_alpha and not sizes.keeps_outputs:
            moments.brief("scratch", 0 if self.alone else sizes.sum_bytes * (q + p))
        moments.free(dots, index, *held)

    def _experts_backward(
        self,
        moments: Moments,
        plan: LayerPlan,
        cells_PRV: IntArray,
        carried: Cells | None,
        again: bool,
        position: bool,
    ) -> None:
        sizes, seats = self.sizes, self.seats
        starts_R = 2 * seats.starts_R
        rows_PV = cells_PRV.sum(axis=1)
        table = seat_table(seats.starts_R)
        stays = _halves(rows_PV, starts_R, second=False)
        moves = _halves(rows_PV, starts_R, second=True)
        runs = (largest_run(rows, table, self.local, sizes.block_rows) for rows in (stays, moves))
        stay, move = runs
        kept, parts = None, plan.backward_chunks
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
        stashed = self.keeps_rows(plan)
        scattered = position or (sizes.early and parts > 1)
        in_order = sizes.early and stashed and parts == 1 and not (self.alone or sizes.lean)
        self._block_backward(
            moments, stay, gathers_h=stashed and scattered, computes_h=not stashed, gathers_x=not in_order
        )
        self._block_backward(moments, move, gathers_h=False, computes_h=True, gathers_x=True)
        moments.free(kept)

    def _block_backward(
        self, moments: Moments, rows: IntArray, *, gathers_h: bool, computes_h: bool, gathers_x: bool
    ) -> None:
        """Scratch of the largest block: see `experts._block_backward` and the activation's backward."""
        sizes, shape = self.sizes, self.sizes.shape
        gathers_h = gathers_h and not sizes.reads_stash_by_index
        h = 2 * self.width * (gathers_h or computes_h)
        x = self.row * (gathers_x and (sizes.needs_gate_up or computes_h))
        narrow = sizes.sum_bytes != shape.element_bytes
        # gradient rows, inputs, first projection; gradients at phi and at the first projection
        inside = self.row + x + h + self.width + 2 * self.width + sizes.sum_bytes
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
                rows * (2 * self.width + x) + gate_up,
                rows * (2 * self.width + y),
            ]),
        )  # fmt: skip

    def _product(self, rows: IntArray, size: int) -> IntArray:
        """Bytes of one expert's weight gradient, `size` numbers, before it is added to a sum that is wider."""
        element = self.sizes.shape.element_bytes
        wide = (rows.shape[0] > 1) | (self.foreign_R > 0)
        return (rows > 0) * wide * size * (element if self.sizes.sum_bytes != element else 0)

    def _give_back(self, moments: Moments, lease: Held | None, wide: bool) -> None:
        """Copies of weights go; gradients of copies travel home, summed beside them."""
        moments.free(lease)
        projections = sum(self.sizes.projections)
        if not self.seats.spread or not projections:
            return
        messages = return_messages(self.seats)
        staging = messages.window_R
        if self.sizes.sum_bytes != self.sizes.shape.element_bytes and not wide:
            staging = staging + open_sums(self.seats, messages).max(axis=0, initial=0)
        moments.brief("replicas", staging * projections * self.sizes.sum_bytes)

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
