"""The walk back: score -> select -> reroute -> pack -> exchange -> experts' backward -> return.

Only kept rows are packed, sent, multiplied and returned. Gradient rows travel unscaled, with routing weight times 1/pi
beside them (4 bytes), so that the expert's rank can also give the routing weight's gradient: <g, y> = <g Wd, phi>.

Shape letters: T tokens, K slots, H hidden, N pairs of this source, M rows received, L local experts, R ranks; P kept
pairs of this source, Q kept rows at this home.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.layer.call import Call, Walked, send_back
from lrmoe.layer.experts import Needs, Rows, Weights, experts_backward, scratch
from lrmoe.layer.pruning import Kept, keep_all, select_pairs
from lrmoe.layer.routing import Layout, token_entries
from lrmoe.ops import combine, gather_rows

_DOT_ROWS = 4096  # rows per block of the full routing-weight gradient


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients:
    """Gradients of one call; None where not asked for. Input in the compute dtype, weights likewise."""

    x_TH: Tensor | None
    alpha_TK: Tensor | None
    gate_up: Tensor | None
    down: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which inputs of the layer need a gradient."""

    x: bool
    alpha: bool
    gate_up: bool
    down: bool


def walk_backward(
    call: Call,
    walked: Walked,
    g_TH: Tensor,
    alpha_TK: Tensor,
    order_N: Tensor,
    weights: Weights,
    wanted: Wanted,
) -> Gradients:
    """Backward of one call from the gradient at its output.

    Args:
        walked: what forward left.
        g_TH: gradient at the output, any strides, compute dtype.
        alpha_TK: routing weights; order_N: flat pair ids in the order of sending.
    """
    clock = call.open_call.clock
    alpha_N = alpha_TK.reshape(-1)[order_N]
    with clock.phase("reroute"):
        layout = Layout.build(call.plan.counts_RE, call.comm.rank, g_TH.device)
    if call.scored:
        kept = select_pairs(call, g_TH, alpha_N, order_N, walked.phi_norm_N, layout)
    else:
        kept = keep_all(order_N, layout)
    alpha_P = alpha_N if kept.source_P is None else alpha_N[kept.source_P]
    scale_P = alpha_P.to(call.scale_dtype())
    scale_P = scale_P if kept.weight_P is None else scale_P * kept.weight_P
    g, scale_Q = _exchange(call, g_TH, kept, scale_P)
    dx_Q = scratch.take("dx", (kept.layout.received, g_TH.shape[1]), g_TH) if wanted.x else None
    with clock.phase("experts_backward"):
        grads = experts_backward(
            weights, _inputs(call, walked, kept, layout), _stash(walked, kept), g, scale_Q, kept.layout.segments_L,
            dx=dx_Q, dx_index=kept.layout.row_M, needs=Needs(x=wanted.x, gate_up=wanted.gate_up, down=wanted.down),
        )  # fmt: skip
    call.open_call.ledger.add("backward", dx_Q)
    call.open_call.ledger.add("grads", grads.gate_up, grads.down)
    call.open_call.record.rows_backward_local = kept.layout.received
    with clock.phase("return"):
        x_TH = _return_input(call, dx_Q, kept, alpha_TK)
        alpha = (
            _return_alpha(call, walked, g_TH, grads.dot_M, kept, alpha_TK, order_N) if wanted.alpha else None
        )
    return Gradients(x_TH=x_TH, alpha_TK=alpha, gate_up=grads.gate_up, down=grads.down)


def _exchange(call: Call, g_TH: Tensor, kept: Kept, scale_P: Tensor) -> tuple[Rows, Tensor]:
    """Kept gradient rows and their scales at the experts' rank, scales in (expert, source) order."""
    token_P = kept.pair_P // max(call.slots, 1)
    if call.comm.size == 1:
        return Rows(source=g_TH, index_M=token_P), scale_P
    clock, layout, open_call = call.open_call.clock, kept.layout, call.open_call
    with clock.phase("pack"):
        send = gather_rows(g_TH, token_P, out=scratch.take("send", (len(token_P), g_TH.shape[1]), g_TH))
    with clock.phase("exchange"):
        rows = call.comm.all_to_all(send, layout.send_R, layout.receive_R)
        scale_Q = call.comm.all_to_all(scale_P, layout.send_R, layout.receive_R)
    for sent in (send, scale_P):
        open_call.sent("exchange", call.comm.sent_bytes(sent, layout.send_R))
    open_call.ledger.add("backward", send, rows)
    return Rows(source=rows, index_M=layout.row_M), layout.to_experts(scale_Q)


def _inputs(call: Call, walked: Walked, kept: Kept, layout: Layout) -> Rows:
    """The kept rows' inputs where they lie: the layer's input on one rank, the received rows on several."""
    if call.comm.size == 1:
        return Rows(source=walked.x, index_M=kept.pair_P // max(call.slots, 1))
    assert layout.row_M is not None, "several ranks have a received order"
    return Rows(source=walked.x, index_M=layout.row_M if kept.home_Q is None else layout.row_M[kept.home_Q])


def _stash(walked: Walked, kept: Kept) -> Rows | None:
    return None if walked.h_M2I is None else Rows(source=walked.h_M2I, index_M=kept.home_Q)


def _return_input(call: Call, dx_Q: Tensor | None, kept: Kept, alpha_TK: Tensor) -> Tensor | None:
    """Input gradient per token: the sum over its kept pairs, in slot order."""
    if dx_Q is None:
        return None
    rows = send_back(call, dx_Q, kept.layout, "return")
    call.open_call.ledger.add("backward", rows)
    entries = token_entries(kept.pair_P, alpha_TK.shape[0], call.slots)
    return combine(rows, entries.row_N, entries.ends_T)


def _return_alpha(
    call: Call, walked: Walked, g_TH: Tensor, dot_Q: Tensor, kept: Kept, alpha_TK: Tensor, order_N: Tensor
) -> Tensor:
    """Gradient of the routing weights: re-weighted of kept pairs, or of every pair from the kept outputs."""
    grad = torch.zeros(alpha_TK.numel(), dtype=dot_Q.dtype, device=g_TH.device)
    if walked.y_NH is not None:
        grad[order_N] = _full_dot(g_TH, walked.y_NH, order_N // max(call.slots, 1), dot_Q.dtype)
    else:
        dot_P = send_back(call, kept.layout.to_received(dot_Q), kept.layout, "return")
        grad[kept.pair_P] = dot_P if kept.weight_P is None else dot_P * kept.weight_P
    return grad.view(alpha_TK.shape)


def _full_dot(g_TH: Tensor, y_NH: Tensor, token_N: Tensor, dtype: torch.dtype) -> Tensor:
    """<g_t, y_u> of every pair, a block of rows at a time."""
    out = torch.empty(token_N.shape[0], dtype=dtype, device=g_TH.device)
    for begin in range(0, token_N.shape[0], _DOT_ROWS):
        at = slice(begin, begin + _DOT_ROWS)
        out[at] = torch.linalg.vecdot(g_TH[token_N[at]].to(dtype), y_NH[at].to(dtype))
    return out
