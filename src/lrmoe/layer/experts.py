"""Forward and backward of the experts seated on this rank, over rows gathered by index.

Rows are taken a few seats at a time, so that what lies between two products stays in cache (and scratch stays small);
a seat's rows are never split, so every weight gradient is one product in a call that runs in one part.

Shape letters: H hidden, I expert width, M rows in (seat, source) order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lrmoe.layer.buffers import Rows, Stash, WeightGrads, Weights, scratch
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
    out: Tensor,
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
    rows, width = sum(counts), weights.gate_up.shape[1]
    h_M2I = scratch.lasting((rows, width), weights.gate_up) if stash is True else None
    some = stash if isinstance(stash, Stash) else None
    norm_M = torch.empty(rows, dtype=torch.float32, device=out.device) if norms else None
    for seats, at in blocks(counts, weights.homes, out.device):
        h = None if h_M2I is None else h_M2I[at]
        norm = None if norm_M is None else norm_M[at]
        _block_forward(weights, x, counts[seats], seats, at, h, some, norm, out, out_index)
    return h_M2I, norm_M


def _block_forward(
    weights: Weights,
    x: Rows,
    part: Sequence[int],
    seats: slice,
    at: slice,
    h: Tensor | None,
    stash: Stash | None,
    norm: Tensor | None,
    out: Tensor,
    out_index: Tensor | None,
) -> None:
    """One block, a function of its own so that its scratch is gone before the next one begins."""
    size, (gate_up, down) = at.stop - at.start, weights.of(seats)
    width = gate_up.shape[1]
    if h is None:
        h = scratch.take("h", (size, width), out)
    if x.index_M is not None and reads_by_index(x.source, gate_up, part, gate_up.shape[1:]):
        grouped_mm(x.source, gate_up, part, out=h, index_N=x.index_M[at])
    else:
        grouped_mm(x.take("x", at.start, at.stop), gate_up, part, out=h)
    if stash is not None:
        stash.add(h, seats, at)
    phi = scratch.take("phi", (size, width // 2), out)
    gated_activation(h, weights.activation, out=phi, norm_N=norm)
    y = out[at] if out_index is None else scratch.take("y", (size, out.shape[1]), out)
    grouped_mm(phi, down, part, out=y)
    if out_index is not None:
        place_rows(out, out_index[at], y)


def experts_backward(
    weights: Weights,
    x: Rows,
    h: Rows | None,
    g: Rows,
    scale_M: Tensor,
    counts: Sequence[int],
    *,
    dx: Tensor | None,
    dx_index: Tensor | None,
    grads: WeightGrads,
    add: bool = False,
    dh: Tensor | None = None,
) -> Tensor:
    """Backward of kept rows only.

    Args:
        x: their inputs (width H); h: their stashed first projection (width 2I), or None to compute it again.
        g: their upstream gradients, unscaled (width H).
        scale_M: (M,) factor of each row's gradient: routing weight times 1/pi.
        counts: kept rows of each seat.
        dx: (M, H) buffer for input gradients, filled as `out` in forward.
        grads: weight gradients, written (exact zeros for seats without rows), or added to with `add`.
        dh: (M, 2I) buffer for gradients at the first projection, from which `first_weight_gradients` computes the
            weights' later; None: they are computed here.

    Returns:
        (M,) <gradient, expert output> of each row before scaling.
    """
    dot_M = scale_M.new_empty(sum(counts))
    for seats, at in blocks(counts, weights.homes, scale_M.device):
        part, found = counts[seats], grads.of(seats, weights.homes)
        dh_rows, x_rows = _block_backward(
            weights, x, h, g, scale_M[at], part, seats, at, dot=dot_M[at], grads=found, add=add,
            dh=None if dh is None else dh[at],
        )  # fmt: skip
        if found[0] is not None and dh is None:
            _first_weight_gradient(dh_rows, x, x_rows, at, part, found[0], add)
        del x_rows
        if dx is not None:
            _input_gradient(dh_rows, weights.of(seats)[0], part, dx, dx_index, at)
        del dh_rows
    return dot_M


def first_weight_gradients(
    dh: Tensor, x: Rows, counts: Sequence[int], homes: int, grads: WeightGrads, *, add: bool, foreign: bool
) -> None:
    """The first projection's weight gradients that `experts_backward` left, as it would have computed them.

    Args:
        dh: (M, 2I), filled by it; the others as given to it. homes: seats before the foreign ones.
        foreign: those of foreign seats; else those of home seats.
    """
    for seats, at in blocks(counts, homes, dh.device):
        out = grads.of(seats, homes)[0]
        if out is not None and (seats.start >= homes) == foreign:
            _first_weight_gradient(dh[at], x, None, at, counts[seats], out, add)


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
    grads: tuple[Tensor | None, Tensor | None],
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
    packs = h is None or (grads[0] is not None and dh is None and _packs_early(x))
    x_rows = x.take("x", at.start, at.stop) if packs else None
    h_rows, h_index = _hidden(gate_up, x_rows, h, at, part)
    dphi = scratch.take("dphi", (g_rows.shape[0], down.shape[2]), g_rows)
    grouped_mm_input(g_rows, down, part, out=dphi)
    if dh is None:
        dh = scratch.take("dh", (dphi.shape[0], h_rows.shape[1]), h_rows)
    dh, phi, found = gated_activation_backward(
        dphi, h_rows, scale, weights.activation, out=dh, index_N=h_index
    )
    dot.copy_(found if early is None else found / early)
    if grads[1] is not None:
        grouped_mm_weight(g_rows, phi, part, out=grads[1], add=add)
    return dh, x_rows


def _packs_early(x: Rows) -> bool:
    """Whether inputs are packed in any case, so that they may be while what they are packed for is made."""
    return not x.source.is_cuda


def _first_weight_gradient(
    dh: Tensor, x: Rows, x_rows: Tensor | None, at: slice, part: Sequence[int], out: Tensor, add: bool
) -> None:
    """The first projection's weight gradient, from packed inputs or from where they lie, if a kernel reads them."""
    shape = out.shape[1:]
    if x_rows is None and x.index_M is not None and reads_by_index(x.source, dh, part, shape, sums_rows=True):
        grouped_mm_weight(dh, x.source, part, out=out, add=add, index_N=x.index_M[at])
        return
    x_rows = x.take("x", at.start, at.stop) if x_rows is None else x_rows
    grouped_mm_weight(dh, x_rows, part, out=out, add=add)


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
    out = scratch.take("h", (x_rows.shape[0], gate_up.shape[1]), x_rows)
    return grouped_mm(x_rows, gate_up, part, out=out), None


def _input_gradient(
    dh: Tensor, gate_up: Tensor, part: Sequence[int], dx: Tensor, dx_index: Tensor | None, at: slice
) -> None:
    rows = dx[at] if dx_index is None else scratch.take("y", (dh.shape[0], dx.shape[1]), dx)
    grouped_mm_input(dh, gate_up, part, out=rows)
    if dx_index is not None:
        place_rows(dx, dx_index[at], rows)
