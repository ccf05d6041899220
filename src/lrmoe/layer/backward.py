"""The walk back: score -> select -> reroute -> pack -> exchange -> experts' backward -> return.

Only kept rows are packed, sent, multiplied and returned. Gradient rows travel unscaled, with routing weight times 1/pi
beside them (4 bytes), so that the expert's rank can also give the routing weight's gradient: <g, y> = <g Wd, phi>.

Shape letters: T tokens, K slots, H hidden, N pairs of this source, R ranks, S seats of this rank; P kept pairs of this
source and Q kept pairs at this rank's seats, of the whole call or of one part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lrmoe.distributed.comm import Arriving
from lrmoe.distributed.probe import current
from lrmoe.layer.back import Back, Later, Wanted
from lrmoe.layer.buffers import Rows, Sink, scratch
from lrmoe.layer.call import Call
from lrmoe.layer.experts import experts_backward, first_weight_gradients
from lrmoe.layer.forward import Walked
from lrmoe.layer.kept_rows import carried_inputs, inputs_that_stayed
from lrmoe.layer.pruning import select_pairs
from lrmoe.layer.reroute import Route, reroute
from lrmoe.layer.routing import Layout, tokens_of
from lrmoe.layer.seat_weights import Needs, WeightGrads, Weights
from lrmoe.layer.wire import Arrival, send_rows, start_back, start_return, sum_by_token
from lrmoe.planning.problem import IntArray

_DOT_ROWS = 4096  # rows per block of the full routing-weight gradient


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients:
    """Gradients of one call; None where not asked for. Input in the compute dtype."""

    x_TH: Tensor | None
    alpha_TK: Tensor | None
    gate_up: Tensor | None
    down: Tensor | None


def walk_backward(
    call: Call,
    walked: Walked,
    g_TH: Tensor,
    x_TH: Tensor | None,
    alpha_TK: Tensor,
    order_N: Tensor,
    gate_up: Tensor,
    down: Tensor,
    wanted: Wanted,
) -> Gradients:
    """Backward of one call from the gradient at its output.

    Args:
        walked: what forward left.
        g_TH: gradient at the output, any strides, compute dtype. x_TH: the layer's input, where it may travel again.
        alpha_TK: routing weights; order_N: flat pair ids by expert.
    """
    clock, weights = call.open_call.clock, call.storage.borrow(call, gate_up, down)
    alpha_N = alpha_TK.reshape(-1).index_select(0, order_N)
    weight_N = walked.weight_N
    if call.scored and not call.selects_early:
        weight_N = select_pairs(call, g_TH, alpha_N, order_N, walked.phi_norm_N)
    with clock.phase("reroute"):
        route = reroute(call, walked.place_N, weight_N, g_TH.device, walked.kept_RQ)
        call.plan = call.budget.refit(call.plan, route.kept_RQ)
        overlaps = _overlaps(call, route, wanted)
        if call.budget.binds:
            call.open_call.record.peak_predicted = call.budget.peak(call.plan, call.comm.rank)
            call.open_call.record.chunks = max(call.plan.forward_chunks, call.plan.backward_chunks)
    scale_N = alpha_N.to(call.scale_dtype())
    parts = call.plan.backward_chunks
    add = parts > 1 or (route.carried and not route.all_carried)
    back = Back(
        call=call,
        walked=walked,
        route=route,
        weights=weights,
        grads=_gradient_buffers(call, weights, wanted, add),
        add=add,
        x_TH=x_TH,
        g_TH=g_TH,
        alpha_TK=alpha_TK,
        order_N=order_N,
        scale_N=scale_N if weight_N is None else scale_N * weight_N,
        weight_N=weight_N,
        wanted=wanted,
        later=Later() if overlaps else None,
    )
    x_grad, alpha_grad = _in_parts(back, parts)
    if wanted.alpha and walked.y_NH is not None:
        with clock.phase("return"):
            alpha_grad = _full_alpha(back)
    _book(call, back.grads)  # also what products have brought
    weights.release()
    grads, home = back.grads, None if back.later is None else back.later.home
    del back, weights
    if home is None:
        home = call.storage.give_back(call, grads)
    d_gate_up, d_down = home()
    return Gradients(x_TH=x_grad, alpha_TK=alpha_grad, gate_up=d_gate_up, down=d_down)


def _overlaps(call: Call, route: Route, wanted: Wanted) -> bool:
    """Whether the first projection's weight gradients wait until input gradients travel.

    Their own gradients are all held meanwhile: not where activations are computed again for want of memory, nor where a
    budget has no room for them.
    """
    if call.comm.size == 1 or call.plan.backward_chunks > 1 or not (wanted.x and wanted.gate_up):
        return False
    return call.keeps_rows and call.budget.overlaps(call.plan, route.kept_RQ)


def _gradient_buffers(call: Call, weights: Weights, wanted: Wanted, add: bool) -> WeightGrads:
    """Sums of many parts, and what is added at home, in at least fp32; a single product has the compute dtype."""
    wide = call.scale_dtype()
    grads = WeightGrads.like(
        weights,
        Needs(gate_up=wanted.gate_up, down=wanted.down),
        home=wide if call.plan.backward_chunks > 1 else call.compute_dtype,
        slots=wide,
        zero=add,
    )
    _book(call, grads)
    return grads


def _book(call: Call, grads: WeightGrads) -> None:
    """Count gradients that lie somewhere by now; those that are counted already are not counted twice."""
    call.open_call.ledger.add("grads", *grads.there[:2])
    call.open_call.ledger.add("replicas", *grads.there[2:])


def _in_parts(back: Back, parts: int) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the input (T, H) and of the routing weights (T, K), a part of every rank's rows at a time."""
    call, device = back.call, back.g_TH.device
    starts_R, rank = back.route.starts_R, call.comm.rank
    retained = back.wanted.alpha and back.walked.y_NH is None
    alpha = torch.zeros(back.alpha_TK.numel(), dtype=back.scale_N.dtype, device=device) if retained else None
    total: Tensor | None = None
    for number in range(parts):
        with call.open_call.clock.phase("reroute"):
            cells_RV, at = back.route.part(rank, number, parts, device)
            layout = Layout.build(cells_RV, starts_R, rank, device)
            places = back.route.places(rank, number, parts, device) if call.selects_early else None
        x_grad = _part(back, layout, cells_RV, at, places, alpha)
        call.open_call.record.rows_backward_local += layout.received
        if x_grad is not None and parts > 1:
            x_grad = x_grad.to(call.scale_dtype()) if total is None else total.add_(x_grad)
        total = x_grad
    x_TH = None if total is None else total.to(call.compute_dtype)
    return x_TH, None if alpha is None else alpha.view(back.alpha_TK.shape)


