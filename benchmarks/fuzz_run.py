"""Makes a drawn call and takes down what it gives: outputs, gradients, records and the kept set of each choice.

Shape letters: T tokens, K experts per token, E experts, H hidden, N pairs by expert.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fuzz_calls import DTYPES, FuzzCall, Given
from tests.reference import GRADS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import lrmoe
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.layer import MoELayer, StepClock, backward, early
from lrmoe.telemetry import CallRecord

Forward = Callable[..., Tensor]
KeptSets = dict[tuple[int, int], tuple[Tensor, Tensor]]


class WrongError(AssertionError):
    """A call gave something else than the right answer or a documented error."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """One micro-batch: output, gradients by name (None where not asked for), the record of a training call."""

    out: Tensor
    grads: dict[str, Tensor | None]
    record: CallRecord | None


@contextlib.contextmanager
def kept_sets() -> Iterator[KeptSets]:
    """Every choice of a kept set within: (order of pairs, weights) by (step, micro-batch)."""
    found: KeptSets = {}
    choose = vars(backward)["select_pairs"]

    def spy(call: Any, grad: Any, alpha_N: Tensor, order_N: Tensor, norm_N: Any) -> Tensor | None:
        weight_N = choose(call, grad, alpha_N, order_N, norm_N)
        if weight_N is not None:
            found[call.moment.step, call.moment.micro_batch] = order_N.clone(), weight_N.double()
        return weight_N

    with mock.patch.object(backward, "select_pairs", spy), mock.patch.object(early, "select_pairs", spy):
        yield found


def run(
    call: FuzzCall,
    given: list[Given],
    group: dist.ProcessGroup | None = None,
    before: Callable[[MoELayer], None] = lambda layer: None,
) -> list[Outcome]:
    """All forwards, then all backwards in the order drawn.

    Args:
        group: of the ranks that make the call together. before: is called with the layer when there is one.
    """
    with contextlib.ExitStack() as stack:
        forward, layer = _enabled(call, stack) if call.entry == "enable" else _bare(call, group)
        before(layer)
        outs, records = [], []
        for one in given:
            outs.append(_forward(call, forward, one))
            records.append(layer.last_record if call.trains else None)
        turns = list(zip(given, outs, strict=True))
        for one, out in reversed(turns) if call.reverse else turns:
            if out.requires_grad:
                _backward(call, one, out)
    return [
        Outcome(out=out.detach(), grads={n: one.views[n].grad for n in GRADS}, record=record)
        for one, out, record in zip(given, outs, records, strict=True)
    ]


def _backward(call: FuzzCall, one: Given, out: Tensor) -> None:
    grad = one.grad.view(out.shape) if out.shape != one.grad.shape else one.grad
    if call.made != "retained":
        out.backward(grad)
        return
    out.backward(grad, retain_graph=True)
    first = {n: one.views[n].grad for n in GRADS}
    for name in GRADS:
        one.views[name].grad = None
    out.backward(grad)
    for name, before in first.items():
        again = one.views[name].grad
        if before is not None and (again is None or not torch.equal(before.nan_to_num(), again.nan_to_num())):
            raise WrongError(f"{name}: a second backward through a retained graph gives another gradient")


def _bare(call: FuzzCall, group: dist.ProcessGroup | None) -> tuple[Forward, MoELayer]:
    clock = StepClock()
    for _ in range(call.step):
        clock.advance()
    layer = MoELayer(
        num_experts=call.experts,
        hidden_size=call.hidden,
        intermediate_size=call.width,
        config=call.settings,
        activation=call.activation,
        group=group,
        clock=clock,
    )

    def forward(hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, one: Given) -> Tensor:
        ids, tokens = one.ids, one.ids.shape[0]
        if call.batched and tokens % 2 == 0:
            hidden, ids, weights = (t.unflatten(0, (2, tokens // 2)) for t in (hidden, ids, weights))
        return layer(hidden, ids, weights, gate_up, down, training=call.trains, padding_mask=one.mask)

    return forward, layer


def _enabled(call: FuzzCall, stack: contextlib.ExitStack) -> tuple[Forward, MoELayer]:
    """A tiny experts module of Transformers run through `enable`; its weights are set at each call."""
    module = Qwen3MoeExperts(
        Qwen3MoeConfig(
            num_experts=call.experts,
            hidden_size=call.hidden,
            moe_intermediate_size=call.width,
            hidden_act={"gelu_tanh": "gelu_pytorch_tanh"}.get(call.activation, call.activation),
        )
    ).to(DTYPES[call.dtypes[2]])
    with contextlib.redirect_stderr(io.StringIO()):
        handle = lrmoe_hf.enable(nn.Sequential(module), call.settings)
    stack.callback(handle.disable)
    module.train(call.trains)
    for _ in range(call.step):
        handle.step()

    def forward(hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, one: Given) -> Tensor:
        for name, value in (("gate_up_proj", gate_up), ("down_proj", down)):
            module._parameters.pop(name, None)
            setattr(module, name, value)
        with lrmoe.padding(one.mask):
            return module(hidden, one.ids, weights)

    return forward, next(iter(handle.layers.values()))


def _forward(call: FuzzCall, forward: Forward, one: Given) -> Tensor:
    body, inputs = partial(forward, one=one), [one.views[n] for n in GRADS]
    with contextlib.ExitStack() as stack:
        if call.autocast:
            stack.enter_context(torch.autocast("cpu", dtype=DTYPES[call.autocast]))
        if call.made in ("no_grad", "inference_mode"):
            stack.enter_context(getattr(torch, call.made)())
        if call.made in ("reentrant", "non-reentrant"):
            return checkpoint(body, *inputs, use_reentrant=call.made == "reentrant")
        return body(*inputs)
