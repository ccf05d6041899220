"""Inputs and first projections of the pairs that backward computes: where forward left them, or sent once more.

Shape letters: R ranks, V stands (see reroute.py), M pairs received here; P kept pairs of this source.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lrmoe.layer.back import Back
from lrmoe.layer.buffers import Rows
from lrmoe.layer.call import Call
from lrmoe.layer.reroute import Route
from lrmoe.layer.routing import Layout
from lrmoe.layer.wire import Arrival, send_alike, send_rows
from lrmoe.ops import upload
from lrmoe.planning.cells import carry_stands
from lrmoe.planning.problem import IntArray


def carried_inputs(back: Back, g: Arrival, cells_RV: IntArray, token_P: Tensor) -> Rows | None:
    """Input rows of the pairs that carry them, in (seat, source) order at this rank's seats."""
    call, route = back.call, back.route
    if not route.carried:
        return None
    assert back.x_TH is not None, "inputs that may travel again are kept"
    if route.all_carried:
        return send_alike(
            call, g, back.x_TH, token_P, pack="pack", travel="exchange", part="backward", buffer="inputs"
        )
    carried_RV, mine_P = _only_carried(call, route, cells_RV)
    layout = Layout.build(carried_RV, route.starts_R, call.comm.rank, token_P.device)
    token_P = token_P[upload(mine_P, token_P.device)]
    arrival = send_rows(
        call, layout, back.x_TH, token_P, [], pack="pack", travel="exchange", part="backward", buffer="inputs"
    )
    return arrival.rows


def _only_carried(call: Call, route: Route, cells_RV: IntArray) -> tuple[IntArray, IntArray]:
    """Cells of pairs that carry their input, and the places of this source's among its pairs, int64."""
    carry_V = carry_stands(route.starts_R)
    return cells_RV * carry_V, np.flatnonzero(np.repeat(carry_V, cells_RV[call.comm.rank]))


def inputs_that_stayed(
    back: Back, g: Arrival, token_P: Tensor, places: Tensor | None, staying: int
) -> tuple[Rows, Rows | None]:
    """Inputs and stashed first projections (None: none were kept) of the `staying` pairs that need not be sent again.

    Args:
        g: their gradients. places: where a part's pairs lie, where forward kept theirs alone (see `Route.places`).
    """
    if back.call.selects_early:
        return _in_order(back, token_P, places)
    return _where_they_lie(back, g, token_P, staying)


def _in_order(back: Back, token_P: Tensor, places: Tensor | None) -> tuple[Rows, Rows | None]:
    """Where forward kept theirs alone: as they lie, or those at `places` for a part of a call."""
    walked = back.walked
    assert walked.x is not None, "rows that stayed were kept"
    h = None if walked.h_M2I is None else Rows(source=walked.h_M2I, index_M=places)
    if back.call.comm.size == 1:
        return Rows(source=walked.x, index_M=token_P), h
    index = walked.index_M
    if index is not None and places is not None:
        index = index[places]
    return Rows(source=walked.x, index_M=places if index is None else index), h


def _where_they_lie(back: Back, g: Arrival, token_P: Tensor, staying: int) -> tuple[Rows, Rows | None]:
    """Where forward left those of all pairs."""
    walked, call = back.walked, back.call
    assert walked.x is not None, "rows that stayed were kept"
    received = g.columns[1][:staying].long() if back.route.position_P is not None else None
    if call.comm.size == 1:
        x, at = Rows(source=walked.x, index_M=token_P), received
    else:
        seats = call.seats
        row_M = Layout.build(seats.assign_RQ, seats.starts_R, call.comm.rank, token_P.device).row_M
        assert row_M is not None, "several ranks have a received order"
        at = None if received is None else _inverse(row_M)[received]
        if walked.index_M is None:
            index = row_M if received is None else received
        else:
            index = walked.index_M if at is None else walked.index_M[at]
        x = Rows(source=walked.x, index_M=index)
    return x, None if walked.h_M2I is None else Rows(source=walked.h_M2I, index_M=at)


def _inverse(order_M: Tensor) -> Tensor:
    found = torch.empty_like(order_M)
    found[order_M] = torch.arange(order_M.shape[0], device=order_M.device)
    return found
