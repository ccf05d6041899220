"""The autograd node of a layer call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lrmoe.distributed.probe import current
from lrmoe.layer.back import Wanted
from lrmoe.layer.backward import walk_backward
from lrmoe.layer.buffers import scratch
from lrmoe.layer.call import Call
from lrmoe.layer.check import check_gradients, is_checked
from lrmoe.layer.forward import Walked, walk_forward


class MoEFunction(torch.autograd.Function):
    """Full forward; backward of the kept pairs only.

    Inputs: call, order_N (sorted pairs), x (T, H) and alpha (T, K) in any floating dtypes, gate_up (L, 2I, H),
    down (L, H, I). Output (T, H) in the dtype of x.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, order_N: Tensor, x_TH: Tensor, alpha_TK: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        call.budget.begin(call.plan)
        with torch.autocast(x_TH.device.type, enabled=False):
            walked = run_forward(call, order_N, x_TH, alpha_TK, gate_up, down)
        ctx.call = call
        # An input that backward may send once more, or that a check starts from.
        again = x_TH if call.carries or is_checked(call) else None
        ctx.save_for_backward(
            order_N, alpha_TK, gate_up, down, again, walked.place_N, walked.x, walked.index_M, walked.h_M2I,
            walked.phi_norm_N, walked.y_NH, walked.weight_N,
        )  # fmt: skip
        ctx.kept_RQ = walked.kept_RQ
        ctx.dtypes = (x_TH.dtype, alpha_TK.dtype, gate_up.dtype, down.dtype)
        return walked.out_TH.to(x_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call.repeated() if ctx.call.open_call.finished else ctx.call
        order_N, alpha_TK, gate_up, down, again, place, x, index, h, norm, y, weight = ctx.saved_tensors
        _, _, *needed = ctx.needs_input_grad
        wanted = Wanted(x=needed[0], alpha=needed[1], gate_up=needed[2], down=needed[3])
        call.open_call.ledger.seal()
        with (
            torch.autocast(grad_TH.device.type, enabled=False),
            scratch.fresh(call.budget.binds, call.open_call.ledger.follow),
            _watched(call, "backward", grad_TH),
        ):
            current().tokens("the gradient at the output", grad_TH, order_N, call.slots)
            walked = Walked(
                out_TH=grad_TH, place_N=place, x=x, index_M=index, h_M2I=h, phi_norm_N=norm, y_NH=y, weight_N=weight,
                kept_RQ=ctx.kept_RQ,
            )  # fmt: skip
            g_TH, rest = call.cast(grad_TH), (alpha_TK, order_N, gate_up, down, wanted)
            grads = walk_backward(call, walked, g_TH, call.cast(again) if call.carries else None, *rest)
            current().values(
                {"the input's gradient": grads.x_TH, "the routing weights' gradient": grads.alpha_TK}
            )
            _show_weights(call, "the gradient of ", grads.gate_up, grads.down)
            if is_checked(call) and not call.open_call.repeated:
                check_gradients(call, grads, g_TH, again.to(call.compute_dtype), *rest)
            del g_TH, walked
        call.budget.end()
        if call.moment is not None and not call.open_call.repeated:
            call.open_call.finished = True
            call.telemetry.add(call.open_call)
        found = [grads.x_TH, grads.alpha_TK, grads.gate_up, grads.down]
        del grads
        # One after the other: the wider one goes before the next is cast.
        for at, dtype in enumerate(ctx.dtypes):
            grad = found[at]
            found[at] = None if grad is None else grad.to(dtype)
            del grad
        return (None, None, *found)


def run_forward(
    call: Call, order_N: Tensor, x_TH: Tensor, alpha_TK: Tensor, gate_up: Tensor, down: Tensor
) -> Walked:
    """Forward without a graph; the caller turns gradients and autocast off."""
    with (
        scratch.fresh(call.budget.binds, call.open_call.ledger.follow),
        _watched(call, "forward", x_TH),
    ):
        current().tokens("hidden_states", x_TH, order_N, call.slots)
        current().tokens("top_k_weights", alpha_TK, order_N, call.slots, by_pair=True)
        _show_weights(call, "", gate_up, down)
        walked = walk_forward(call, call.cast(x_TH), alpha_TK, order_N, gate_up, down)
        current().values({"the output": walked.out_TH})
        return walked


def _watched(call: Call, direction: str, like: Tensor) -> AbstractContextManager[None]:
    return current().walk(call.comm, call.controller.layer, direction, call.open_call.clock, like)


def _show_weights(call: Call, what: str, gate_up: Tensor | None, down: Tensor | None) -> None:
    """The parameters of this rank, or their gradients, by expert."""
    first = call.comm.rank * call.plan.topology.experts_per_rank if call.storage.homes else 0
    experts = call.plan.topology.experts_per_rank if call.storage.homes else call.plan.topology.experts
    named = {f"{what}gate_up_proj": gate_up, f"{what}down_proj": down}
    current().weights(range(first, first + experts), named)
