"""The kernels on tensors. Each gives None, and does nothing, where no kernel serves; as `lrmoe.ops.cpu.passes`.

Shape letters: N rows, I expert width, M entries, T tokens, H hidden.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from lrmoe.ops.triton.launch import usable

_KINDS = ("silu", "gelu", "gelu_tanh")
_INDICES = (torch.int64, torch.int32)


def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels take the passes between products of such rows, and so no temporaries are needed."""
    return usable(torch.empty(0, dtype=dtype, device=device)) is None


def indexes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `gate_backward` reads such rows by index: no kernel does."""
    return False


def gate(h_N2I: Tensor, kind: str, phi_NI: Tensor, norm_N: Tensor | None) -> Tensor | None:
    """phi = act(gate) * up into `phi_NI`, and its rows' norms, fp32, into `norm_N`."""
    if kind not in _KINDS or usable(h_N2I, phi_NI) or not _halves(h_N2I, phi_NI):
        return None
    if norm_N is not None and not (_lists(norm_N, phi_NI.shape[0]) and norm_N.is_contiguous()):
        return None
    return _kernels().gated_activation(h_N2I, kind, out=phi_NI, norm_N=norm_N)


def gate_backward(
    dphi_NI: Tensor, h_N2I: Tensor, scale_N: Tensor, kind: str, dh_N2I: Tensor
) -> Tensor | None:
    """Gradients at h into `dh_N2I` and scaled phi into `dphi_NI`; returns the dots, fp32 (N,)."""
    if kind not in _KINDS or usable(dphi_NI, h_N2I, dh_N2I, scale_N):
        return None
    if not (_halves(h_N2I, dphi_NI) and _halves(dh_N2I, dphi_NI) and _lists(scale_N, dphi_NI.shape[0])):
        return None
    return _kernels().gated_activation_backward(dphi_NI, h_N2I, scale_N, kind, out=dh_N2I)[2]


def norms(rows_NI: Tensor) -> Tensor | None:
    """Euclidean norm of each row, fp32 (N,)."""
    if rows_NI.dim() != 2 or usable(rows_NI):
        return None
    return _movers().row_norms(rows_NI)


def sums(rows_NI: Tensor) -> Tensor | None:
    """Sum of absolute values of each row, fp32 (N,)."""
    if rows_NI.dim() != 2 or usable(rows_NI):
        return None
    return _movers().abs_sums(rows_NI)


def combine(rows_NH: Tensor, index_M: Tensor, ends_T: Tensor, weight_M: Tensor | None) -> Tensor | None:
    """Weighted sum of rows per token, in fp32."""
    if rows_NH.dim() != 2 or usable(rows_NH) or not _numbers(rows_NH, index_M, ends_T):
        return None
    if weight_M is not None and (
        usable(weight_M) or weight_M.shape != index_M.shape or weight_M.device != rows_NH.device
    ):
        return None
    return _movers().combine(rows_NH, index_M, ends_T, weight_M)


def move(source: Tensor, index: Tensor, target: Tensor, *, scatter: bool) -> Tensor | None:
    """`target = source[index]`, or with `scatter` `target[index] = source`, whole rows."""
    if usable(source, target) or source.dtype != target.dtype or not source.dim() == target.dim() == 2:
        return None
    listed, named = (source, target) if scatter else (target, source)
    if not _numbers(source, index) or listed.shape != (index.shape[0], named.shape[1]):
        return None
    if scatter:
        return _movers().place_rows(target, index, source)
    return _movers().gather_rows(source, index, out=target)


def _halves(wide_N2I: Tensor, narrow_NI: Tensor) -> bool:
    rows, width = narrow_NI.shape
    same = wide_N2I.dtype == narrow_NI.dtype and wide_N2I.device == narrow_NI.device
    return same and wide_N2I.shape == (rows, 2 * width)


def _lists(value_N: Tensor, rows: int) -> bool:
    return value_N.dtype == torch.float32 and value_N.shape == (rows,)


def _numbers(beside: Tensor, *index: Tensor) -> bool:
    return all(one.dtype in _INDICES and one.dim() == 1 and one.device == beside.device for one in index)


def _kernels() -> ModuleType:
    from lrmoe.ops.triton import activation

    return activation


def _movers() -> ModuleType:
    from lrmoe.ops.triton import rows

    return rows
