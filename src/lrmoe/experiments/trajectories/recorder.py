"""Records what a trainer's MoE layers are given and what they answer, forward and backward, call by call.

    hidden, alpha, gate_up, down --tap--> MoELayer --tap--> output
                         <--gradient--          <--upstream--

A tap hands tensors on as they are, and its backward notes the gradient that passes. Tapped weights give the gradient
of this one call, also where a parameter is used in several.

Shape letters: T tokens, K experts per token, H hidden, I expert width, L local experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lrmoe.errors import LRMoEError
from lrmoe.layer import MoELayer

INPUTS = (
    "x",
    "alpha",
    "gate_up",
    "down",
)  # tensors that get gradients, in the order of the layer's arguments
_OUTPUT = "output"


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedCall:
    """One training call of one layer on this rank, detached; tensors are the trainer's own, not copies.

    Attributes:
        layer: the layer that was called.
        x: (T, H); ids: (T, K) global expert ids; alpha: (T, K).
        gate_up: (L, 2I, H), down: (L, H, I): this rank's home experts, valid until the trainer's next update.
        output: (T, H). upstream: its gradient.
        gradients: by name of INPUTS, None where the trainer asks for none.
    """

    layer: MoELayer
    x: Tensor
    ids: Tensor
    alpha: Tensor
    gate_up: Tensor
    down: Tensor
    output: Tensor
    upstream: Tensor
    gradients: dict[str, Tensor | None]


@dataclass(eq=False)
class _Open:
    """A call whose gradients are still to come."""

    layer: MoELayer
    ids: Tensor
    tensors: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def wanted(self, name: str) -> bool:
        return self.tensors[name].requires_grad

    def closed(self) -> RecordedCall | None:
        """The call with its gradients, or None where no backward came (a checkpoint's other forward)."""
        if _OUTPUT not in self.gradients or any(self.wanted(n) and n not in self.gradients for n in INPUTS):
            return None
        x, alpha, gate_up, down, output = (self.tensors[name].detach() for name in (*INPUTS, _OUTPUT))
        return RecordedCall(
            layer=self.layer,
            x=x,
            ids=self.ids,
            alpha=alpha,
            gate_up=gate_up,
            down=down,
            output=output,
            upstream=self.gradients[_OUTPUT],
            gradients={name: self.gradients.get(name) for name in INPUTS},
        )


class _Tap(torch.autograd.Function):
    """The identity; its backward notes the gradient."""

    @staticmethod
    def forward(ctx: Any, call: _Open, name: str, tensor: Tensor) -> Tensor:
        ctx.call, ctx.name = call, name
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        ctx.call.gradients[ctx.name] = grad
        return None, None, grad


class Recorder:
    """Watches the layers of one trainer (`watch_layers(model, recorder)`); `take` hands out finished calls."""

    def __init__(self) -> None:
        self._calls: list[_Open] = []

    def __call__(
        self,
        layer: MoELayer,
        x: Tensor,
        ids: Tensor,
        alpha: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        training: bool,
    ) -> Tensor:
        """Make the call, recorded where a backward will follow."""
        tensors = dict(zip(INPUTS, (x, alpha, gate_up, down), strict=True))
        if not (training and torch.is_grad_enabled()):
            return layer(x, ids, alpha, gate_up, down, training=training)
        call = _Open(layer=layer, ids=ids, tensors=tensors)
        tapped = [_Tap.apply(call, n, t) if t.requires_grad else t for n, t in tensors.items()]
        output = layer(tapped[0], ids, *tapped[1:], training=training)
        tensors[_OUTPUT] = output
        self._calls.append(call)
        tapped_output: Tensor = _Tap.apply(call, _OUTPUT, output)
        return tapped_output

    def take(self) -> list[RecordedCall]:
        """The calls of a micro-batch whose backward is over, in the order of the layers; forgets them.

        Raises:
            LRMoEError: a layer was called and got no backward, or twice.
        """
        closed = [call for call in (made.closed() for made in self._calls) if call is not None]
        asked = {made.layer.layer for made in self._calls}
        for made in self._calls:
            made.tensors.clear()  # a tap's node holds the call, the call its output, the output's graph the node
        self._calls.clear()
        closed.sort(key=lambda call: call.layer.layer)
        if [call.layer.layer for call in closed] != sorted(asked):
            raise LRMoEError(
                f"layers {sorted(asked)} were called and {[call.layer.layer for call in closed]} got a backward: every "
                "layer must be called once a micro-batch"
            )
        return closed
