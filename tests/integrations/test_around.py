"""What trainers do around the layer: selective checkpointing, wrapped dense parts, accumulation, generation."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool, world
from tests.integrations.models import assert_same, make_model, make_tokens, run
from tests.integrations.ranks import LIMIT_S, batches, load, reference, save_models, whole

EXACT = LRMoEConfig(max_drop=0)
PRUNED = LRMoEConfig(max_drop=0.4, warmup_steps=0)
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selectively(model: PreTrainedModel) -> None:
    """Each decoder layer keeps its matrix products and recomputes the rest."""
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_matmuls)
    for layer in model.model.layers:
        body = layer.forward
        layer.forward = functools.partial(checkpoint, body, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("config", [EXACT, PRUNED], ids=["exact", "pruned"])
@pytest.mark.parametrize("kind", ["by operation", "every other layer"])
def test_selective_checkpointing(kind: str, config: LRMoEConfig) -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    plain, model = copy.deepcopy(eager), copy.deepcopy(eager)
    if kind == "by operation":
        checkpoint_selectively(model)
    else:
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=2)
    handles = [lrmoe_hf.enable(one, config) for one in (plain, model)]
    for seed in range(2):  # the second time finds whatever the first left behind
        ids = make_tokens(seed=seed)
        found, wanted = run(model, ids), run(plain, ids)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
        for handle in handles:
            handle.step()
    if config is EXACT:
        assert_same(found, eager, ids)
    assert handles[0].summary()["calls"] == handles[1].summary()["calls"], "a recompute counted as a call"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of tiny models in float64."""
    return save_models(tmp_path_factory.mktemp("models"), ["qwen3", "glm4"])


def wrapped_dense_part(path: str, wrap: str) -> None:
    """Experts cut by hand, everything else under DDP or FSDP2, which are told to leave the experts alone."""
    rank, ids = dist.get_rank(), batches([9, 5])
    model = load(path, torch.float64)
    lrmoe_hf.shard_experts(model, world())
    handle = lrmoe_hf.enable(model, EXACT)
    experts = set(lrmoe_hf.expert_parameters(model))
    if wrap == "ddp":
        names = [name for name, parameter in model.named_parameters() if parameter in experts]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        call: Any = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer, ignored_params=experts)
        call = fully_shard(model, ignored_params=experts)
    for _ in range(2):
        model.zero_grad()
        call(input_ids=ids[rank], labels=ids[rank]).loss.backward()
    # Complete, but of the sum of the ranks' losses where dense gradients are of the mean.
    for parameter in experts:
        assert parameter.grad is not None
        parameter.grad.div_(2)
    wanted = reference(path, torch.float64, ids)
    for name, parameter in model.named_parameters():
        truth = wanted[name][4 * rank : 4 * rank + 4] if parameter in experts else wanted[name]
        torch.testing.assert_close(whole(parameter.grad), truth, rtol=1e-9, atol=1e-12, msg=name)
    norm = torch.stack([grad.norm() for name, grad in wanted.items() if name != "loss"]).norm()
    torch.testing.assert_close(lrmoe_hf.clip_grad_norm_(handle, 1.0), norm, rtol=1e-9, atol=0)


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "wrap"), [("qwen3", "ddp"), ("glm4", "ddp"), ("qwen3", "fsdp")])
def test_dense_part_wrapped_and_experts_cut(pool2: Pool, saved: dict[str, str], name: str, wrap: str) -> None:
    pool2.run(wrapped_dense_part, saved[name], wrap, limit_s=LIMIT_S)


def accumulated(path: str, deferred: bool) -> None:
    """Three micro-batches of different sizes, reduced after each or after the last."""
    rank = dist.get_rank()
    parts = [batches(lengths) for lengths in ([9, 5], [4, 7], [6, 6])]
    model = load(path, torch.float32, fsdp_size=2, ep_size=2, ep_implementation="lrmoe")
    handle = lrmoe_hf.enable(model, EXACT)
    for number, ids in enumerate(parts):
        if deferred:
            model.set_requires_gradient_sync(number == len(parts) - 1)
        (model(input_ids=ids[rank], labels=ids[rank]).loss / len(parts)).backward()
    handle.step()
    wanted: dict[str, Tensor] = {}
    for ids in parts:
        for name, value in reference(path, torch.float64, ids).items():
            wanted[name] = wanted.get(name, 0) + value / len(parts)
    for name, parameter in model.named_parameters():
        gap = (whole(parameter.grad) - wanted[name]).abs().max() / wanted[name].abs().max()
        assert float(gap) < 1e-4, f"{name}: {float(gap):.1e}"


@pytest.mark.distributed
@pytest.mark.parametrize("deferred", [False, True])
def test_micro_batches_under_expert_parallelism(pool2: Pool, saved: dict[str, str], deferred: bool) -> None:
    pool2.run(accumulated, saved["qwen3"], deferred, limit_s=LIMIT_S)


def steps(path: str, in_between: bool) -> list[Tensor]:
    """Four pruned steps of changing batches, with or without evaluation and generation after each."""
    rank = dist.get_rank()
    model = load(path, torch.float32, fsdp_size=2, ep_size=2, ep_implementation="lrmoe")
    handle = lrmoe_hf.enable(model, PRUNED)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    handle.attach(optimizer)
    for step in range(4):
        ids = make_tokens(1 + step % 2, 3 + step + 2 * rank, seed=10 * step + rank)
        model(input_ids=ids, labels=ids).loss.backward()
        lrmoe_hf.clip_grad_norm_(handle, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if in_between:
            model.eval()
            with torch.no_grad():
                model(input_ids=ids)
            mask = torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, pad_token_id=0)
            model.train()
    assert handle.summary()["calls"] == 4 * len(handle.layers)
    lrmoe_hf.clip_grad_norm_(handle, 1.0)  # whole weights of an evaluation have gone from their places
    return [whole(parameter.detach()).clone() for parameter in model.parameters()]


@pytest.mark.distributed
def test_evaluation_and_generation_leave_training_as_it_is(pool2: Pool, saved: dict[str, str]) -> None:
    without, between = (pool2.run(steps, saved["glm4"], flag, limit_s=LIMIT_S)[0] for flag in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(without, between, strict=True))
