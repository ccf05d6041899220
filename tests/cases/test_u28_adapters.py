"""U28: LoRA on fused experts trains what it says, with the pruned backward too, and is the same on all ranks."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from lrmoe import LRMoEConfig, UnsupportedError
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool, world
from tests.integrations.models import make_model, make_tokens
from tests.integrations.ranks import LIMIT_S, load, save_models

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft.*")
EXACT = LRMoEConfig(max_drop=0)
PRUNED = LRMoEConfig(max_drop=0.4, warmup_steps=0)
# As PEFT names fused experts: what Transformers calls the parameters, with as much of the path as tells them apart.
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]
RANK = 4


def adapted(model: PreTrainedModel, *, experts: bool = True, attention: bool = False) -> Any:
    """A PEFT model with adapters that change something, the same on every rank."""
    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=8,
        target_modules=ATTENTION if attention else [],
        target_parameters=EXPERTS if experts else None,
    )
    found = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return found.train()


def trained(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def grads(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("enable_first", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_adapters_on_experts_equal_the_eager_model(attention: bool, enable_first: bool) -> None:
    base, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    eager = adapted(copy.deepcopy(base), attention=attention)
    if enable_first:
        lrmoe_hf.enable(base, EXACT)
    model = adapted(base, attention=attention)
    if not enable_first:
        lrmoe_hf.enable(model, EXACT)
    names = trained(model).keys()
    assert all("lora_" in name for name in names)
    experts = sum(p.numel() for name, p in trained(model).items() if "experts" in name)
    # (E * r) x (in + out) of both projections, in two layers: 8 experts, H 32, 2I 32, I 16
    assert experts == 2 * 8 * RANK * ((32 + 32) + (16 + 32))
    found, wanted = grads(model, ids), grads(eager, ids)
    assert found.keys() == wanted.keys() == names
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.parametrize("estimator", ["sampled", "topk"])
def test_pruned_scores_see_the_adapted_projection(estimator: str) -> None:
    """The adapters' gradients are those of the merged weights, pruned alike, through W + scale * B A."""
    config, ids = PRUNED.replace(estimator=estimator), make_tokens()
    model = adapted(make_model("qwen3", dtype=torch.float64))
    merged = copy.deepcopy(model).merge_and_unload().requires_grad_(True)
    handles = [lrmoe_hf.enable(one, config) for one in (model, merged)]
    found, dense = grads(model, ids), grads(merged, ids)
    ours, theirs = ([record.quota_E for record in handle.telemetry.drain()] for handle in handles)
    assert ours == theirs
    for layer in range(2):
        wrapped = model.base_model.model.model.layers[layer].mlp.experts
        prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
        for place, one in ((f"{prefix}.", wrapped), (f"{prefix}.base_layer.", wrapped.base_layer)):
            d_EOI = dense[f"model.layers.{layer}.mlp.experts.{one.parameter_name}"]
            a_ERI = one.lora_A["default"].weight.view(8, RANK, -1)
            wanted = 2.0 * torch.einsum("eoi,eri->eor", d_EOI, a_ERI)
            b_OER = found[f"{place}lora_B.default.weight"].view(d_EOI.shape[1], RANK, 8)
            torch.testing.assert_close(b_OER.permute(2, 0, 1), wanted, rtol=1e-9, atol=1e-13)


def test_attention_only_leaves_the_experts_frozen_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    base, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    eager, model = (adapted(copy.deepcopy(base), experts=False, attention=True) for _ in range(2))
    capfd.readouterr()
    handle = lrmoe_hf.enable(model, EXACT)
    assert "; no expert weight is trained" in capfd.readouterr().err
    found, wanted = grads(model, ids), grads(eager, ids)
    assert found.keys() == wanted.keys() == trained(model).keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-13, msg=name)
    assert all(record.mem.get("grads", 0) == 0 for record in handle.telemetry.drain())
    handle.disable()
    lrmoe_hf.enable(adapted(base), EXACT)
    assert "no expert weight" not in capfd.readouterr().err


@pytest.mark.parametrize("names", [["mlp.experts.gate_proj"], ["experts.w1", "experts.w2"]])
def test_names_that_match_nothing_raise(names: list[str]) -> None:
    config = peft.LoraConfig(r=RANK, target_modules=[], target_parameters=names)
    with pytest.raises(ValueError, match="no `target_parameters` found"):
        peft.get_peft_model(make_model("qwen3"), config)
    with pytest.raises(ValueError, match="is not supported"):
        peft.get_peft_model(make_model("qwen3"), peft.LoraConfig(r=RANK, target_modules=["experts"]))


