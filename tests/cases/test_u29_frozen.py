"""U29: frozen parts cost no gradient and no memory for one, are read at call time, and thaw."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lrmoe import LRMoEConfig, RankError
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool, world
from tests.integrations.models import assert_same, make_model, make_tokens, run

EXACT = LRMoEConfig(max_drop=0)
PRUNED = LRMoEConfig(max_drop=0.4, warmup_steps=0)
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
# What stays trained, by what is frozen.
FROZEN: dict[str, Callable[[str], bool]] = {
    "experts": lambda name: not name.endswith(EXPERTS),
    "w1": lambda name: not name.endswith("experts.gate_up_proj"),
    "w2": lambda name: not name.endswith("experts.down_proj"),
    "router": lambda name: not name.endswith("gate.weight"),
    "all but the router": lambda name: name.endswith("gate.weight"),
    "all but one layer's experts": lambda name: name.endswith(EXPERTS) and "layers.1." in name,
}


def freeze(model: PreTrainedModel, kind: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(FROZEN[kind](name))


def held(handle: lrmoe_hf.Handle) -> dict[str, int]:
    """Bytes of weight gradients, summed over the calls: measured, and predicted."""
    records = handle.telemetry.drain()
    found = {"measured": sum(r.mem.get("grads", 0) for r in records)}
    return found | {"predicted": sum(r.mem_predicted.get("grads", 0) for r in records)}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", FROZEN)
def test_what_is_trained_is_exact_and_the_rest_is_left_alone(kind: str, checkpointing: bool) -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    freeze(eager, kind)
    model = copy.deepcopy(eager)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    handle = lrmoe_hf.enable(model, EXACT)
    found = run(model, ids)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found.keys() == {"loss", "logits"} | trained
    assert_same(found, eager, ids)
    frozen_bytes = held(handle)
    model.requires_grad_(True)
    eager.requires_grad_(True)
    assert_same(run(model, ids), eager, ids)
    assert held(handle)["measured"] > frozen_bytes["measured"] or kind == "router"


def test_no_memory_for_gradients_that_nobody_asked_for() -> None:
    model, ids = make_model("qwen3"), make_tokens()
    handle = lrmoe_hf.enable(model, EXACT)
    sizes = {}
    for kind in ("router", "w1", "w2", "experts"):
        freeze(model, kind)
        run(model, ids)
        sizes[kind] = held(handle)
    assert all(
        size["measured"] == size["predicted"] for kind, size in sizes.items() if kind in ("router", "experts")
    )
    assert sizes["experts"] == {"measured": 0, "predicted": 0}
    assert sizes["w1"]["measured"] + sizes["w2"]["measured"] == sizes["router"]["measured"]


@pytest.mark.parametrize("estimator", ["sampled", "topk"])
def test_the_kept_pairs_do_not_depend_on_what_is_frozen(estimator: str) -> None:
    """The norm of the down projection's input is needed for scores, whether its weight is trained or not."""
    model, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    config = PRUNED.replace(estimator=estimator)
    handle = lrmoe_hf.enable(model, config)
    whole = run(model, ids)
    handle.disable()
    freeze(model, "experts")
    lrmoe_hf.enable(model, config)
    part = run(model, ids)
    for name in part:
        torch.testing.assert_close(part[name], whole[name], rtol=1e-10, atol=1e-13, msg=name)


def test_thawing_between_steps_trains_what_was_thawed() -> None:
    model, ids = make_model("qwen3"), make_tokens()
    freeze(model, "experts")
    handle = lrmoe_hf.enable(model, PRUNED)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    handle.attach(optimizer)
    weight = model.model.layers[1].mlp.experts.down_proj
    moved = []
    for thawed in (False, True, False):
        weight.requires_grad_(thawed)
        before = weight.detach().clone()
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        moved.append(not torch.equal(before, weight))
    assert moved == [False, True, False]


def test_nothing_trainable_before_the_layer_and_nothing_at_all() -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    model = copy.deepcopy(eager)
    handle = lrmoe_hf.enable(model, PRUNED)
    model.requires_grad_(False)
    out = model(input_ids=ids, labels=ids)
    assert not out.loss.requires_grad
    torch.testing.assert_close(out.logits, eager(input_ids=ids).logits, rtol=1e-10, atol=1e-12)
    assert handle.summary()["calls"] == 0


def cut_model() -> tuple[PreTrainedModel, lrmoe_hf.Handle]:
    model = make_model("qwen3", num_hidden_layers=1)
    lrmoe_hf.shard_experts(model, world())
    return model, lrmoe_hf.enable(model, EXACT)


def frozen_everywhere() -> None:
    model, _ = cut_model()
    model.requires_grad_(False)
    assert not model(input_ids=make_tokens(), labels=make_tokens()).loss.requires_grad
    model.lm_head.weight.requires_grad_(True)  # above the layer: its backward is entered on no rank
    model(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad is None


def frozen_on_one_rank() -> str:
    model, _ = cut_model()
    if dist.get_rank() == 1:
        for parameter in lrmoe_hf.expert_parameters(model):
            parameter.requires_grad_(False)
    with pytest.raises(RankError) as refusal:
        model(input_ids=make_tokens(), labels=make_tokens())
    return str(refusal.value)


@pytest.mark.distributed
def test_all_ranks_enter_backward_or_none(pool2: Pool) -> None:
    pool2.run(frozen_everywhere)
    first, second = pool2.run(frozen_on_one_rank)
    assert first == second
    assert "gradients" in first
