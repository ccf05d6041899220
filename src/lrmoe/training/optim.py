"""Parameters, their gradients and AdamW, with dense gradients averaged and expert gradients counted once.

    dense gradients    one flat buffer, every .grad a view into it; one all-reduce, which also carries three scalars:
                       [ g_0 | g_1 | ... | g_n | sum of squares of this rank's expert gradients | this rank's loss |
                         1 where this rank was asked to stop ]
    expert gradients   arrive summed over the ranks' tokens; each rank's loss is a mean over its own, hence / R
                   whole experts or shards: the ranks' parts are disjoint, so their sums of squares add up

Masters are the parameters themselves, or float32 copies where the parameters are of lower precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lrmoe.checkpoint.agree import size_of
from lrmoe.checkpoint.hf.outline import kept_in_float32
from lrmoe.distributed.peers import waiting
from lrmoe.planning.shards import Cut
from lrmoe.training.config import OptimConfig
from lrmoe.training.model import expert_cuts, expert_spans

MOMENTS = ("exp_avg", "exp_avg_sq")
_TAIL = 3  # scalars behind the dense gradients


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One parameter.

    Attributes:
        name: in the model.
        parameter: what forward uses.
        master: what the optimizer updates; the parameter itself unless that is of lower precision, or frozen.
        span: (first global id, number of all experts) of an experts parameter, else None.
        cut: how it is cut, where the parameter is this rank's part of all experts, else None.
    """

    name: str
    parameter: nn.Parameter
    master: Tensor
    span: tuple[int, int] | None
    cut: Cut | None = None


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What the ranks know together after a backward.

    Attributes:
        loss: mean over all ranks.
        norm: of the whole gradient, before clipping.
        stop: whether any rank was asked to stop.
    """

    loss: float
    norm: float
    stop: bool = False

    @property
    def finite(self) -> bool:
        """Whether the step may be taken."""
        return math.isfinite(self.norm)


class Parameters:
    """All parameters of a model on this rank, the trained ones split into dense and expert ones.

    Args:
        model: in float32 (or float64); cast in place to `dtype`.
        dtype: of forward and backward; parameters that the model keeps in float32 stay so.
        group: the ranks that share dense parameters.

    Attributes:
        entries: what is trained, that is, `dense` and `experts`. frozen: what is not.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._world_size = size_of(group)
        spans, cuts = expert_spans(model), expert_cuts(model)
        every = [
            _entry(name, p, _dtype_of(model, name, dtype), spans.get(name), cuts.get(name))
            for name, p in model.named_parameters()
        ]
        self.entries = [entry for entry in every if entry.parameter.requires_grad]
        self.frozen = [entry for entry in every if not entry.parameter.requires_grad]
        self.dense = [entry for entry in self.entries if entry.span is None]
        self.experts = [entry for entry in self.entries if entry.span is not None]
        self._flat = self._bind_dense()

    def _bind_dense(self) -> Tensor:
        size = sum(entry.master.numel() for entry in self.dense) + _TAIL
        like = (self.dense or self.entries)[0].master
        flat = torch.zeros(size, dtype=like.dtype, device=like.device)
        start = 0
        for entry in self.dense:
            entry.master.grad = flat[start : start + entry.master.numel()].view_as(entry.master)
            start += entry.master.numel()
        return flat

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._flat.zero_()
        for entry in self.experts:
            entry.master.grad = None

    def collect(self) -> None:
        """Add gradients of low-precision parameters to their masters'; after every micro-batch."""
        for entry in self.entries:
            if entry.master is entry.parameter or entry.parameter.grad is None:
                continue
            if entry.master.grad is None:
                entry.master.grad = entry.parameter.grad.to(entry.master.dtype)
            else:
                entry.master.grad.add_(entry.parameter.grad)
            entry.parameter.grad = None

    def reduce(self, loss: Tensor, clip_norm: float, *, stop: bool = False) -> Reduced:
        """Average over ranks and clip, in place: one all-reduce and one read-back.

        Args:
            loss: this rank's mean loss, 0-dim.
            clip_norm: limit on the norm of the whole gradient; 0 is none.
            stop: whether this rank was asked to stop.

        Raises:
            RankError: some rank was lost, or did not come in time.
        """
        expert_grads = [entry.master.grad for entry in self.experts if entry.master.grad is not None]
        dense, tail = self._flat[:-_TAIL], self._flat[-_TAIL:]
        tail[0] = _squares(expert_grads) / self._world_size**2 if expert_grads else 0.0
        tail[1] = loss
        tail[2] = float(stop)
        if self._world_size > 1:
            with waiting("the sum of all ranks' gradients"):
                dist.all_reduce(self._flat, group=self._group)
        squares = torch.linalg.vector_norm(dense).square() / self._world_size**2 + tail[0]
        norm, total_loss, asked = torch.stack([squares.sqrt(), *tail[1:]]).tolist()
        scale = 1.0 / self._world_size
        if clip_norm and norm > clip_norm:
            scale *= clip_norm / norm
        if scale != 1.0 and math.isfinite(norm):
            dense.mul_(scale)
            if expert_grads:
                torch._foreach_mul_(expert_grads, scale)
        return Reduced(loss=total_loss / self._world_size, norm=norm, stop=asked > 0)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy masters to the parameters of lower precision; after every optimizer step or load."""
        for entry in self.entries:
            if entry.master is not entry.parameter:
                entry.parameter.copy_(entry.master)


def _entry(
    name: str, parameter: nn.Parameter, dtype: torch.dtype, span: tuple[int, int] | None, cut: Cut | None
) -> Entry:
    master: Tensor = parameter
    if parameter.dtype != dtype:
        master = parameter.detach().clone() if parameter.requires_grad else parameter
        parameter.data = parameter.data.to(dtype)
    return Entry(name=name, parameter=parameter, master=master, span=span, cut=cut)


def _dtype_of(model: Any, name: str, dtype: torch.dtype | None) -> torch.dtype:
    parameter = model.get_parameter(name)
    kept = any(part in name for part in kept_in_float32(model))
    return parameter.dtype if dtype is None or kept else dtype


def _squares(grads: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(grads)).square().sum()


class Optimizer:
    """AdamW with linear warm-up and cosine decay over masters."""

    def __init__(self, parameters: Parameters, config: OptimConfig, total_steps: int) -> None:
        self._entries = parameters.entries
        self._config = config
        self._total_steps = total_steps
        decayed = [entry.master for entry in self._entries if entry.master.ndim > 1]
        others = [entry.master for entry in self._entries if entry.master.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self.updates = 0  # steps taken, skipped ones not counted

    def learning_rate(self, step: int) -> float:
        """Of optimizer step `step`, counted from 0."""
        config = self._config
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, self._total_steps - config.warmup_steps)
        low = config.lr * config.min_lr_ratio
        return low + (config.lr - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def step(self, step: int) -> None:
        """Update the masters from their gradients with the learning rate of `step`."""
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(step)
        self._adamw.step()
        self.updates += 1

    def moments(self) -> Iterator[tuple[Entry, str, Tensor]]:
        """(entry, name of the moment, its tensor), for those that exist."""
        for entry in self._entries:
            state = self._adamw.state.get(entry.master, {})
            yield from ((entry, name, state[name]) for name in MOMENTS if name in state)

    def restore(self, updates: int) -> Iterator[tuple[Entry, str, Tensor]]:
        """Make empty moments as of `updates` steps and yield them to be filled."""
        self.updates = updates
        self._adamw.state.clear()
        for entry in self._entries if updates else ():
            step = torch.tensor(float(updates), device=entry.master.device)
            state = {
                name: torch.zeros_like(entry.master, memory_format=torch.preserve_format) for name in MOMENTS
            }
            self._adamw.state[entry.master] = {"step": step, **state}
            yield from ((entry, name, tensor) for name, tensor in state.items())
