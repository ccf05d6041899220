"""Forward and backward of the experts seated on this rank, over rows gathered by index.

Rows are taken a few seats at a time, so that what lies between two products stays in cache (and scratch stays small);
a seat's rows are never split, so every weight gradient is one product in a call that runs in one part.

Shape letters: H hidden, I expert width, M rows in (seat, source) order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lrmoe.layer.buffers import Rows, Sink, Stash, brings_memory, scratch
from lrmoe.layer.seat_weights import WeightGrads, Weights
from lrmoe.ops import (
    gated_activation,
    gated_activation_backward,
    grouped_mm,
    grouped_mm_input,
    grouped_mm_weight,
    indexes,
    place_rows,
    reads_by_index,
)

BLOCK_ROWS = 1024  # rows per block on CPU: intermediates of common widths stay in the last-level cache
_FP16_SCALE_FLOOR = 2.0**-10
_FP16_SMALL = 16.0  # largest entry of a row that no product with weights of common size takes out of fp16


def blocks(counts: Sequence[int], homes: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cut seats into runs of at least BLOCK_ROWS rows (all at once on CUDA): (seats, rows) of each run.

    No run holds home and foreign seats, whose weights lie in different buffers.
    """
    limit = BLOCK_ROWS if device.type == "cpu" else sum(counts) + 1
    first = begin = end = 0
    for seat, count in enumerate(counts):
        end += count
        if end - begin >= limit or seat in (homes - 1, len(counts) - 1):
            yield slice(first, seat + 1), slice(begin, end)
            first, begin = seat + 1, end


