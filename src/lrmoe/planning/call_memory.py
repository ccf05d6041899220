"""Memory of one layer call, moment by moment, as the runtime allocates and frees: what a byte budget is held against.

The walk below follows layer/forward.py and layer/backward.py line by line, all ranks and all parts of a pass at once.
Index vectors and other scratch count with the rest; what operators use inside themselves does not. Where only a source
knows a number (tokens that share a row of a lean wire), the most that it can be stands for it.

Shape letters: R ranks, E experts, Q seats of all ranks, V stands, P parts of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lrmoe.planning.cells import all_parts, between_ranks, expected_kept, largest_run, seat_table, stands
from lrmoe.planning.copies import open_sums, return_messages
from lrmoe.planning.memory import ExpertShape
from lrmoe.planning.moments import Held, Moments
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats, seats_of
from lrmoe.planning.transfers import transfers

_INDEX = 8  # int64
_DOT_ROWS = 4096  # pairs whose outputs meet their gradient together
_WIDEN_TOKENS = 512  # tokens whose rows `ops.combine` widens together
_SORT = 25  # bytes a pair while the pairs are sorted by expert
_CHOOSE = 96  # bytes a pair and seat on offer while seats are chosen
_SELECT = 112  # bytes a pair while scores are turned into the kept set


@dataclass(frozen=True, kw_only=True, eq=False)
class CallSizes:
    """What the memory of a call depends on besides its plan.

    Attributes:
        shape: sizes of an expert, element size of the compute dtype.
        tokens_R: int64 (R,), tokens of every rank. slots: experts per token.
        input_bytes, alpha_bytes, weight_bytes: element sizes of the layer's input, routing weights and parameters.
        lean: one row per (token, rank). keeps_outputs: expert outputs stay for the routing weights' gradient.
        norms: projection-input norms travel home. scored: backward scores pairs.
        differentiable: a backward follows. needs: gradients asked for, of x, alpha, gate_up, down.
        block_rows: rows that experts compute at once, at least; None: all of them.
    """

    shape: ExpertShape
    tokens_R: IntArray
    slots: int
    input_bytes: int
    alpha_bytes: int
    weight_bytes: int
    lean: bool
    keeps_outputs: bool
    norms: bool
    scored: bool
    differentiable: bool
    needs: tuple[bool, bool, bool, bool]
    block_rows: int | None

    @property
    def needs_x(self) -> bool:
        """Whether the input needs a gradient."""
        return self.needs[0]

    @property
    def needs_alpha(self) -> bool:
        """Whether the routing weights need a gradient."""
        return self.needs[1]

    @property
    def needs_gate_up(self) -> bool:
        """Whether the first projection needs a gradient."""
        return self.needs[2]

    @property
    def needs_down(self) -> bool:
        """Whether the second projection needs a gradient."""
        return self.needs[3]

    @property
    def sum_bytes(self) -> int:
        """Element size of sums: fp32, or fp64 for fp64."""
        return 8 if self.shape.element_bytes == 8 else 4

    @property
    def projections(self) -> tuple[int, int]:
        """Parameters of one expert's gate_up and down that get gradients."""
        plane = self.shape.hidden * self.shape.width
        return 2 * plane * self.needs_gate_up, plane * self.needs_down


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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cells:
    """Row counts of all parts of an exchange, int64 (P, R) each: pairs and rows sent and received, largest blocks."""

    pairs_out: IntArray
    pairs_in: IntArray
    rows_out: IntArray
    rows_in: IntArray
    block: IntArray

    @classmethod
    def of(cls, sizes: CallSizes, seats: Seats, cells_PRQ: IntArray, starts_R: IntArray) -> _Cells:
        """From cells of seats, or of stands: `starts_R` says which; blocks are those of the first run of seats."""
        pairs = between_ranks(cells_PRQ, starts_R)
        rows = np.minimum(pairs, sizes.tokens_R[:, None]) if sizes.lean else pairs
        table = seat_table(starts_R)
        homes = seats.topology.experts_per_rank
        return cls(
            pairs_out=pairs.sum(axis=2),
            pairs_in=pairs.sum(axis=1),
            rows_out=rows.sum(axis=2),
            rows_in=rows.sum(axis=1),
            block=largest_run(cells_PRQ.sum(axis=1), table, homes, sizes.block_rows),
        )


