"""The compiled passes on tensors. Each gives None, and does nothing, where the library cannot serve.

Threads are those that torch computes with. A row's result depends on nothing but the row.

Shape letters: N rows, I expert width, M entries, T tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.ops.cpu.library import FORMATS, fuses, library, plain, serves
from lrmoe.ops.pages import empty

_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def indexes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `gate_backward` reads such rows by index."""
    return fuses(device, dtype)


def gate(h_N2I: Tensor, kind: str, phi_NI: Tensor, norm_N: Tensor | None) -> Tensor | None:
    """phi = act(gate) * up into `phi_NI`, and its rows' norms, fp32, into `norm_N`."""
    found = library()
    if found is None or kind not in _KINDS or not serves(h_N2I, phi_NI) or not _halves(h_N2I, phi_NI):
        return None
    if norm_N is not None and not _lies(norm_N, phi_NI.shape[0]):
        return None
    found.lrmoe_gate(
        _KINDS[kind],
        FORMATS[h_N2I.dtype],
        *_rows(h_N2I),
        *_rows(phi_NI),
        None if norm_N is None else norm_N.data_ptr(),
        *phi_NI.shape,
        torch.get_num_threads(),
    )
    return phi_NI


def gate_backward(
    dphi_NI: Tensor,
    h_N2I: Tensor,
    scale_N: Tensor,
    kind: str,
    dh_N2I: Tensor,
    index_N: Tensor | None = None,
) -> Tensor | None:
    """Gradients at h into `dh_N2I` and scaled phi into `dphi_NI`; returns the dots, fp32 (N,).

    With an index row n reads `h[index[n]]`, and h has any number of rows.
    """
    found = library()
    if found is None or kind not in _KINDS or not serves(dphi_NI, h_N2I, dh_N2I):
        return None
    if not (_halves(dh_N2I, dphi_NI) and _lies(scale_N, dphi_NI.shape[0])):
        return None
    if index_N is None:
        fits = _halves(h_N2I, dphi_NI)
    else:
        fits = _listed(index_N) and index_N.shape == scale_N.shape and h_N2I.shape[1] == dh_N2I.shape[1]
    if not fits:
        return None
    dot_N = torch.empty_like(scale_N)
    failed = found.lrmoe_gate_backward(
        _KINDS[kind],
        FORMATS[h_N2I.dtype],
        *_rows(dphi_NI),
        *_rows(h_N2I),
        h_N2I.shape[0],
        None if index_N is None else index_N.data_ptr(),
        scale_N.data_ptr(),
        *_rows(dh_N2I),
        dot_N.data_ptr(),
        *dphi_NI.shape,
        torch.get_num_threads(),
    )
    if failed:
        raise IndexError(f"gated_activation_backward: an index is out of range; valid: [0, {h_N2I.shape[0]})")
    return dot_N


def norms(rows_NI: Tensor) -> Tensor | None:
    """Euclidean norm of each row, fp32 (N,)."""
    found = library()
    if found is None or rows_NI.dim() != 2 or not serves(rows_NI):
        return None
    norm_N = torch.empty(rows_NI.shape[0], dtype=torch.float32)
    format_ = FORMATS[rows_NI.dtype]
    found.lrmoe_norms(format_, *_rows(rows_NI), norm_N.data_ptr(), *rows_NI.shape, torch.get_num_threads())
    return norm_N


def combine(rows_NH: Tensor, index_M: Tensor, ends_T: Tensor, weight_M: Tensor | None) -> Tensor | None:
    """Weighted sum of rows per token; weights of fp32 or of the dtype of the rows."""
    found = library()
    if found is None or rows_NH.dim() != 2 or not serves(rows_NH) or not _listed(index_M, ends_T):
        return None
    if weight_M is not None:
        if weight_M.dtype not in FORMATS or weight_M.shape != index_M.shape or not plain(weight_M):
            return None
        weight_M = weight_M.to(torch.float32).contiguous()
    out = empty((ends_T.shape[0], rows_NH.shape[1]), rows_NH)
    failed = found.lrmoe_combine(
        FORMATS[rows_NH.dtype],
        *_rows(rows_NH),
        rows_NH.shape[0],
        index_M.data_ptr(),
        index_M.shape[0],
        ends_T.data_ptr(),
        None if weight_M is None else weight_M.data_ptr(),
        *_rows(out),
        *out.shape,
        torch.get_num_threads(),
    )
    if failed:
        raise IndexError(
            f"combine: an index or end is out of range; valid: indices in [0, {rows_NH.shape[0]}), ends in "
            f"[0, {index_M.shape[0]}]"
        )
    return out


def _rows(rows: Tensor) -> tuple[int, int]:
    """Address, and distance of rows in bytes."""
    return rows.data_ptr(), rows.stride(0) * rows.element_size()


def _halves(wide_N2I: Tensor, narrow_NI: Tensor) -> bool:
    rows, width = narrow_NI.shape
    return wide_N2I.shape == (rows, 2 * width)


def _lies(value_N: Tensor, rows: int) -> bool:
    """Whether these are fp32 values of so many rows, side by side."""
    return (
        value_N.dtype == torch.float32
        and value_N.shape == (rows,)
        and value_N.is_contiguous()
        and plain(value_N)
    )


def _listed(*index: Tensor) -> bool:
    return all(one.dtype == torch.int64 and one.is_contiguous() and plain(one) for one in index)
