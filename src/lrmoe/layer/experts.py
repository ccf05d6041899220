"""Forward and backward of the experts homed on this rank, over rows gathered by index.

Rows are taken a few experts at a time, so that what lies between two products stays in cache (and scratch stays
small); an expert's rows are never split, so every weight gradient is one product.

Shape letters: L local experts, H hidden, I expert width, M rows in (expert, source) order, S rows of a source buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.ops import (
    Workspace,
    gated_activation,
    gated_activation_backward,
    gather_rows,
    grouped_mm,
    grouped_mm_input,
    grouped_mm_weight,
    place_rows,
    row_norms,
)

_BLOCK_ROWS = 1024  # rows per block on CPU: intermediates of common widths stay in the last-level cache
_FP16_SCALE_FLOOR = 2.0**-10

scratch = Workspace()


def release_scratch() -> None:
    """Give this thread's scratch buffers back; the next call takes new ones."""
    scratch.release()


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Weights of the local experts in the compute dtype.

    Attributes:
        gate_up: (L, 2I, H), gate first; down: (L, H, I); activation: a name of ops.ACTIVATIONS.
    """

    gate_up: Tensor
    down: Tensor
    activation: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows of a buffer taken by index, without a copy until they are needed.

    Attributes:
        source: (S, width); index_M: int64 (M,) or None where the rows already lie in order.
    """

    source: Tensor
    index_M: Tensor | None

    def take(self, name: str, begin: int, end: int) -> Tensor:
        """Rows begin..end as one contiguous buffer (scratch under `name` where they must be gathered)."""
        if self.index_M is None:
            return self.source[begin:end]
        out = scratch.take(name, (end - begin, self.source.shape[1]), self.source)
        return gather_rows(self.source, self.index_M[begin:end], out=out)