def test_clipping_counts_adapters() -> None:
    model = adapted(make_model("qwen3", dtype=torch.float64), attention=True)
    handle = lrmoe_hf.enable(model, EXACT)
    found = grads(model, make_tokens())
    norm = torch.stack([grad.norm() for grad in found.values()]).norm()
    torch.testing.assert_close(lrmoe_hf.clip_grad_norm_(handle, 1.0), norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_quantised_experts_are_refused_by_name(dtype: torch.dtype) -> None:
    model = make_model("qwen3")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(dtype), requires_grad=False)
    named = re.escape(
        f"model.layers.1.mlp.experts (Qwen3MoeExperts): lrmoe does not support down_proj.dtype={dtype}"
    )
    with pytest.raises(UnsupportedError, match=named):
        lrmoe_hf.enable(model)
    wrapped = adapted(model, experts=False, attention=True)
    with pytest.raises(UnsupportedError, match="quantised expert weights"):
        lrmoe_hf.enable(wrapped)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Qwen3-MoE in float32."""
    return save_models(tmp_path_factory.mktemp("models"), ["qwen3"], torch.float32)["qwen3"]


def six_steps(path: str, kind: str) -> dict[str, Tensor]:
    """Adapters after six steps: on experts and attention under DDP, on attention under EP."""
    rank, ep = dist.get_rank(), kind == "ep"
    layout: dict[str, Any] = {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "lrmoe"} if ep else {}
    model = adapted(load(path, torch.float32, **layout), experts=not ep, attention=True)
    handle = lrmoe_hf.enable(model, PRUNED)
    call = model if ep else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained(model).values(), lr=1e-2)
    handle.attach(optimizer)
    for step in range(6):
        optimizer.zero_grad()
        ids = make_tokens(1, 6 + rank, seed=10 * step + rank)
        call(input_ids=ids, labels=ids).loss.backward()
        if ep:  # which FSDP2 does not know of
            for parameter in trained(model).values():
                dist.all_reduce(parameter.grad)
        lrmoe_hf.clip_grad_norm_(model, 1.0)
        optimizer.step()
    assert handle.summary()["kept_share"] < 0.7
    return {name: p.detach().clone() for name, p in trained(model).items()}


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ddp", "ep"])
def test_adapters_stay_the_same_on_both_ranks(pool2: Pool, saved: str, kind: str) -> None:
    first, second = pool2.run(six_steps, saved, kind, limit_s=LIMIT_S)
    assert len(first) == (16 if kind == "ddp" else 8)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def on_spread_experts(path: str, cut: bool) -> str:
    layout: dict[str, Any] = {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "lrmoe"}
    model = adapted(load(path, torch.float32, **({} if cut else layout)))
    with pytest.raises(UnsupportedError) as refusal:
        lrmoe_hf.shard_experts(model, world()) if cut else lrmoe_hf.enable(model, EXACT)
    return str(refusal.value)


@pytest.mark.distributed
@pytest.mark.parametrize("cut", [False, True])
def test_adapters_around_experts_that_are_spread_are_refused(pool2: Pool, saved: str, cut: bool) -> None:
    for text in pool2.run(on_spread_experts, saved, cut, limit_s=LIMIT_S):
        assert (
            "layers.0.mlp.experts: adapters on experts that are spread over ranks are not supported" in text
        )


def cut_then_adapted(path: str) -> None:
    """Every rank has adapters for its own experts; together they are those of the whole model."""
    rank, ids = dist.get_rank(), [make_tokens(1, 9, seed=3), make_tokens(1, 6, seed=4)]
    eager = adapted(load(path, torch.float64))
    (sum(eager(input_ids=one, labels=one).loss for one in ids) / 2).backward()
    model = load(path, torch.float64)
    lrmoe_hf.shard_experts(model, world())
    model = adapted(model)
    theirs = dict(eager.named_parameters())
    with torch.no_grad():
        for name, parameter in trained(model).items():
            parameter.copy_(own_part(name, theirs[name], rank))
    lrmoe_hf.enable(model, EXACT)
    (model(input_ids=ids[rank], labels=ids[rank]).loss / 2).backward()
    for name, parameter in trained(model).items():
        whole = theirs[name].grad
        assert whole is not None
        wanted = own_part(name, whole, rank)
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-13, msg=name)
    grads_there = [p.grad for p in trained(eager).values() if p.grad is not None]
    norm = torch.stack([grad.norm() for grad in grads_there]).norm()
    torch.testing.assert_close(lrmoe_hf.clip_grad_norm_(model, 1.0), norm, rtol=1e-10, atol=0)


def own_part(name: str, whole: Tensor, rank: int) -> Tensor:
    """PEFT lays A out as (experts * r, in), and B as (out, r * experts) with the expert last."""
    if "lora_A" in name:
        return whole.chunk(2)[rank]
    return whole.view(whole.shape[0], RANK, 8).chunk(2, dim=2)[rank].reshape(whole.shape[0], -1)


@pytest.mark.distributed
def test_adapters_added_after_cutting_are_each_ranks_own(pool2: Pool, saved: str) -> None:
    pool2.run(cut_then_adapted, saved, limit_s=LIMIT_S)
