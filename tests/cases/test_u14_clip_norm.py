"""U14: the norm of the whole gradient counts every logical parameter once, and all ranks clip by the same factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from lrmoe import ConfigError, LRMoEConfig, UnsupportedError
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool, world
from tests.integrations.models import make_model, make_tokens
from tests.integrations.ranks import (
    LIMIT_S,
    batches,
    load,
    reduce_by_hand,
    reference,
    save_models,
    step,
    whole,
)

EXACT = LRMoEConfig(max_drop=0)
LENGTHS = [7, 4, 9, 5]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Qwen3-MoE in float32."""
    return save_models(tmp_path_factory.mktemp("models"), ["qwen3"], torch.float32)["qwen3"]


def fill(parameter: nn.Parameter, squares: float) -> None:
    """A gradient with this sum of squares."""
    parameter.grad = torch.full_like(parameter, (squares / parameter.numel()) ** 0.5)


def squares_of_the_case(cut: bool) -> tuple[float, float, float]:
    """Expert gradients of 20 on rank 0 and 100 on rank 1, dense ones of 24: their norm, and what clipping leaves."""
    rank, model = dist.get_rank(), make_model("qwen3", dtype=torch.float64, num_hidden_layers=1)
    if cut:
        lrmoe_hf.shard_experts(model, world())
    experts = list(lrmoe_hf.expert_parameters(model))
    fill(experts[0], (20.0, 100.0)[rank] if cut else 120.0)
    fill(model.lm_head.weight, 24.0)  # on both ranks, and counted once
    norm = lrmoe_hf.clip_grad_norm_(model, 6.0)
    left = experts[0].grad
    assert left is not None
    return float(norm), float(left.square().sum()), float(model.lm_head.weight.grad.square().sum())


@pytest.mark.distributed
@pytest.mark.parametrize("cut", [True, False])
def test_experts_on_two_ranks_or_on_both(pool2: Pool, cut: bool) -> None:
    first, second = pool2.run(squares_of_the_case, cut)
    assert first[0] == second[0] == pytest.approx(12.0, rel=1e-12)
    assert [first[1], second[1]] == pytest.approx([5.0, 25.0] if cut else [30.0, 30.0], rel=1e-5)
    assert first[2] == second[2] == pytest.approx(6.0, rel=1e-5)


def spread_model(kind: str, path: str, ids: Tensor) -> tuple[PreTrainedModel, Any]:
    """A model in one of the layouts, its gradients those of the mean of the ranks' losses; and its handle."""
    ranks = dist.get_world_size()
    if kind in ("by hand", "shards"):
        model = load(path, torch.float32)
        if kind == "by hand":
            lrmoe_hf.shard_experts(model, world())
        else:
            lrmoe_hf.install_sharded_experts(model, dist.group.WORLD)
        handle = lrmoe_hf.enable(model, EXACT.replace(storage="sharded" if kind == "shards" else "owned"))
        reduce_by_hand(model, ids)
        return model, handle
    layouts: dict[str, dict[str, Any]] = {
        "fsdp": {"fsdp_size": ranks},
        "ep": {"fsdp_size": ranks, "ep_size": ranks, "ep_implementation": "lrmoe"},
        "ep x fsdp": {"fsdp_size": ranks, "ep_size": ranks // 2, "ep_implementation": "lrmoe"},
    }
    model = load(path, torch.float32, **layouts.get(kind, {}))
    handle = lrmoe_hf.enable(model, EXACT)
    trained = DistributedDataParallel(model) if kind == "ddp" else model
    step(trained, ids)
    return trained, handle


def clipped(kind: str, path: str) -> tuple[float, float, float]:
    """(norm, its error, largest error of a clipped gradient over the largest entry) against the whole model."""
    ids = batches(LENGTHS[: dist.get_world_size()])
    exact = reference(path, torch.float64, ids)
    exact.pop("loss")
    wanted = torch.stack([grad.norm() for grad in exact.values()]).norm()
    limit = float(wanted) / 3
    model, handle = spread_model(kind, path, ids[dist.get_rank()])
    norm = lrmoe_hf.clip_grad_norm_(handle if kind == "ep" else model, limit)
    assert not isinstance(norm, DTensor)
    gaps = [0.0]
    if kind not in ("by hand", "shards"):  # whose gradients stay on their rank
        for name, parameter in model.named_parameters():
            truth = exact[name.removeprefix("module.")] / 3
            gaps.append(float((whole(parameter.grad) - truth).abs().max() / truth.abs().max()))
    again = lrmoe_hf.clip_grad_norm_(model, float("inf"))
    assert float(again) == pytest.approx(limit, rel=1e-4)
    return float(norm), abs(float(norm / wanted) - 1), max(gaps)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "ep", "by hand", "shards"])