def blocks(counts: Sequence[int], device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cut experts into runs of at least _BLOCK_ROWS rows (all at once on CUDA): (experts, rows) of each run."""
    limit = _BLOCK_ROWS if device.type == "cpu" else sum(counts) + 1
    first = begin = end = 0
    for expert, count in enumerate(counts):
        end += count
        if end - begin >= limit or expert == len(counts) - 1:
            yield slice(first, expert + 1), slice(begin, end)
            first, begin = expert + 1, end


def experts_forward(
    weights: Weights,
    x: Rows,
    counts: Sequence[int],
    *,
    out: Tensor,
    out_index: Tensor | None,
    stash: bool,
    norms: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Run every row through its expert.

    Args:
        x: input rows, (expert, source) order, width H.
        counts: rows of each local expert.
        out: (M, H), filled: row i goes to `out[out_index[i]]`, or `out[i]` without an index.
        stash: keep the first projection's output for backward.
        norms: keep the norm of each row of the second projection's input.

    Returns:
        h (M, 2I) or None; norms fp32 (M,) or None.
    """
    rows, width = sum(counts), weights.gate_up.shape[1]
    h_M2I = weights.gate_up.new_empty((rows, width)) if stash else None
    norm_M = torch.empty(rows, dtype=torch.float32, device=out.device) if norms else None
    for experts, at in blocks(counts, out.device):
        size, part = at.stop - at.start, counts[experts]
        h = scratch.take("h", (size, width), out) if h_M2I is None else h_M2I[at]
        grouped_mm(x.take("x", at.start, at.stop), weights.gate_up[experts], part, out=h)
        phi = gated_activation(h, weights.activation, out=scratch.take("phi", (size, width // 2), out))
        if norm_M is not None:
            norm_M[at] = row_norms(phi)
        y = out[at] if out_index is None else scratch.take("y", (size, out.shape[1]), out)
        grouped_mm(phi, weights.down[experts], part, out=y)
        if out_index is not None:
            place_rows(out, out_index[at], y)
    return h_M2I, norm_M


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertGrads:
    """Gradients of the local experts' rows and weights; None where not asked for.

    Attributes:
        dx: (M, H), placed as asked; dot_M: (M,) <gradient, expert output> of each row before scaling;
        gate_up, down: in the compute dtype, exact zeros for experts without rows.
    """

    dx: Tensor | None
    dot_M: Tensor
    gate_up: Tensor | None
    down: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Which gradients backward must make."""

    x: bool
    gate_up: bool
    down: bool


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
    needs: Needs,
) -> ExpertGrads:
    """Backward of kept rows only.

    Args:
        x: their inputs (width H); h: their stashed first projection (width 2I), or None to compute it again.
        g: their upstream gradients, unscaled (width H).
        scale_M: (M,) factor of each row's gradient: routing weight times 1/pi.
        counts: kept rows of each local expert.
        dx: (M, H) buffer for input gradients, filled as `out` in forward.
    """
    rows = sum(counts)
    dot_M = scale_M.new_empty(rows)
    d_gate_up = torch.empty_like(weights.gate_up) if needs.gate_up else None
    d_down = torch.empty_like(weights.down) if needs.down else None
    for experts, at in blocks(counts, scale_M.device):
        part = counts[experts]
        g_rows, scale, early = _prescaled(g.take("g", at.start, at.stop), scale_M[at])
        x_rows = x.take("x", at.start, at.stop) if needs.gate_up or h is None else None
        h_rows = _hidden(weights, x_rows, h, experts, at, part)
        dphi = scratch.take("dphi", (g_rows.shape[0], weights.down.shape[2]), g_rows)
        grouped_mm_input(g_rows, weights.down[experts], part, out=dphi)
        dh, phi, dot = gated_activation_backward(
            dphi, h_rows, scale, weights.activation, out=scratch.take("dh", tuple(h_rows.shape), h_rows)
        )
        dot_M[at] = dot if early is None else dot / early
        if d_down is not None:
            grouped_mm_weight(g_rows, phi, part, out=d_down[experts])
        if d_gate_up is not None and x_rows is not None:
            grouped_mm_weight(dh, x_rows, part, out=d_gate_up[experts])
        if dx is not None:
            _input_gradient(dh, weights.gate_up[experts], part, dx, dx_index, at)
    return ExpertGrads(dx=dx, dot_M=dot_M, gate_up=d_gate_up, down=d_down)


def _prescaled(g_rows: Tensor, scale_M: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient rows, the scale still to be applied, and the scale already applied (None where there is none).

    In fp16 an unscaled gradient row can overflow in its product with the weights where the scaled one, which a plain
    loop multiplies, cannot. There the scale goes in first, but for a floor that keeps the division by it defined.
    """
    if g_rows.dtype != torch.float16:
        return g_rows, scale_M, None
    tiny = torch.full_like(scale_M, _FP16_SCALE_FLOOR)
    early = torch.where(scale_M.abs() < _FP16_SCALE_FLOOR, tiny, scale_M)
    return (g_rows * early.unsqueeze(1)).to(torch.float16), scale_M / early, early


def _hidden(
    weights: Weights, x_rows: Tensor | None, h: Rows | None, experts: slice, at: slice, part: Sequence[int]
) -> Tensor:
    if h is not None:
        return h.take("h", at.start, at.stop)
    assert x_rows is not None, "recomputing needs the inputs"
    out = scratch.take("h", (x_rows.shape[0], weights.gate_up.shape[1]), x_rows)
    return grouped_mm(x_rows, weights.gate_up[experts], part, out=out)


def _input_gradient(
    dh: Tensor, gate_up: Tensor, part: Sequence[int], dx: Tensor, dx_index: Tensor | None, at: slice
) -> None:
    rows = dx[at] if dx_index is None else scratch.take("y", (dh.shape[0], dx.shape[1]), dx)
    grouped_mm_input(dh, gate_up, part, out=rows)
    if dx_index is not None:
        place_rows(dx, dx_index[at], rows)
