"""U03: experts whose copies on several ranks get tokens on one rank only: no hang, zeros from the idle rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool
from tests.integrations.models import make_model, make_tokens
from tests.integrations.ranks import LIMIT_S, load, reference, step, whole
from tests.reference import assert_within

pytestmark = pytest.mark.distributed
EXACT = LRMoEConfig(max_drop=0)
PRUNED = LRMoEConfig(max_drop=0.4, warmup_steps=0)
WRAPS = ("ddp", "fsdp")


class Forced(nn.Module):
    """A dense layer, and four experts of which a call uses the one it is told."""

    def __init__(self) -> None:
        super().__init__()
        host = make_model("qwen3", dtype=torch.float64, num_hidden_layers=1, num_experts=4)
        torch.manual_seed(0)
        self.dense = nn.Linear(32, 32, dtype=torch.float64)
        self.experts = host.model.layers[0].mlp.experts

    def forward(self, x_TH: Tensor, expert: int) -> Tensor:
        ids = torch.full((x_TH.shape[0], 1), expert)
        return self.experts(self.dense(x_TH), ids, torch.ones(x_TH.shape[0], 1, dtype=x_TH.dtype))


def inputs(rank: int, tokens: tuple[int, int]) -> Tensor:
    return torch.randn(tokens[rank], 32, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def expected(tokens: tuple[int, int]) -> dict[str, Tensor]:
    """The mean over the ranks of what each would have alone, in the eager experts."""
    model = Forced()
    total = sum(model(inputs(rank, tokens), (0, 3)[rank]).square().sum() for rank in (0, 1)) / 2
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trains(wrap: str, config: LRMoEConfig, tokens: tuple[int, int]) -> dict[str, Tensor]:
    """The first step's gradients; two more steps of AdamW follow, which meets no None."""
    rank, model = dist.get_rank(), Forced()
    handle = lrmoe_hf.enable(model, config)
    if wrap == "ddp":
        trained: Any = DistributedDataParallel(model)  # find_unused_parameters stays off
    else:
        fully_shard(model.experts)
        trained = fully_shard(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    handle.attach(optimizer)
    found: dict[str, Tensor] = {}
    for _ in range(3):
        optimizer.zero_grad()
        trained(inputs(rank, tokens), (0, 3)[rank]).square().sum().backward()
        assert all(p.grad is not None for p in trained.parameters())
        found = found or {
            n.removeprefix("module."): whole(p.grad).clone() for n, p in trained.named_parameters()
        }
        optimizer.step()
    assert all(bool(whole(p).isfinite().all()) for p in trained.parameters())
    return found


@pytest.mark.parametrize("tokens", [(5, 7), (0, 6)], ids=str)
@pytest.mark.parametrize("wrap", WRAPS)
def test_one_expert_per_rank(pool2: Pool, wrap: str, tokens: tuple[int, int]) -> None:
    wanted = expected(tokens)
    for rank in pool2.run(trains, wrap, EXACT, tokens, limit_s=LIMIT_S):
        for name, grad in rank.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-10, atol=1e-12, msg=name)
        assert bool((rank["experts.down_proj"][1:3] == 0).all()), "idle on both ranks"


@pytest.mark.parametrize("wrap", WRAPS)
def test_pruned(pool2: Pool, wrap: str) -> None:
    first, second = pool2.run(trains, wrap, PRUNED, (5, 7), limit_s=LIMIT_S)
    for name, grad in first.items():
        assert torch.equal(grad, second[name]), name
    assert bool((first["experts.down_proj"][1:3] == 0).all())
    assert bool((first["experts.down_proj"][[0, 3]] != 0).any(-1).any(-1).all())


def alone(config: LRMoEConfig) -> bool:
    """Without anything around it a rank has zeros, not None, for the experts that its tokens did not choose."""
    model = Forced()
    lrmoe_hf.enable(model, config)
    model(inputs(dist.get_rank(), (5, 7)), (0, 3)[dist.get_rank()]).square().sum().backward()
    return bool((model.experts.gate_up_proj.grad[1:3] == 0).all())


def test_an_idle_expert_has_a_gradient_of_zeros(pool2: Pool) -> None:
    for config in (EXACT, PRUNED):
        assert pool2.run(alone, config) == [True, True]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Qwen3-MoE of 16 experts in float32."""
    folder = tmp_path_factory.mktemp("models")
    make_model("qwen3", num_experts=16).save_pretrained(folder)
    return str(folder)


def replicas_of_two_groups(path: str) -> int:
    """Two expert-parallel groups share experts over FSDP; batches of two tokens reach few of the sixteen experts."""
    ids = [make_tokens(1, 2, seed=10 + rank) for rank in range(4)]
    layout = {"fsdp_size": 4, "ep_size": 2, "ep_implementation": "lrmoe"}
    model = load(path, torch.float32, **layout)
    handle = lrmoe_hf.enable(model, EXACT)
    found = step(model, ids[dist.get_rank()])
    exact, plain = (reference(path, dtype, ids) for dtype in (torch.float64, torch.float32))
    for name, value in found.items():
        assert_within(value, exact[name], plain[name], name)
    return min(record.counts_E.count(0) for record in handle.telemetry.drain())


def test_replicas_under_expert_parallelism(pool4: Pool, saved: str) -> None:
    idle = pool4.run(replicas_of_two_groups, saved, limit_s=LIMIT_S)
    assert min(idle) > 0, "every expert is busy in every group"
