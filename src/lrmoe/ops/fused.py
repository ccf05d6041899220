"""Passes between matrix products in one sweep over memory: compiled C for CPU tensors, Triton kernels for CUDA ones.

Each gives None, and does nothing, where neither serves; the caller then computes with torch's operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.ops import cpu
from lrmoe.ops.triton import passes as cuda


def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether passes between products of such rows are fused, and so need no temporaries."""
    return (cuda if device.type == "cuda" else cpu).fuses(device, dtype)


def indexes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `gate_backward` reads such rows by index."""
    return (cuda if device.type == "cuda" else cpu).indexes(device, dtype)


def gate(h_N2I: Tensor, kind: str, phi_NI: Tensor, norm_N: Tensor | None) -> Tensor | None:
    """phi = act(gate) * up into `phi_NI`, and its rows' norms, fp32, into `norm_N`."""
    return (cuda if h_N2I.is_cuda else cpu).gate(h_N2I, kind, phi_NI, norm_N)


def gate_backward(
    dphi_NI: Tensor, h_N2I: Tensor, scale_N: Tensor, kind: str, dh_N2I: Tensor, index_N: Tensor | None
) -> Tensor | None:
    """Gradients at h into `dh_N2I` and scaled phi into `dphi_NI`; returns the dots, fp32 (N,).

    An index, where row n reads `h[index[n]]`, only where `indexes`.
    """
    given = () if index_N is None else (index_N,)
    return (cuda if h_N2I.is_cuda else cpu).gate_backward(dphi_NI, h_N2I, scale_N, kind, dh_N2I, *given)


def norms(rows_NI: Tensor) -> Tensor | None:
    """Euclidean norm of each row, fp32 (N,)."""
    return (cuda if rows_NI.is_cuda else cpu).norms(rows_NI)


def sums(rows_NI: Tensor) -> Tensor | None:
    """Sum of absolute values of each row, fp32 (N,); torch takes one pass on a CPU, too."""
    return cuda.sums(rows_NI)


def combine(rows_NH: Tensor, index_M: Tensor, ends_T: Tensor, weight_M: Tensor | None) -> Tensor | None:
    """Weighted sum of rows per token, in fp32."""
    return (cuda if rows_NH.is_cuda else cpu).combine(rows_NH, index_M, ends_T, weight_M)


def move(source: Tensor, index: Tensor, target: Tensor, *, scatter: bool) -> Tensor | None:
    """`target = source[index]`, or with `scatter` `target[index] = source`, whole rows; torch is as fast on a CPU."""
    return cuda.move(source, index, target, scatter=scatter)
