"""Run the layer on a reference case, on one device or as one rank of a group, and hand back a reference Result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lrmoe.config import LRMoEConfig
from lrmoe.layer import MoELayer, StepClock
from lrmoe.telemetry import CallRecord
from tests.reference import GRADS, Case, Result, plain_loop

REENTRANT = {"reentrant": True, "non-reentrant": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One forward and backward: what came out, what was recorded."""

    result: Result
    last_record: CallRecord | None

    @property
    def record(self) -> CallRecord:
        """The record of a training call."""
        assert self.last_record is not None
        return self.last_record

    @property
    def quota_E(self) -> list[int]:
        return [int(q) for q in self.record.quota_E]


def pruning(**fields: Any) -> LRMoEConfig:
    """A configuration that prunes from the first step."""
    return LRMoEConfig(**{"warmup_steps": 0, "lean_wire": False, **fields})


def exact(**fields: Any) -> LRMoEConfig:
    """A configuration that never prunes."""
    return pruning(max_drop=0.0, **fields)


def build(case: Case, config: LRMoEConfig, *, group: Any = None, step: int = 0, **kwargs: Any) -> MoELayer:
    """The layer that fits `case`, with the clock at `step`."""
    clock = StepClock()
    for _ in range(step):
        clock.advance()
    return MoELayer(
        num_experts=case.num_experts,
        hidden_size=case.hidden.shape[1],
        intermediate_size=case.down.shape[2],
        config=config,
        activation=case.activation,
        group=group,
        clock=clock,
        **kwargs,
    )


def local_experts(case: Case, group: Any) -> slice:
    """The block of experts that lives on this rank."""
    if group is None:
        return slice(None)
    each = case.num_experts // dist.get_world_size(group)
    return slice(dist.get_rank(group) * each, (dist.get_rank(group) + 1) * each)


def leaves(case: Case, needs: Sequence[str], group: Any = None) -> dict[str, Tensor]:
    """Fresh leaf tensors (hidden, weights, gate_up, down) of this rank, by reference name of their gradient."""
    block = local_experts(case, group)
    tensors = {
        "d_hidden": case.hidden,
        "d_weights": case.weights,
        "d_gate_up": case.gate_up[block],
        "d_down": case.down[block],
    }
    return {n: t.detach().clone().requires_grad_(n in needs) for n, t in tensors.items()}


def forward(
    layer: MoELayer,
    case: Case,
    leaf: dict[str, Tensor],
    *,
    training: bool = True,
    checkpoint: str | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Call the layer, plainly or under one of the two kinds of activation checkpointing."""

    def body(hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return layer(hidden, case.ids, weights, gate_up, down, training=training, padding_mask=mask)

    inputs = [leaf[n] for n in GRADS]
    if checkpoint is None:
        return body(*inputs)
    return torch_checkpoint(body, *inputs, use_reentrant=REENTRANT[checkpoint])


def run(
    case: Case,
    config: LRMoEConfig,
    *,
    layer: MoELayer | None = None,
    group: Any = None,
    step: int = 0,
    needs: Sequence[str] = GRADS,
    training: bool = True,
    checkpoint: str | None = None,
    mask: Tensor | None = None,
) -> Run:
    """One forward and backward of the layer on `case` (this rank's tokens, all experts)."""
    layer = build(case, config, group=group, step=step) if layer is None else layer
    leaf = leaves(case, needs, group)
    out = forward(layer, case, leaf, training=training, checkpoint=checkpoint, mask=mask)
    out.backward(case.grad_out)
    grads = {n: leaf[n].grad for n in GRADS}
    return Run(result=Result(out=out.detach(), **grads), last_record=layer.last_record if training else None)


def keep_weights(retained: Result, case: Case) -> Tensor:
    """Each pair's weight in backward (0 dropped, 1 or 1/pi kept), read off the retained router gradient.

    With router_grad="retained" the layer returns w_u * dalpha_u, and the reference knows dalpha_u.
    """
    exact_TK = plain_loop(case, dtype=torch.float64, needs=["d_weights"]).d_weights
    assert exact_TK is not None
    assert retained.d_weights is not None
    nobody = (case.ids < 0) | (case.ids >= case.num_experts)
    assert bool((exact_TK[~nobody] != 0).all()), "the case must have no zero router gradient"
    return torch.where(nobody, 0.0, retained.d_weights.double() / exact_TK)


def kept(case: Case, config: LRMoEConfig, **kwargs: Any) -> Tensor:
    """The pairs' weights in backward that `config` leads to, (T,K) float64."""
    return keep_weights(run(case, config.replace(router_grad="retained"), **kwargs).result, case)
