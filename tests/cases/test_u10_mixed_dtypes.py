"""U10: autocast, mixed dtypes and loss scaling: one rule for dtypes, the same choice of pairs, the same skipped steps.

The rule: experts compute in their weights' dtype, or in autocast's where that is on (fp64 stays); the output has the
input's dtype, and a gradient that of its tensor.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lrmoe import ConfigError, LRMoEConfig, RankError
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool, world
from tests.integrations.models import make_model, make_tokens, run
from tests.integrations.ranks import LIMIT_S, load, save_models
from tests.layer.harness import build, exact, forward, leaves, pruning
from tests.reference import GRADS, Case, make_case, plain_loop

CASE = make_case(tokens=24, experts=4, top_k=2, hidden=16, width=12)
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SCALE = 65536.0


def dtype_of_experts(weights: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    return weights if autocast is None or weights == F64 else autocast


@pytest.mark.parametrize("autocast", [None, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("weights", "hidden"),
    [(BF16, F32), (F32, BF16), (F32, F32), (F16, F32), (F32, F16), (BF16, F16), (F64, F32)],
    ids=str,
)
def test_every_pair_of_dtypes(
    weights: torch.dtype, hidden: torch.dtype, autocast: torch.dtype | None
) -> None:
    leaf = {
        n: t.detach().to(weights if n in ("d_gate_up", "d_down") else hidden).requires_grad_(True)
        for n, t in leaves(CASE, GRADS).items()
    }
    with torch.autocast("cpu", dtype=autocast or BF16, enabled=autocast is not None):
        out = forward(build(CASE, exact()), CASE, leaf)
    out.backward(CASE.grad_out.to(out.dtype))
    assert out.dtype == hidden
    grads = {n: t.grad for n, t in leaf.items() if t.grad is not None}
    assert {n: grad.dtype for n, grad in grads.items()} == {n: t.dtype for n, t in leaf.items()}
    given = {"hidden": leaf["d_hidden"], "weights": leaf["d_weights"]}
    given |= {"gate_up": leaf["d_gate_up"], "down": leaf["d_down"]}
    exact_inputs: dict[str, Any] = {n: t.detach().double() for n, t in given.items()}
    truth = plain_loop(Case(ids=CASE.ids, grad_out=CASE.grad_out, **exact_inputs))
    coarsest = max(torch.finfo(d).eps for d in (dtype_of_experts(weights, autocast), hidden))
    for n, found in [("out", out), *grads.items()]:
        wanted = getattr(truth, n)
        error = float((found.detach().double() - wanted).norm() / wanted.norm())
        assert error < 4 * coarsest, f"{n}: {error:.2e}"


def kept_pairs(scale: float, config: LRMoEConfig) -> tuple[Tensor, Tensor]:
    """Which pairs a fp16 layer keeps where the arriving gradient is scaled, and its weight gradient unscaled."""
    half = CASE.to(F16)
    layer, leaf = build(half, config), leaves(half, GRADS)
    out = forward(layer, half, leaf)
    out.backward((CASE.grad_out * scale).to(F16))
    chosen, down = leaf["d_weights"].grad, leaf["d_down"].grad
    assert chosen is not None
    assert down is not None
    return chosen.ne(0), down.double() / scale  # retained: a dropped pair's routing weight gets no gradient


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_a_scaled_fp16_gradient_chooses_the_same_pairs(estimator: str) -> None:
    """The squares of such rows leave fp16: their norms must not."""
    config = pruning(max_drop=0.4, estimator=estimator, router_grad="retained")
    largest = float(CASE.grad_out.abs().max())
    rows, grad = kept_pairs(1.0, config)
    scaled_rows, scaled_grad = kept_pairs(2.0 ** int(torch.log2(torch.tensor(2e4 / largest))), config)
    assert 0 < int(rows.sum()) < rows.numel()
    assert torch.equal(rows, scaled_rows)
    torch.testing.assert_close(scaled_grad, grad, rtol=2e-2, atol=2e-3 * float(grad.abs().max()))


def fp16_step(model: PreTrainedModel, scaler: torch.amp.GradScaler, ids: Tensor) -> None:
    with torch.autocast("cpu", dtype=F16):
        loss = model(input_ids=ids, labels=ids).loss
    scaler.scale(loss).backward()


def test_one_device_trains_in_fp16_with_a_scale_of_65536() -> None:
    eager, ids = make_model("qwen3", initializer_range=0.005), make_tokens()
    model = copy.deepcopy(eager)
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0))
    exact_grads = run(copy.deepcopy(eager).double(), ids)
    errors = []
    for one in (model, eager):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        fp16_step(one, scaler, ids)
        assert not lrmoe_hf.agree_on_overflow(scaler, optimizer, handle if one is model else None)
        grads = dict(one.named_parameters())
        names = [n for n in grads if "experts" in n]
        assert all(grads[n].grad.dtype == F32 for n in names)
        errors.append(
            sum(float((grads[n].grad - exact_grads[n]).norm() / exact_grads[n].norm()) for n in names)
        )
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == SCALE
    assert errors[0] < 1.5 * errors[1]
    assert handle.steps_skipped == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_an_overflow_skips_is_counted_and_the_clock_goes_on(fused: bool, unscaled: bool) -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    handle.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(3):
        optimizer.zero_grad()
        before = model.lm_head.weight.detach().clone()
        fp16_step(model, scaler, make_tokens(seed=step))
        if step == 1:
            model.model.layers[0].mlp.experts.down_proj.grad[0, 0, 0] = float("inf")
        if unscaled:
            scaler.unscale_(optimizer)
        assert lrmoe_hf.agree_on_overflow(scaler, optimizer, handle) is (step == 1)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.lm_head.weight) is (step == 1)
    assert handle.clock.step == 3
    assert handle.steps_skipped == handle.summary()["steps_skipped"] == 1
    assert "1 step was skipped: its gradients were not finite" in str(handle)
    assert scaler.get_scale() == SCALE / 2


def test_misuse_of_the_scaler_is_named() -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    lrmoe_hf.enable(model, LRMoEConfig(max_drop=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert lrmoe_hf.agree_on_overflow(torch.amp.GradScaler("cpu", enabled=False), optimizer) is False
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match=r"scaled no loss yet.*scaler\.scale"):
        lrmoe_hf.agree_on_overflow(scaler, optimizer)
    fp16_step(model, scaler, make_tokens())
    scaler.step(optimizer)
    with pytest.raises(ConfigError, match=r"before scaler\.step"):
        lrmoe_hf.agree_on_overflow(scaler, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Qwen3-MoE in float32."""
    return save_models(tmp_path_factory.mktemp("models"), ["qwen3"], F32)["qwen3"]


