"""The gradient-free walk forward: pack -> dispatch -> experts -> combine. Every pair is computed.

Shape letters: T tokens, K slots, H hidden, N pairs of this source, M rows received, R ranks, Q seats of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lrmoe.distributed.probe import current
from lrmoe.layer.buffers import Rows, Sink, scratch
from lrmoe.layer.call import Call, KeptSet
from lrmoe.layer.choice import choose_seats, in_order
from lrmoe.layer.early import Stays, fix_kept, keep_inputs
from lrmoe.layer.experts import experts_forward
from lrmoe.layer.routing import Layout, tokens_of
from lrmoe.layer.seat_weights import Weights
from lrmoe.layer.wire import return_rows, send_back, send_columns, send_rows, sum_by_token
from lrmoe.ops import gather_rows, upload
from lrmoe.planning.cells import part_of_cells, ranges
from lrmoe.planning.problem import IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Walked:
    """What forward leaves: the output, and what backward needs.

    Attributes:
        out_TH: the layer's output in the compute dtype.
        place_N: int64 (N,) positions, among the pairs sorted by expert, in the order of sending; None: the same order.
        x: the rows the experts read: the input itself on one rank, the received rows on several; None if not kept.
        index_M: int64 (M,), row of `x` of each pair in (seat, source) order on a lean wire, else None.
        h_M2I: stash, or None; phi_norm_N: fp32 norms in expert order at the token's rank, or None.
        y_NH: expert outputs in the order of sending, or None.
        weight_N, kept_RQ: the kept set where forward fixes it (see KeptSet). Of x, index_M and h_M2I then only what
            stays at its seat is left, in (seat, source) order.
    """

    out_TH: Tensor
    place_N: Tensor | None
    x: Tensor | None
    index_M: Tensor | None
    h_M2I: Tensor | None
    phi_norm_N: Tensor | None
    y_NH: Tensor | None
    weight_N: Tensor | None
    kept_RQ: IntArray | None


@dataclass(kw_only=True, eq=False)
class _Part:
    """What one part of the forward gives; `norm_N` and `y_NH` in the order of sending."""

    out_TH: Tensor
    rows: Rows
    h_M2I: Tensor | None
    norm_N: Tensor | None
    y_NH: Tensor


def walk_forward(
    call: Call, x_TH: Tensor, alpha_TK: Tensor, order_N: Tensor, gate_up: Tensor, down: Tensor
) -> Walked:
    """Forward of one call.

    Args:
        x_TH: compute dtype. order_N: int64 (N,), flat pair ids sorted by expert.
    """
    weights = call.storage.borrow(call, gate_up, down)
    with call.open_call.clock.phase("pack"):
        place_N = _sending_order(call, order_N, x_TH.shape[0])
        pair_N = order_N if place_N is None else order_N.index_select(0, place_N)
    kept = None
    if call.selects_early and not call.config.needs_phi:
        kept = fix_kept(call, alpha_TK, order_N, place_N, None)
    if call.plan.forward_chunks > 1:
        walked = _in_parts(call, x_TH, alpha_TK, pair_N, place_N, weights)
        if kept is None and call.selects_early:
            kept = fix_kept(call, alpha_TK, order_N, place_N, walked.phi_norm_N)
        return walked if kept is None else _with_kept(walked, kept)
    with call.open_call.clock.phase("plan"):
        layout = Layout.build(call.seats.assign_RQ, call.seats.starts_R, call.comm.rank, x_TH.device)
    stays = Stays.of(call, kept, place_N) if kept is not None and call.keeps_rows else None
    part = _forward_part(call, x_TH, alpha_TK, pair_N, layout, weights, stays)
    if part.norm_N is not None and place_N is not None:
        part.norm_N = torch.empty_like(part.norm_N).index_copy_(0, place_N, part.norm_N)
    if kept is None and call.selects_early:
        kept = fix_kept(call, alpha_TK, order_N, place_N, part.norm_N)
        if call.keeps_rows:
            _let_go(call, part, layout, Stays.of(call, kept, place_N))
    return _walked(call, part, place_N, kept)


def _sending_order(call: Call, order_N: Tensor, tokens: int) -> Tensor | None:
    """Positions in the order (seat, token) of pairs sorted by (expert, token); None where both are the same."""
    if not call.seats.spread:
        return None
    if call.lean:
        token_N = tokens_of(order_N, call.slots)
        seat_N = choose_seats(token_N, tokens, call.seats, call.comm.rank)
    else:
        seat_N = in_order(call.seats, call.comm.rank, order_N.device)
    return torch.sort(seat_N, stable=True).indices


def _let_go(call: Call, part: _Part, layout: Layout, stays: Stays) -> None:
    """Of a finished forward only what stays: the choice came after the first projections."""
    clock, ledger = call.open_call.clock, call.open_call.ledger
    with clock.phase("select"):
        flag_M = send_columns(call, layout, [stays.flag_N], "select")[0]
        index_P = stays.at_seats(call, flag_M).index_P
    assert part.h_M2I is not None, "rows that stay have a first projection"
    ledger.follow(part.h_M2I)
    with clock.phase("pack"):  # one after the other: what is complete goes before more is copied
        part.rows = keep_inputs(call, part.rows, call.lean, index_P)
        part.h_M2I = gather_rows(part.h_M2I, index_P)


def _walked(call: Call, part: _Part, place_N: Tensor | None, kept: KeptSet | None) -> Walked:
    """Keep of a forward in one part what backward will read."""
    rows, keeps = part.rows, call.keeps_rows
    call.open_call.ledger.add("stash", part.h_M2I, part.norm_N if kept is None else kept.weight_N)
    return Walked(
        out_TH=part.out_TH,
        place_N=place_N,
        x=rows.source if keeps or call.comm.size == 1 else None,
        index_M=rows.index_M if keeps and call.lean else None,
        h_M2I=part.h_M2I,
        phi_norm_N=part.norm_N if kept is None else None,
        y_NH=part.y_NH if call.keeps_outputs else None,
        weight_N=None if kept is None else kept.weight_N,
        kept_RQ=None if kept is None else kept.kept_RQ,
    )


def _with_kept(walked: Walked, kept: KeptSet) -> Walked:
    """A forward that keeps no rows needs the norms for the choice only."""
    return replace(walked, phi_norm_N=None, weight_N=kept.weight_N, kept_RQ=kept.kept_RQ)


def _forward_part(
    call: Call,
    x_TH: Tensor,
    alpha_TK: Tensor,
    pair_N: Tensor,
    layout: Layout,
    weights: Weights,
    stays: Stays | None = None,
) -> _Part:
    """Some pairs from their tokens to their experts and back; a token without any of them gets zeros.

    Args:
        stays: the rows that backward will read, where they are known; all of them by default.
    """
    clock, ledger = call.open_call.clock, call.open_call.ledger
    alpha = alpha_TK.reshape(-1)
    beside = [alpha.index_select(0, pair_N).to(call.scale_dtype())] if call.lean else []
    token_N = tokens_of(pair_N, call.slots)
    arrival = send_rows(
        call,
        layout,
        x_TH,
        token_N,
        [] if stays is None else [stays.flag_N],
        lean_columns=beside,
        pack="pack",
        travel="dispatch",
        part="dispatched",
    )
    weights.start()
    ledger.add("weights", weights.gate_up, weights.down)
    with clock.phase("select"):
        some = None if stays is None else stays.at_seats(call, arrival.columns[0])
    with clock.phase("experts"):
        y = Sink(lambda: _output_buffer(call, layout.received, x_TH))
        h_M2I, norm_M = experts_forward(
            weights, arrival.rows, layout.segments_S, out=y, out_index=arrival.out_index,
            stash=call.keeps_rows if some is None else some, norms=call.scored and call.config.needs_phi,
        )  # fmt: skip
        y_MH = y.whole
        current().experts("output", y_MH, arrival.out_index, call.seated, layout.segments_S)
    gate_up, down = weights.foreign()
    current().weights(
        call.seated[weights.homes :], {"copy of gate_up_proj": gate_up, "copy of down_proj": down}
    )
    rows = None
    if some is not None:
        with clock.phase("pack"):
            rows, h_M2I = keep_inputs(call, arrival.rows, call.lean, some.index_P), some.h_P2I
    if call.comm.size > 1 and (some is not None or not call.keeps_rows):
        arrival = arrival.emptied()
    with clock.phase("combine"):
        y_NH = return_rows(call, arrival, y_MH, arrival.columns[-1] if call.lean else None, "combine")
        ledger.add("outputs", y_MH, y_NH)
        del y, y_MH
        norm_N = None if norm_M is None else send_back(call, layout.to_received(norm_M), layout, "combine")
        out_TH = sum_by_token(arrival, y_NH, pair_N, alpha_TK.shape, alpha)
    rows = arrival.rows if rows is None else rows
    return _Part(out_TH=out_TH, rows=rows, h_M2I=h_M2I, norm_N=norm_N, y_NH=y_NH)


def _in_parts(
    call: Call, x_TH: Tensor, alpha_TK: Tensor, pair_N: Tensor, place_N: Tensor | None, weights: Weights
) -> Walked:
    """Forward a part of every rank's rows at a time: only one part's buffers are alive, and nothing stays."""
    seats, rank, parts = call.seats, call.comm.rank, call.plan.forward_chunks
    out_TH = torch.zeros_like(x_TH, dtype=call.scale_dtype())
    needs_norm, kept_y = call.scored and call.config.needs_phi, None
    norm_N = torch.empty(pair_N.shape[0], dtype=torch.float32, device=x_TH.device) if needs_norm else None
    if call.keeps_outputs:
        kept_y = x_TH.new_empty((pair_N.shape[0], x_TH.shape[1]))
    begin_Q = np.cumsum(seats.assign_RQ[rank]) - seats.assign_RQ[rank]
    for number in range(parts):
        cells_RQ = part_of_cells(seats.assign_RQ, seats.starts_R, number, parts)
        at = upload(ranges(begin_Q, cells_RQ[rank]), x_TH.device)
        begin_Q = begin_Q + cells_RQ[rank]
        layout = Layout.build(cells_RQ, seats.starts_R, rank, x_TH.device)
        part = _forward_part(call, x_TH, alpha_TK, pair_N[at], layout, weights)
        out_TH.add_(part.out_TH)
        if norm_N is not None and part.norm_N is not None:
            norm_N[at if place_N is None else place_N[at]] = part.norm_N
        if kept_y is not None:
            kept_y[at] = part.y_NH
        del part
    return Walked(
        out_TH=out_TH.to(call.compute_dtype),
        place_N=place_N,
        x=x_TH if call.comm.size == 1 else None,
        index_M=None,
        h_M2I=None,
        phi_norm_N=norm_N,
        y_NH=kept_y,
        weight_N=None,
        kept_RQ=None,
    )


def _output_buffer(call: Call, rows: int, like: Tensor) -> Tensor:
    """Expert outputs are scratch unless backward needs them and they do not travel."""
    shape = (rows, like.shape[1])
    if call.keeps_outputs and call.comm.size == 1:
        return like.new_empty(shape)
    return scratch.take("outputs", shape, like)
