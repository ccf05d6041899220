"""What benchmarks/layer.py times: one MoE layer by this package, by transformers, and as bare matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from layer_data import Data
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from lrmoe.config import LRMoEConfig
from lrmoe.layer import MoELayer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of the benchmarked layer."""

    hidden: int = 512
    width: int = 192
    experts: int = 32
    top_k: int = 8
    tokens: int = 4096
    sigma: float = 1.0


def make_data(case: Case, dtype: torch.dtype, seed: int) -> Data:
    """Random tensors, experts of lognormal popularity."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    alpha, ids = choose_experts(case.sigma * normal(case.experts), case.tokens, case.top_k, draw)
    gate_up = normal(case.experts, 2 * case.width, case.hidden) / case.hidden**0.5
    down = normal(case.experts, case.hidden, case.width) / case.width**0.5
    leaves = (normal(case.tokens, case.hidden), alpha, gate_up, down)
    x, alpha, gate_up, down = (t.to(dtype).requires_grad_() for t in leaves)
    grad = normal(case.tokens, case.hidden).to(dtype)
    return Data(x=x, ids=ids, alpha=alpha, gate_up=gate_up, down=down, grad=grad)


def choose_experts(
    popularity: Tensor, tokens: int, top_k: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Routing weights and ids, (tokens, top_k) each, drawn without repetition by log popularity (Gumbel top-k)."""
    gumbel = -torch.log(-torch.log(torch.rand(tokens, len(popularity), generator=draw)))
    logits, ids = (popularity + gumbel).topk(top_k, dim=1)
    return logits.softmax(dim=1), ids


def peer(case: Case, data: Data, implementation: str) -> Callable[[], None]:
    """transformers' Qwen3-MoE experts with one of its own implementations."""
    config = Qwen3MoeConfig(
        hidden_size=case.hidden, moe_intermediate_size=case.width, num_experts=case.experts, hidden_act="silu"
    )
    config._experts_implementation = implementation
    experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = torch.nn.Parameter(data.gate_up), torch.nn.Parameter(data.down)

    def run() -> None:
        data.clear()
        experts.gate_up_proj.grad = experts.down_proj.grad = None
        experts(data.x, data.ids, data.alpha).backward(data.grad)

    return run


def ours(
    case: Case, data: Data, drop: float, activations: str = "auto"
) -> tuple[Callable[[], None], MoELayer]:
    """This package's layer at a drop."""
    layer = MoELayer(
        num_experts=case.experts,
        hidden_size=case.hidden,
        intermediate_size=case.width,
        config=LRMoEConfig(max_drop=drop, warmup_steps=0, activations=activations),
    )

    def run() -> None:
        data.clear()
        layer(data.x, data.ids, data.alpha, data.gate_up, data.down, training=True).backward(data.grad)
        layer.clock.advance()

    return run, layer


def masked_twin(case: Case, data: Data, drop: float) -> Callable[[], None]:
    """Pruning without compaction: weights of dropped pairs are zeroed, every row is still computed backward."""
    layer = MoELayer(
        num_experts=case.experts,
        hidden_size=case.hidden,
        intermediate_size=case.width,
        config=LRMoEConfig(max_drop=0, warmup_steps=0),
    )
    keep = torch.rand(data.alpha.shape, generator=torch.Generator().manual_seed(1)) >= drop

    def run() -> None:
        data.clear()
        masked = data.alpha * keep
        layer(data.x, data.ids, masked, data.gate_up, data.down, training=True).backward(data.grad)
        layer.clock.advance()

    return run


def bare_gemms(case: Case, data: Data) -> Callable[[], None]:
    """The six products of every expert at the same counts, into buffers made before: no layer can be faster."""
    counts = torch.bincount(data.ids.reshape(-1), minlength=case.experts).tolist()
    gate_up, down = data.gate_up.detach(), data.down.detach()
    most = max(counts)

    def buffer(*shape: int) -> Tensor:
        return torch.randn(shape).to(gate_up.dtype)

    x, h, phi = buffer(most, case.hidden), buffer(most, 2 * case.width), buffer(most, case.width)
    y, d_gate_up, d_down = buffer(most, case.hidden), torch.empty_like(gate_up), torch.empty_like(down)

    def run() -> None:
        for e, n in enumerate(counts):
            torch.mm(x[:n], gate_up[e].t(), out=h[:n])
            torch.mm(phi[:n], down[e].t(), out=y[:n])
            torch.mm(x[:n], down[e], out=phi[:n])
            torch.mm(x[:n].t(), phi[:n], out=d_down[e])
            torch.mm(h[:n].t(), x[:n], out=d_gate_up[e])
            torch.mm(h[:n], gate_up[e], out=y[:n])

    return run