def overflow_on_one_rank(path: str, layout: dict[str, Any], broken: str) -> dict[str, Any]:
    """Three steps; in the second one entry of a gradient of the last rank is inf."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = load(path, F32, **layout)
    if not layout:
        lrmoe_hf.shard_experts(model, world())
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.3, warmup_steps=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    handle.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    moved, norms = [], []
    for step in range(3):
        optimizer.zero_grad()
        fp16_step(model, scaler, make_tokens(1, 8, seed=10 * step + rank))
        grad = lrmoe_hf._spread.local_part(dict(model.named_parameters())[broken].grad)
        if step == 1 and rank == last:
            grad.view(-1)[0] = float("inf")
        before = [lrmoe_hf._spread.local_part(p.detach()).clone() for p in model.parameters()]
        skipped = lrmoe_hf.agree_on_overflow(scaler, optimizer, handle)
        norms.append(float(lrmoe_hf.clip_grad_norm_(model, 1.0)) if layout else 1.0)
        scaler.step(optimizer)
        scaler.update()
        now = [lrmoe_hf._spread.local_part(p.detach()) for p in model.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        assert same is skipped
        moved.append(not same)
    return {
        "moved": moved, "scale": scaler.get_scale(), "skipped": handle.steps_skipped, "step": handle.clock.step,
        "norms": [norm for norm, took in zip(norms, moved, strict=True) if took],
    }  # fmt: skip


EXPERTS, DENSE = "model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj.weight"
EP2 = {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "lrmoe"}


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "broken"), [(EP2, EXPERTS), (EP2, DENSE), ({}, EXPERTS)])
def test_an_inf_on_one_rank_makes_all_skip(
    pool2: Pool, saved: str, layout: dict[str, Any], broken: str
) -> None:
    found = pool2.run(overflow_on_one_rank, saved, layout, broken, limit_s=LIMIT_S)
    assert found[0] == found[1]
    assert found[0]["moved"] == [True, False, True]
    assert (found[0]["scale"], found[0]["skipped"], found[0]["step"]) == (SCALE / 2, 1, 3)


def agree_with_one_that_leaves(path: str) -> None:
    """Worker: the last rank ends where the other waits for its flag."""
    model = load(path, F32)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    fp16_step(model, scaler, make_tokens(1, 8))
    if dist.get_rank() == 1:
        os._exit(3)
    lrmoe_hf.agree_on_overflow(scaler, optimizer)


@pytest.mark.distributed
def test_a_rank_that_is_lost_is_named_where_the_other_waits(pool2: Pool, saved: str) -> None:
    first, _ = pool2.outcomes(agree_with_one_that_leaves, saved, limit_s=LIMIT_S)
    assert isinstance(first.error, RankError)
    assert str(first.error).startswith("agreeing on an overflow: some rank was lost")


@pytest.mark.distributed
def test_an_inf_in_a_shard_of_experts_makes_four_skip(pool4: Pool, saved: str) -> None:
    layout = {"fsdp_size": 4, "ep_size": 2, "ep_implementation": "lrmoe"}
    found = pool4.run(overflow_on_one_rank, saved, layout, EXPERTS, limit_s=LIMIT_S)
    assert all(one == found[0] for one in found)
    assert found[0]["moved"] == [True, False, True]