class CallWalk:
    """One plan's call under given sizes; `memory` walks through it."""

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
    def forward_cells(self) -> _Cells:
        """Cells of the whole forward."""
        return _Cells.of(self.sizes, self.seats, self.seats.assign_RQ[None], self.seats.starts_R)

    @cached_property
    def kept_RQ(self) -> IntArray:
        """About what backward keeps of every cell."""
        if self.plan.exact:
            return self.seats.assign_RQ
        return expected_kept(self.seats, self.plan.quota_E)

    def memory(self, plan: LayerPlan, kept_RQ: IntArray | None = None) -> CallMemory:
        """Walk through the call.

        Args:
            plan: this walk's plan, with any chunks and recompute.
            kept_RQ: int64 (R, Q), kept pairs of every cell where they are known.
        """
        moments = Moments()
        moments.take("weights", self.local * self.sizes.shape.params * self.sizes.weight_bytes)
        saved = self._forward(moments, plan)
        forward_R, forward = moments.peaks(self.ranks)
        kept_R = moments.now(self.ranks)
        moments.mark()
        if self.sizes.differentiable:
            # What a source keeps is chosen later; its vectors, which no chunks make smaller, are as long as can be.
            most_RQ = np.minimum(self.seats.assign_RQ, plan.quota_E[self.seats.expert_Q])
            known = (most_RQ, self.kept_RQ) if kept_RQ is None else (kept_RQ, kept_RQ)
            self._backward(moments, plan, known[1], known[0].sum(axis=1), saved)
        backward_R, backward = moments.peaks(self.ranks)
        return CallMemory(
            forward_R=_with_slack(forward_R),
            backward_R=_with_slack(backward_R),
            kept_R=kept_R,
            forward=forward,
            backward=backward,
        )

    # Forward.

    def _forward(self, moments: Moments, plan: LayerPlan) -> IntArray:
        """Leaves what backward finds; returns bytes that go when backward has ended (nothing needs them)."""
        sizes, tokens = self.sizes, self.sizes.tokens_R
        pairs = tokens * sizes.slots
        order = moments.take("scratch", _INDEX * pairs)
        moments.brief("scratch", _SORT * pairs)
        lease = self._borrow(moments)
        sent = self.seats.assign_RQ.sum(axis=1)
        place = sending = None
        if self.seats.spread:
            moments.brief("scratch", (4 * _INDEX if not sizes.lean else _CHOOSE) * sent)
            place = moments.take("scratch", _INDEX * sent)
            sending = moments.take("scratch", _INDEX * sent)
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
        cells = _Cells.of(sizes, self.seats, cells_PRQ, self.seats.starts_R)
        index = moments.take("scratch", 2 * _INDEX * cells.pairs_out)
        self._forward_part(moments, cells, keeps=False, kept=False)
        moments.free(index)
        moments.fold()
        if sizes.sum_bytes != sizes.shape.element_bytes:
            moments.take("outputs", out_size * sizes.shape.element_bytes)
            moments.free(total)

    def _forward_part(self, moments: Moments, cells: _Cells, *, keeps: bool, kept: bool) -> None:
        """One part; with `kept` its output stays, and what backward reads."""
        sizes = self.sizes
        held: list[Held] = []
        if not self.alone:
            held.append(moments.take("scratch", _INDEX * cells.pairs_in))
        held.append(moments.take("scratch", _INDEX * cells.pairs_out))
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

    # Backward.

    def _backward(
        self, moments: Moments, plan: LayerPlan, kept_RQ: IntArray, kept: IntArray, sent_R: IntArray
    ) -> None:
        sizes, shape = self.sizes, self.sizes.shape
        again = not self.alone and not self.keeps_rows(plan)
        lease = self._borrow(moments)
        alpha = moments.take("scratch", sizes.alpha_bytes * sent_R)
        weight = None
        if sizes.scored:
            home_R = plan.counts_E.reshape(self.ranks, -1).sum(axis=1)
            moments.brief("scratch", 12 * sent_R + _SELECT * home_R)
            weight = moments.take("scratch", 4 * sent_R + sizes.sum_bytes * sent_R)
        cells_RV, identity, position = self._stands(plan, kept_RQ, again)
        moments.brief("scratch", 0 if identity else 4 * _INDEX * kept)
        route = moments.take("scratch", (0 if identity else _INDEX * kept) + (4 * kept if position else 0))
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
        return stands(seats.starts_R, stay_RQ, carry_RQ), False, not again

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
        every = _Cells.of(sizes, seats, cells_PRV, starts_R)
        carry_V = _carry_columns(starts_R)
        carried: _Cells | None = every if again else _Cells.of(sizes, seats, cells_PRV * carry_V, starts_R)
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
        every: _Cells,
        carried: _Cells | None,
        again: bool,
        identity: bool,
        position: bool,
    ) -> None:
        sizes, parts = self.sizes, plan.backward_chunks
        p, q = every.pairs_out, every.pairs_in
        vectors = _INDEX * 2 * (parts > 1) + (0 if identity and parts == 1 else _INDEX + sizes.sum_bytes)
        vectors += _INDEX + 4 * (position and parts > 1)
        held = [moments.take("scratch", vectors * p)]
        if not self.alone:
            held.append(moments.take("scratch", _INDEX * q))
        columns = 1 + position
        g, index = self._send(moments, "backward", every, columns)
        inputs = input_index = mine = None
        if carried is not None:
            if not again:
                mine = moments.take("scratch", p + _INDEX * (carried.pairs_in + carried.pairs_out))
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
        carried: _Cells | None,
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
        kept = None
        if not again and not self.alone:
            received = seats.assign_RQ.sum(axis=0)
            m = np.add.reduceat(received, seats.starts_R[:-1])
            moments.brief("scratch", (3 if position else 1) * _INDEX * m)
            staying = np.stack([np.add.reduceat(rows, seats.starts_R[:-1]) for rows in stays])
            kept = moments.take(
                "scratch", _INDEX * m + (2 * _INDEX * staying + _INDEX * m if position else 0)
            )
        elif self.alone and position:
            kept = moments.take("scratch", _INDEX * rows_PV.sum(axis=1)[:, None])
        stashed = self.keeps_rows(plan)
        self._block_backward(moments, stay, gathers_h=stashed and position, computes_h=not stashed)
        self._block_backward(moments, move, gathers_h=False, computes_h=True)
        moments.free(kept)

    def _block_backward(self, moments: Moments, rows: IntArray, *, gathers_h: bool, computes_h: bool) -> None:
        """Scratch of the largest block: see `experts._block_backward` and the activation's backward."""
        sizes, shape = self.sizes, self.sizes.shape
        h = 2 * self.width * (gathers_h or computes_h)
        x = self.row * (sizes.needs_gate_up or computes_h)
        narrow = sizes.sum_bytes != shape.element_bytes
        temporary = 3 * shape.width * sizes.sum_bytes if narrow else self.width
        # gradient rows, inputs, first projection; gradients at phi and at the first projection; act, phi, one more
        inside = self.row + x + h + self.width + 2 * self.width + 2 * self.width + temporary + sizes.sum_bytes
        y = self.row if not self.alone and not sizes.lean and sizes.needs_x else 0
        moments.brief("scratch", rows * max(inside, 2 * self.width + max(x, y)))

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
        scratch = moments.take("scratch", (2 * _INDEX + sizes.sum_bytes) * sent_R)
        moments.brief("scratch", rows * hidden * sizes.sum_bytes * (3 if narrow else 2))
        moments.free(scratch)

    # What both passes do.

    def _borrow(self, moments: Moments) -> Held | None:
        """Copies of weights: in the compute dtype where parameters have another, and of foreign seats."""
        shape = self.sizes.shape
        size = self.foreign_R * shape.weight_bytes
        if self.sizes.weight_bytes != shape.element_bytes:
            size = size + self.local * shape.weight_bytes
        if self.sizes.input_bytes != shape.element_bytes:
            size = size + self.sizes.tokens_R * self.row
        return moments.take("replicas", size)

    def _send(
        self, moments: Moments, part: str, cells: _Cells, columns: int
    ) -> tuple[Held | None, Held | None]:
        """Rows and columns to the seats: (received rows, their columns and index)."""
        if self.alone:
            return None, None
        sizes = self.sizes
        wire = columns * 4 if sizes.sum_bytes == 4 else 8 * (columns > 0) + 4 * (columns > 1)
        lean = None
        if sizes.lean:
            moments.brief("scratch", 3 * _INDEX * cells.pairs_out + 5 * self.ranks * sizes.tokens_R)
            lean = moments.take("scratch", _INDEX * cells.rows_out + 4 * cells.pairs_out)
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
            moments.brief("scratch", 3 * _INDEX * cells.pairs_in)
            moments.free(lean)
            index = moments.take("scratch", _INDEX * cells.pairs_in + _INDEX * cells.rows_out)
            return received, _joined(moments, found, index)
        return received, found

    def _return(self, moments: Moments, part: str, cells: _Cells, rows: Held) -> Held:
        """Results back at their sources; the rows here end."""
        if self.alone:
            return rows
        sums = None
        if self.sizes.lean:
            entries = moments.take(
                "scratch", (_INDEX + self.sizes.sum_bytes) * cells.pairs_in + _INDEX * cells.rows_in
            )
            moments.brief("scratch", _INDEX * cells.pairs_in)
            sums = self._combine(moments, part, cells.rows_in, cells.pairs_in, mixed=part == "outputs")
            moments.free(entries)
        back = moments.take(part, (cells.rows_out if self.sizes.lean else cells.pairs_out) * self.row)
        moments.free(sums, rows)
        return back

    def _sum_by_token(self, moments: Moments, part: str, cells: _Cells, *, weighted: bool) -> Held:
        sizes, tokens = self.sizes, self.sizes.tokens_R
        pairs = cells.rows_out if sizes.lean else cells.pairs_out
        factor = sizes.alpha_bytes if weighted and not sizes.lean else 0
        entries = moments.take("scratch", (2 * _INDEX + factor) * pairs + _INDEX * tokens)
        out = self._combine(moments, part, tokens, pairs, mixed=weighted and not sizes.lean)
        moments.free(entries)
        return out

    def _combine(self, moments: Moments, part: str, groups: IntArray, rows: IntArray, *, mixed: bool) -> Held:
        """Sums of rows; where factors are wider than the rows, rows of a block of groups are widened."""
        sizes, hidden = self.sizes, self.sizes.shape.hidden
        out = moments.take(part, groups * self.row)
        bags = _INDEX * rows if sizes.shape.element_bytes == 8 else 0  # fp64: every row's bag
        starts = moments.take("scratch", 3 * _INDEX * groups + bags)
        if mixed and sizes.sum_bytes != sizes.shape.element_bytes:
            block = np.minimum(rows, _WIDEN_TOKENS * sizes.slots)
            wide = hidden * sizes.sum_bytes
            more = np.maximum(
                block * self.row, np.minimum(groups, _WIDEN_TOKENS) * (wide + 3 * _INDEX) + 4 * block
            )
            moments.brief("scratch", block * wide + more + _INDEX * block)
        moments.free(starts)
        return out


def _with_slack(size_R: IntArray) -> IntArray:
    """Single numbers and small tables are not walked through: 1/256 and 2 KiB more."""
    return size_R + (size_R >> 8) + 2048


def _joined(moments: Moments, first: Held | None, second: Held) -> Held:
    """Two buffers of one part as one."""
    if first is None:
        return second
    return Held(part=first.part, size=first.size + second.size)


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