def _part(
    back: Back,
    layout: Layout,
    cells_RV: IntArray,
    at: Tensor | None,
    places: Tensor | None,
    alpha: Tensor | None,
) -> Tensor | None:
    """One part: gradients of its pairs into the weights' buffers and `alpha`; returns the input's gradient (T, H)."""
    call, clock, route = back.call, back.call.open_call.clock, back.route
    source_P = back.source(at)
    pair_P = back.order_N if source_P is None else back.order_N.index_select(0, source_P)
    columns = [back.scale_N if source_P is None else back.scale_N.index_select(0, source_P)]
    if route.position_P is not None:
        columns.append(route.position_P if at is None else route.position_P[at])
    token_P = tokens_of(pair_P, call.slots)
    g = send_rows(call, layout, back.g_TH, token_P, columns, pack="pack", travel="exchange", part="backward")
    x_carried = carried_inputs(back, g, cells_RV, token_P)
    back.weights.start()
    shape = (layout.received, back.g_TH.shape[1])
    dx = Sink(lambda: scratch.take("dx", shape, back.g_TH)) if back.wanted.x else None
    with clock.phase("experts_backward"):
        dot_Q = _experts(back, layout, g, x_carried, token_P, places, dx)
        dx_QH = None if dx is None else dx.whole
        del dx
        current().experts("input gradient", dx_QH, g.out_index, call.seated * 2, layout.segments_S)
    call.open_call.ledger.add("backward", dx_QH)
    g = g.emptied()
    del x_carried
    with clock.phase("return"):
        rows = None if dx_QH is None else start_return(call, g, dx_QH, None, "return")
        del dx_QH
        dots = None if alpha is None else start_back(call, layout.to_received(dot_Q), layout, "return")
    return _come_home(back, g, rows, dots, pair_P, source_P, alpha)