def test_every_layout_of_two_ranks(pool2: Pool, saved: str, kind: str) -> None:
    found = pool2.run(clipped, kind, saved, limit_s=LIMIT_S)
    assert len({norm for norm, *_ in found}) == 1, "the same bits on every rank"
    assert all(error < 1e-5 and gap < 1e-3 for _, error, gap in found), found


@pytest.mark.distributed
def test_expert_parallel_groups_smaller_than_the_world(pool4: Pool, saved: str) -> None:
    found = pool4.run(clipped, "ep x fsdp", saved, limit_s=LIMIT_S)
    assert len({norm for norm, *_ in found}) == 1
    assert all(error < 1e-5 and gap < 1e-3 for _, error, gap in found), found


def some_ranks_lack_gradients() -> float:
    model = make_model("qwen3", num_hidden_layers=1)
    lrmoe_hf.shard_experts(model, world())
    if dist.get_rank() == 1:
        fill(next(lrmoe_hf.expert_parameters(model)), 9.0)
    return float(lrmoe_hf.clip_grad_norm_(model, 1.0))


@pytest.mark.distributed
def test_a_rank_without_gradients_joins(pool2: Pool) -> None:
    assert pool2.run(some_ranks_lack_gradients) == pytest.approx([3.0, 3.0])


def test_one_device_is_what_torch_does() -> None:
    ours, theirs = (make_model("glm4", dtype=torch.bfloat16) for _ in range(2))
    for model in (ours, theirs):
        model(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    wide = torch.stack([p.grad.double().norm() for p in ours.parameters() if p.grad is not None]).norm()
    found = lrmoe_hf.clip_grad_norm_(ours, 0.5)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(wide), rel=1e-5)  # not rounded to bfloat16 on the way
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=0)


def test_tied_parameters_count_once_and_short_gradients_stay() -> None:
    model = make_model("qwen3", tie_word_embeddings=True, num_hidden_layers=1)
    fill(model.lm_head.weight, 16.0)
    before = model.lm_head.weight.grad.clone()
    assert float(lrmoe_hf.clip_grad_norm_(model, 4.5)) == pytest.approx(4.0)
    assert torch.equal(model.lm_head.weight.grad, before)


def test_what_is_refused() -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    wrongs: list[Any] = [-1.0, float("nan"), "1", True]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="max_norm"):
            lrmoe_hf.clip_grad_norm_(model, wrong)
    fill(model.lm_head.weight, float("inf"))
    with pytest.raises(RuntimeError, match="not finite"):
        lrmoe_hf.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


def a_gradient_not_reduced(path: str) -> None:
    model = load(path, torch.float32, fsdp_size=2)
    weight = model.lm_head.weight
    weight.grad = weight.detach().redistribute(placements=[torch.distributed.tensor.Replicate()])
    with pytest.raises(UnsupportedError, match=r"lm_head.*reduce the gradients first"):
        lrmoe_hf.clip_grad_norm_(model, 1.0)


@pytest.mark.distributed
def test_a_gradient_placed_otherwise_is_refused(pool2: Pool, saved: str) -> None:
    pool2.run(a_gradient_not_reduced, saved, limit_s=LIMIT_S)