def experts_forward(
    weights: Weights,
    x: Rows,
    counts: Sequence[int],
    *,
    out: Sink,
    out_index: Tensor | None,
    stash: bool | Stash,
    norms: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Run every row through its expert.

    Args:
        x: input rows, (seat, source) order, width H.
        counts: rows of each seat.
        out: (M, H), filled: row i goes to `out[out_index[i]]`, or `out[i]` without an index.
        stash: keep the first projection's output for backward; a `Stash` takes that of its rows.
        norms: keep the norm of each row of the second projection's input.

    Returns:
        h (M, 2I), or None where none or only some is kept; norms fp32 (M,) or None.
    """
    rows, gate_up = sum(counts), weights.gate_up
    h_M2I = Sink(lambda: scratch.lasting((rows, gate_up.shape[1]), gate_up)) if stash is True else None
    some = stash if isinstance(stash, Stash) else None
    norm_M = torch.empty(rows, dtype=torch.float32, device=gate_up.device) if norms else None
    runs = list(blocks(counts, weights.homes, gate_up.device))
    alone = len(runs) == 1 and brings_memory(gate_up)
    for sink in (out, h_M2I):
        if sink is not None and not alone:
            sink.take()
    for seats, at in runs:
        norm = None if norm_M is None else norm_M[at]
        _block_forward(weights, x, counts[seats], seats, at, h_M2I, some, norm, out, out_index, alone=alone)
    return None if h_M2I is None else h_M2I.whole, norm_M


def _block_forward(
    weights: Weights,
    x: Rows,
    part: Sequence[int],
    seats: slice,
    at: slice,
    kept: Sink | None,
    stash: Stash | None,
    norm: Tensor | None,
    out: Sink,
    out_index: Tensor | None,
    *,
    alone: bool,
) -> None:
    """One block, a function of its own so that its scratch is gone before the next one begins."""
    size, (gate_up, down) = at.stop - at.start, weights.of(seats)
    width, like = gate_up.shape[1], gate_up
    there = scratch.place("h", (size, width), like) if kept is None else kept.part(at, alone=alone)
    if x.index_M is not None and reads_by_index(x.source, gate_up, part, gate_up.shape[1:]):
        h = grouped_mm(x.source, gate_up, part, out=there, index_N=x.index_M[at])
    else:
        h = grouped_mm(x.take("x", at.start, at.stop), gate_up, part, out=there)
    scratch.note(h) if kept is None else kept.put(h)
    if stash is not None:
        stash.add(h, seats, at)
    phi = scratch.take("phi", (size, width // 2), like)
    gated_activation(h, weights.activation, out=phi, norm_N=norm)
    _place(
        out, out_index, at, (size, down.shape[1]), lambda there: grouped_mm(phi, down, part, out=there), alone
    )


def _place(
    out: Sink,
    index_M: Tensor | None,
    at: slice,
    shape: tuple[int, int],
    product: Callable[[Tensor | None], Tensor],
    alone: bool,
) -> None:
    """A block's results into their places: as they come, or row i into `index_M[i]`."""
    if index_M is None:
        out.put(product(out.part(at, alone=alone)))
        return
    rows = scratch.note(product(scratch.place("y", shape, out.whole)))
    place_rows(out.whole, index_M[at], rows)


def experts_backward(
    weights: Weights,
    x: Rows,
    h: Rows | None,
    g: Rows,
    scale_M: Tensor,
    counts: Sequence[int],
    *,
    dx: Sink | None,
    dx_index: Tensor | None,
    grads: WeightGrads,
    dx_from: int | None = None,
    add: bool = False,
    dh: Tensor | None = None,
) -> Tensor:
    """Backward of kept rows only.

    Args:
        x: their inputs (width H); h: their stashed first projection (width 2I), or None to compute it again.
        g: their upstream gradients, unscaled (width H).
        scale_M: (M,) factor of each row's gradient: routing weight times 1/pi.
        counts: kept rows of each seat.
        dx: (M, H) sink for input gradients, filled as `out` in forward.
        dx_from: first row of `dx` that is theirs, where it has others' too and no index.
        grads: weight gradients, written (exact zeros for seats without rows), or added to with `add`.
        dh: (M, 2I) buffer for gradients at the first projection, from which `first_weight_gradients` computes the
            weights' later; None: they are computed here.

    Returns:
        (M,) <gradient, expert output> of each row before scaling.
    """
    dot_M = scale_M.new_empty(sum(counts))
    runs = list(blocks(counts, weights.homes, scale_M.device))
    alone = len(runs) == 1 and dx_from is None and brings_memory(weights.gate_up)
    if dx is not None and not alone:
        dx.take()
    for seats, at in runs:
        part = counts[seats]
        dh_rows, x_rows = _block_backward(
            weights, x, h, g, scale_M[at], part, seats, at, dot=dot_M[at], grads=grads, add=add,
            dh=None if dh is None else dh[at],
        )  # fmt: skip
        if dh is None:
            _first_weight_gradient(dh_rows, x, x_rows, seats, at, part, weights.homes, grads, add)
        del x_rows
        if dx is not None:
            begin, gate_up = dx_from or 0, weights.of(seats)[0]
            to = slice(begin + at.start, begin + at.stop) if dx_index is None else at
            shape = (dh_rows.shape[0], gate_up.shape[2])
            _place(dx, dx_index, to, shape, partial(_input_gradient, dh_rows, gate_up, part), alone)
        del dh_rows
    return dot_M


def _input_gradient(dh: Tensor, gate_up: Tensor, part: Sequence[int], out: Tensor | None) -> Tensor:
    return grouped_mm_input(dh, gate_up, part, out=out)


def first_weight_gradients(
    dh: Tensor, x: Rows, counts: Sequence[int], homes: int, grads: WeightGrads, *, add: bool, foreign: bool
) -> None:
    """The first projection's weight gradients that `experts_backward` left, as it would have computed them.

    Args:
        dh: (M, 2I), filled by it; the others as given to it. homes: seats before the foreign ones.
        foreign: those of foreign seats; else those of home seats.
    """
    for seats, at in blocks(counts, homes, dh.device):
        if (seats.start >= homes) == foreign:
            _first_weight_gradient(dh[at], x, None, seats, at, counts[seats], homes, grads, add)


def _block_backward(
    weights: Weights,
    x: Rows,
    h: Rows | None,
    g: Rows,
    scale: Tensor,
    part: Sequence[int],
    seats: slice,
    at: slice,
    *,
    dot: Tensor,
    grads: WeightGrads,
    add: bool,
    dh: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """One block as far as the gradient at the first projection, and its inputs where they are there; the rest of its
    scratch ends here.

    Args:
        dh: where the gradient shall lie; its inputs are then not packed for weight gradients, which come later.
    """
    gate_up, down = weights.of(seats)
    g_rows, scale, early = _prescaled(g.take("g", at.start, at.stop), scale)
    packs = h is None or (grads.needs(0) and dh is None and _packs_early(x))
    x_rows = x.take("x", at.start, at.stop) if packs else None
    h_rows, h_index = _hidden(gate_up, x_rows, h, at, part)
    there = scratch.place("dphi", (g_rows.shape[0], down.shape[2]), g_rows)
    dphi = scratch.note(grouped_mm_input(g_rows, down, part, out=there))
    if dh is None:
        dh = scratch.take("dh", (dphi.shape[0], h_rows.shape[1]), h_rows)
    dh, phi, found = gated_activation_backward(
        dphi, h_rows, scale, weights.activation, out=dh, index_N=h_index
    )
    dot.copy_(found if early is None else found / early)
    product = partial(_weight_gradient, g_rows, phi, part, add)
    grads.fill(1, seats, weights.homes, product, add=add)
    return dh, x_rows


def _weight_gradient(
    left: Tensor, right: Tensor, part: Sequence[int], add: bool, out: Tensor | None
) -> Tensor:
    return grouped_mm_weight(left, right, part, out=out, add=add)


def _packs_early(x: Rows) -> bool:
    """Whether inputs are packed in any case, so that they may be while what they are packed for is made."""
    return not x.source.is_cuda


def _first_weight_gradient(
    dh: Tensor,
    x: Rows,
    x_rows: Tensor | None,
    seats: slice,
    at: slice,
    part: Sequence[int],
    homes: int,
    grads: WeightGrads,
    add: bool,
) -> None:
    """The first projection's weight gradient, from packed inputs or from where they lie, if a kernel reads them."""
    if not grads.needs(0):
        return
    shape = (dh.shape[1], x.source.shape[1])
    index = None if x_rows is not None or x.index_M is None else x.index_M[at]
    if index is not None and reads_by_index(x.source, dh, part, shape, sums_rows=True):
        rows = x.source
    else:
        rows, index = x.take("x", at.start, at.stop) if x_rows is None else x_rows, None

    def product(out: Tensor | None) -> Tensor:
        return grouped_mm_weight(dh, rows, part, out=out, add=add, index_N=index)

    grads.fill(0, seats, homes, product, add=add)


def _prescaled(g_rows: Tensor, scale_M: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient rows, the scale still to be applied, and the scale already applied (None where there is none).

    In fp16 an unscaled gradient row can overflow in its product with the weights where the scaled one, which a plain
    loop multiplies, cannot. There the scale of large rows goes in first, but for a floor that keeps the division by it
    defined. Small rows cannot overflow, and scaled down would leave fp16 at its other end.
    """
    if g_rows.dtype != torch.float16:
        return g_rows, scale_M, None
    one, tiny = torch.ones_like(scale_M), torch.full_like(scale_M, _FP16_SCALE_FLOOR)
    early = torch.where(scale_M.abs() < _FP16_SCALE_FLOOR, tiny, scale_M)
    largest_M = torch.linalg.vector_norm(g_rows, math.inf, dim=1)
    early = torch.where(largest_M <= _FP16_SMALL, one, early)
    return (g_rows * early.unsqueeze(1)).to(torch.float16), scale_M / early, early


def _hidden(
    gate_up: Tensor, x_rows: Tensor | None, h: Rows | None, at: slice, part: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """First projections of a block; with an index where a compiled pass reads them as they lie."""
    if h is not None:
        if h.index_M is not None and indexes(h.source.device, h.source.dtype):
            return h.source, h.index_M[at]
        return h.take("h", at.start, at.stop), None
    assert x_rows is not None, "recomputing needs the inputs"
    there = scratch.place("h", (x_rows.shape[0], gate_up.shape[1]), x_rows)
    return scratch.note(grouped_mm(x_rows, gate_up, part, out=there)), None