def _come_home(
    back: Back,
    g: Arrival,
    rows: Arriving | None,
    dots: Arriving | None,
    pair_P: Tensor,
    source_P: Tensor | None,
    alpha: Tensor | None,
) -> Tensor | None:
    """What is left, while a part's results travel; then their sums into `alpha` and the input's gradient (T, H)."""
    call, clock, x_grad = back.call, back.call.open_call.clock, None
    if rows is not None:
        call.open_call.ledger.add("backward", rows.received)
    if back.later is not None:
        back.weights.release()  # of foreign seats: not read again
        with clock.phase("experts_backward"):
            back.later.run(lambda: call.storage.give_back(call, back.grads))
    with clock.phase("return"):
        if rows is not None:
            x_grad = sum_by_token(g, rows.wait(), pair_P, back.alpha_TK.shape, None)
        if alpha is not None and dots is not None:
            dot_P, weight_N = dots.wait(), back.weight_N
            if weight_N is not None:
                dot_P = dot_P * (weight_N if source_P is None else weight_N.index_select(0, source_P))
            alpha[pair_P] = dot_P
    return x_grad


def _experts(
    back: Back,
    layout: Layout,
    g: Arrival,
    x_carried: Rows | None,
    token_P: Tensor,
    places: Tensor | None,
    dx: Sink | None,
) -> Tensor:
    """Experts' backward at this rank's seats, of pairs that stayed, then of those that carry their input: dots (Q,)."""
    seats = len(layout.segments_S) // 2
    staying, dots = sum(layout.segments_S[:seats]), []
    if not back.route.all_carried:
        x, h = inputs_that_stayed(back, g, token_P, places, staying)
        dots.append(_run(back, g, x, h, layout.segments_S[:seats], slice(0, staying), dx))
    if x_carried is not None:
        at = slice(staying, layout.received)
        dots.append(_run(back, g, x_carried, None, layout.segments_S[seats:], at, dx))
    return dots[0] if len(dots) == 1 else torch.cat(dots)


def _run(
    back: Back, g: Arrival, x: Rows, h: Rows | None, counts: list[int], at: slice, dx: Sink | None
) -> Tensor:
    index = None if g.out_index is None else g.out_index[at]
    later, weights, dh = back.later, back.weights, None
    if later is not None:
        dh = scratch.lasting((sum(counts), weights.gate_up.shape[1]), weights.gate_up)
        back.call.open_call.ledger.follow(dh)
        left = partial(first_weight_gradients, dh, x, counts, weights.homes, back.grads, add=back.add)
        later.gradients.append(left)
    return experts_backward(
        weights, x, h, g.rows.part(at), g.columns[0][at], counts, dx=dx, dx_index=index,
        dx_from=None if at == slice(0, g.layout.received) else at.start, grads=back.grads, add=back.add, dh=dh,
    )  # fmt: skip


def _full_alpha(back: Back) -> Tensor:
    """Gradient of every pair's routing weight from the kept outputs, (T, K)."""
    y_NH, place_N = back.walked.y_NH, back.walked.place_N
    assert y_NH is not None, "outputs were kept"
    pair_N = back.order_N if place_N is None else back.order_N.index_select(0, place_N)
    grad = torch.zeros(back.alpha_TK.numel(), dtype=back.scale_N.dtype, device=y_NH.device)
    grad[pair_N] = _full_dot(back.g_TH, y_NH, tokens_of(pair_N, back.call.slots), grad.dtype)
    return grad.view(back.alpha_TK.shape)


def _full_dot(g_TH: Tensor, y_NH: Tensor, token_N: Tensor, dtype: torch.dtype) -> Tensor:
    """<g_t, y_u> of every pair, a block of rows at a time."""
    out = torch.empty(token_N.shape[0], dtype=dtype, device=g_TH.device)
    for begin in range(0, token_N.shape[0], _DOT_ROWS):
        at = slice(begin, begin + _DOT_ROWS)
        out[at] = torch.linalg.vecdot(g_TH[token_N[at]].to(dtype), y_NH[at].to(dtype))
    return out
