"""The exact gradient of one layer call beside the pruned one, every so many optimizer steps.

The call runs once more from its input, with the same copies and nothing left out, and what it gives is compared and
thrown away: no random number, no score history, no byte or millisecond of the training call's record knows of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lrmoe.layer.back import Wanted
from lrmoe.layer.backward import Gradients, walk_backward
from lrmoe.layer.call import Call
from lrmoe.layer.forward import walk_forward

_BLOCK = 1 << 20  # elements that are widened to fp64 at a time


def is_checked(call: Call) -> bool:
    """Whether this call's gradient is checked: alike on all ranks, and in a recompute.

    Every `check_every` optimizer steps it is the first micro-batch's call of one layer, the next layer each time.
    """
    every, moment = call.config.check_every, call.moment
    if not every or moment is None or moment.micro_batch or call.plan.exact:
        return False
    number, rest = divmod(moment.step + 1, every)
    layers = sorted(call.controller.clock.waiting.parameters)
    return rest == 0 and layers[(number - 1) % len(layers)] == call.controller.layer


def check_gradients(
    call: Call,
    pruned: Gradients,
    g_TH: Tensor,
    x_TH: Tensor,
    alpha_TK: Tensor,
    order_N: Tensor,
    gate_up: Tensor,
    down: Tensor,
    wanted: Wanted,
) -> None:
    """Compute the exact gradients and put cosine and relative error into the call's record, without waiting for them.

    All ranks' gradients of input, routing weights and experts count as one vector.

    Args:
        pruned: what the call's backward gave.
        g_TH: gradient at the output, compute dtype. x_TH: the layer's input, compute dtype.
        alpha_TK: routing weights; order_N: flat pair ids by expert.
    """
    other = _exact(call)
    walked = walk_forward(other, x_TH, alpha_TK, order_N, gate_up, down)
    exact = walk_backward(other, walked, g_TH, x_TH, alpha_TK, order_N, gate_up, down, wanted)
    sums = _sums(pruned, exact, g_TH.device)
    table = call.comm.all_gather_ints(sums.view(torch.int64)).view(torch.float64)
    cosine, error = _compare(table.sum(dim=0))
    call.open_call.pending.update(check_cosine=cosine, check_relative_error=error)


def _exact(call: Call) -> Call:
    """The same call with the same copies, in which backward keeps every pair where forward computed it."""
    plan = replace(
        call.plan, quota_E=call.plan.counts_E, backward_J=call.plan.assign_RJ.sum(axis=0), reason="off"
    )
    seats = replace(call.seats, backward_Q=call.seats.assign_RQ.sum(axis=0))
    return replace(call.repeated(), plan=plan, seats=seats)


def _sums(pruned: Gradients, exact: Gradients, device: torch.device) -> Tensor:
    """fp64 (4,): <pruned, exact>, |pruned|^2, |exact|^2, |pruned - exact|^2 over this rank's gradients."""
    total = torch.zeros(4, dtype=torch.float64, device=device)
    for name in ("x_TH", "alpha_TK", "gate_up", "down"):
        ours, theirs = getattr(pruned, name), getattr(exact, name)
        if ours is None or theirs is None:
            continue
        pairs = zip(ours.reshape(-1).split(_BLOCK), theirs.reshape(-1).split(_BLOCK), strict=True)
        for one, other in pairs:
            a, b = one.double(), other.double()
            d = a - b
            total += torch.stack((a.dot(b), a.dot(a), b.dot(b), d.dot(d)))
    return total


def _compare(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and |pruned - exact| / |exact|, fp64 scalars; 1 and 0 where the exact gradient is zero.

    Not a number where a gradient is not finite.
    """
    dot, pruned, exact, difference = sums.unbind()
    there = exact != 0
    cosine = dot / (pruned * exact).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    error = (difference / exact).sqrt()
    return torch.where(there, cosine, 1.0), torch.where(there, error, 0.0)
