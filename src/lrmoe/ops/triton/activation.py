"""The gated activation with row norms in one pass, and its backward in one pass. Twins: `lrmoe.ops.activation`.

All arithmetic is fp32, whatever the dtype of the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrmoe.ops.triton.launch import on, tile

_ELEMENTS = 2048  # per program: 16 a thread in 4 warps; backward keeps about seven such tiles in registers


def gated_activation(
    h_N2I: Tensor, kind: str, *, out: Tensor | None = None, norm_N: Tensor | None = None
) -> Tensor:
    """phi = act(gate) * up, and in `norm_N` (fp32, N contiguous) the norm of each row of phi as it is rounded."""
    rows, width = h_N2I.shape[0], h_N2I.shape[1] // 2
    if out is None:
        out = h_N2I.new_empty((rows, width))
    if rows == 0:
        return out
    block, (gate, up) = tile(width, elements=_ELEMENTS), h_N2I.chunk(2, dim=1)
    with on(h_N2I):
        _forward[(block.programs(rows),)](
            gate, up, out, norm_N, rows, width,
            h_N2I.stride(0), h_N2I.stride(1), out.stride(0), out.stride(1),
            KIND=kind, ROWS=block.rows, COLUMNS=block.columns, num_warps=block.warps(h_N2I.dtype),
        )  # fmt: skip
    return out


def gated_activation_backward(
    dphi_NI: Tensor, h_N2I: Tensor, scale_N: Tensor, kind: str, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `lrmoe.ops.gated_activation_backward`; the scaled phi lies in the memory of `dphi_NI`."""
    rows, width = dphi_NI.shape
    dh = torch.empty_like(h_N2I) if out is None else out
    dot_N = torch.empty(rows, dtype=scale_N.dtype, device=scale_N.device)
    if rows == 0:
        return dh, dphi_NI, dot_N
    block, (gate, up), (dgate, dup) = (
        tile(width, elements=_ELEMENTS),
        h_N2I.chunk(2, dim=1),
        dh.chunk(2, dim=1),
    )
    with on(h_N2I):
        _backward[(block.programs(rows),)](
            dphi_NI, gate, up, scale_N.contiguous(), dgate, dup, dot_N, rows, width,
            dphi_NI.stride(0), dphi_NI.stride(1), h_N2I.stride(0), h_N2I.stride(1), dh.stride(0), dh.stride(1),
            KIND=kind, ROWS=block.rows, COLUMNS=block.columns, num_warps=block.warps(h_N2I.dtype),
        )  # fmt: skip
    return dh, dphi_NI, dot_N


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activate(x: tl.tensor, KIND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """act(x) and its derivative; what is not used is not computed.

    The tanh form is a sigmoid: (1 + tanh(u)) / 2 = sigmoid(2u), without the cancellation at negative u.
    """
    if KIND == "silu":
        share = _sigmoid(x)
        slope = share * (1.0 + x * (1.0 - share))
    elif KIND == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        tl.static_assert(KIND == "gelu_tanh", "silu, gelu or gelu_tanh")
        share = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = share + x * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return x * share, slope


@triton.jit(do_not_specialize=["rows"])
def _forward(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    phi_ptr: tl.tensor,
    norm_ptr: tl.tensor | None,
    rows: tl.tensor,
    width: tl.tensor,
    h_row: tl.tensor,
    h_column: tl.tensor,
    phi_row: tl.tensor,
    phi_column: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Whole rows, a tile of columns after the other, so that the norm needs no second pass."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    squares = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS).to(tl.int64)
        mask = here[:, None] & (column < width)[None, :]
        at = row[:, None] * h_row + column[None, :] * h_column
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
        act, _ = _activate(gate, KIND)
        phi = (act * up).to(phi_ptr.dtype.element_ty)
        tl.store(phi_ptr + row[:, None] * phi_row + column[None, :] * phi_column, phi, mask=mask)
        if norm_ptr is not None:
            squares += phi.to(tl.float32) * phi.to(tl.float32)
    if norm_ptr is not None:
        tl.store(norm_ptr + row, tl.sqrt_rn(tl.sum(squares, axis=1)), mask=here)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dphi_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    dgate_ptr: tl.tensor,
    dup_ptr: tl.tensor,
    dot_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    dphi_row: tl.tensor,
    dphi_column: tl.tensor,
    h_row: tl.tensor,
    h_column: tl.tensor,
    dh_row: tl.tensor,
    dh_column: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Whole rows; every entry of dphi is read by the program that then writes phi over it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    scale = tl.load(scale_ptr + row, mask=here, other=0.0).to(tl.float32)[:, None]
    dots = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS).to(tl.int64)
        mask = here[:, None] & (column < width)[None, :]
        phi_at = dphi_ptr + row[:, None] * dphi_row + column[None, :] * dphi_column
        dphi = tl.load(phi_at, mask=mask, other=0.0).to(tl.float32)
        at = row[:, None] * h_row + column[None, :] * h_column
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
        act, slope = _activate(gate, KIND)
        # As forward rounded it: the gradient of the routing weight is that of the output which was there.
        phi = (act * up).to(dphi_ptr.dtype.element_ty).to(tl.float32)
        dots += dphi * phi
        scaled = dphi * scale
        # No thread writes phi before all have read dphi, should loads and stores ever be dealt out differently.
        tl.debug_barrier()
        tl.store(phi_at, (phi * scale).to(dphi_ptr.dtype.element_ty), mask=mask)
        to = row[:, None] * dh_row + column[None, :] * dh_column
        tl.store(dgate_ptr + to, (scaled * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
        tl.store(dup_ptr + to, (scaled * act).to(dup_ptr.dtype.element_ty), mask=mask)
    tl.store(dot_ptr + row, tl.sum(dots, axis=1), mask=here)
