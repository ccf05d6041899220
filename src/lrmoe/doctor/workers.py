"""What two ranks do for the doctor: time an all-to-all, and hold one layer to a plain loop over its experts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.layer import MoELayer

TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH = 96, 2, 8, 32, 24
NAMES = ("output", "d_hidden_states", "d_top_k_weights", "d_gate_up_proj", "d_down_proj")
_BLOCK, _ROUNDS = 4 * 2**20, 5  # bytes to each rank, measured times
TOLERANCE = 1e-10


def measure() -> dict[str, Any]:
    """One rank's figures: seconds of all-to-alls, and the largest relative error of each of NAMES."""
    group = dist.group.WORLD
    found: dict[str, Any] = {"gloo": link(group, torch.device("cpu")), "errors": layer_errors(group)}
    if dist.is_nccl_available() and torch.cuda.device_count() >= dist.get_world_size():
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
        found["nccl"] = link(dist.new_group(backend="nccl"), device)
    return found


def link(group: Any, device: torch.device) -> dict[str, float]:
    """Seconds of one small all-to-all, and bytes per second that a rank sends to the other in a large one."""
    size = dist.get_world_size(group)

    def seconds(block: int) -> float:
        send = torch.zeros(size * block, dtype=torch.uint8, device=device)
        out = torch.empty_like(send)
        times = [
            _timed(lambda: dist.all_to_all_single(out, send, group=group), device) for _ in range(_ROUNDS + 1)
        ]
        return statistics.median(times[1:])

    return {"latency_s": seconds(64), "bytes_per_s": (size - 1) * _BLOCK / seconds(_BLOCK)}


def _timed(action: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Everything of all ranks, fp64."""

    x: Tensor
    ids: Tensor
    alpha: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor


def layer_errors(group: Any, device: torch.device | None = None) -> dict[str, float]:
    """Largest error of each of NAMES over the largest entry, one layer call in fp64 with nothing left out.

    Args:
        group: ranks that share the tokens and the experts; None: this process alone.
    """
    case = _make_case(device or torch.device("cpu"))
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    tokens = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    experts = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    leaves = [case.x[tokens], case.alpha[tokens], case.gate_up[experts], case.down[experts]]
    x, alpha, gate_up, down = (leaf.clone().requires_grad_() for leaf in leaves)
    layer = MoELayer(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        config=LRMoEConfig(max_drop=0, warmup_steps=0),
        group=group,
    )
    layer.clock.expected = True
    out = layer(x, case.ids[tokens], alpha, gate_up, down, training=True)
    out.backward(case.grad[tokens])
    found = (out.detach(), x.grad, alpha.grad, gate_up.grad, down.grad)
    parts = (tokens, tokens, tokens, experts, experts)
    return {
        name: float((ours - true[part]).abs().max() / true.abs().max())
        for name, ours, true, part in zip(NAMES, found, _plain(case), parts, strict=True)
        if ours is not None
    }


def _make_case(device: torch.device) -> _Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    top = normal(TOKENS, EXPERTS).add(normal(EXPERTS)).topk(TOP_K)
    return _Case(
        x=normal(TOKENS, HIDDEN),
        ids=top.indices,
        alpha=top.values.softmax(dim=-1),
        gate_up=normal(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5,
        down=normal(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5,
        grad=normal(TOKENS, HIDDEN),
    )


def _plain(case: _Case) -> tuple[Tensor, ...]:
    """Output and gradients of a loop over the experts, by autograd."""
    x, alpha, gate_up, down = (
        t.clone().requires_grad_() for t in (case.x, case.alpha, case.gate_up, case.down)
    )
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = torch.nonzero(case.ids == expert, as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=1)
        y = (F.silu(gate) * up) @ down[expert].T
        out = out.index_add(0, token, y * alpha[token, slot].unsqueeze(1))
    return (out.detach(), *torch.autograd.grad(out, (x, alpha, gate_up, down), case.grad))
