"""Gated activation phi = act(gate) * up, with the row norms that scores need, and its backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lrmoe.ops import fused
from lrmoe.ops.rows import row_norms

_Forward = Callable[[Tensor], Tensor]
_Backward = Callable[[Tensor, Tensor], Tensor]

_aten = torch.ops.aten

ACTIVATIONS: dict[str, tuple[_Forward, _Backward]] = {
    "silu": (F.silu, lambda grad, x: _aten.silu_backward(grad, x)),
    "gelu": (F.gelu, lambda grad, x: _aten.gelu_backward(grad, x, approximate="none")),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    ),
}


def gated_activation(
    h_N2I: Tensor, kind: str, *, out: Tensor | None = None, norm_N: Tensor | None = None
) -> Tensor:
    """phi = act(gate) * up.

    Args:
        h_N2I: (N, 2I), gate in the first I columns, up in the last.
        kind: "silu", "gelu" or "gelu_tanh".
        out: optional (N, I) destination.
        norm_N: optional fp32 (N,) destination of the Euclidean norms of phi's rows.

    Returns:
        phi, (N, I) in the dtype of `h_N2I`.
    """
    phi = h_N2I.new_empty((h_N2I.shape[0], h_N2I.shape[1] // 2)) if out is None else out
    if fused.gate(h_N2I, kind, phi, norm_N) is not None:
        return phi
    gate, up = h_N2I.chunk(2, dim=1)
    forward, _ = ACTIVATIONS[kind]
    phi = torch.mul(forward(gate), up, out=out)
    if norm_N is not None:
        norm_N.copy_(row_norms(phi))
    return phi


def gated_activation_backward(
    dphi_NI: Tensor,
    h_N2I: Tensor,
    scale_N: Tensor,
    kind: str,
    *,
    out: Tensor | None = None,
    index_N: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of the gated activation for rows whose upstream gradient is still to be scaled.

    Args:
        dphi_NI: (N, I), gradient at phi of the *unscaled* row; overwritten, by scaled phi where that saves a buffer.
        h_N2I: (N, 2I), the forward input.
        scale_N: (N,) fp32 (fp64 for fp64 rows), factor of each row's gradient (routing weight times 1/pi).
        kind: as in forward.
        out: optional (N, 2I) destination of the gradient at h.
        index_N: int64 (N,) or None; with it row n reads `h[index[n]]`, and h may have any number of rows. Without a
            compiled pass they are gathered first.

    Returns:
        dh (N, 2I) = scale * gradient at h; phi scaled by `scale` (N, I), the right factor of the down projection's
        weight gradient; dot_N = <dphi, phi> before scaling, in the dtype of `scale_N`: the gradient of the routing
        weight.
    """
    dh = h_N2I.new_empty((dphi_NI.shape[0], h_N2I.shape[1])) if out is None else out
    if index_N is not None and not fused.indexes(h_N2I.device, h_N2I.dtype):
        h_N2I, index_N = h_N2I.index_select(0, index_N), None
    dot_N = fused.gate_backward(dphi_NI, h_N2I, scale_N, kind, dh, index_N)
    if dot_N is not None:
        return dh, dphi_NI, dot_N
    if index_N is not None:
        h_N2I = h_N2I.index_select(0, index_N)
    return _plain_backward(dphi_NI, h_N2I, scale_N, kind, dh)


def _plain_backward(
    dphi_NI: Tensor, h_N2I: Tensor, scale_N: Tensor, kind: str, dh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = h_N2I.chunk(2, dim=1)
    forward, backward = ACTIVATIONS[kind]
    act = forward(gate)
    phi = act * up
    dot_N = torch.linalg.vecdot(dphi_NI.to(scale_N.dtype), phi.to(scale_N.dtype))
    scale_N1 = scale_N.to(phi.dtype).unsqueeze(1)
    dphi_NI.mul_(scale_N1)
    phi.mul_(scale_N1)
    dgate, dup = dh.chunk(2, dim=1)
    torch.mul(dphi_NI, act, out=dup)
    dgate.copy_(backward(dphi_NI.mul_(up), gate))
    return dh, phi, dot_N
