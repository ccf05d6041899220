"""U16: the host's balance loss keeps value and gradient, whatever backward leaves out and however ranks share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool, world
from tests.integrations.models import make_model, make_tokens

MODES = {
    "exact": LRMoEConfig(max_drop=0),
    "sampled": LRMoEConfig(max_drop=0.5, warmup_steps=0),
    "topk": LRMoEConfig(max_drop=0.5, warmup_steps=0, estimator="topk"),
    "forward": LRMoEConfig(max_drop=0.5, warmup_steps=0, select_in="forward", score="alpha"),
}
COEFFICIENT = 1e-2


def model_of(name: str, layers: int = 1, **changes: Any) -> PreTrainedModel:
    """A tiny model in float64 that returns its balance loss."""
    return make_model(
        name,
        dtype=torch.float64,
        num_hidden_layers=layers,
        output_router_logits=True,
        router_aux_loss_coef=COEFFICIENT,
        **changes,
    )


def enabled(eager: PreTrainedModel, config: LRMoEConfig) -> PreTrainedModel:
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, config)
    return model


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    """Of every parameter that the loss reaches."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, wanted in theirs.items():
        found = ours.get(name)
        if found is None:  # eager experts give zeros where the layer is not entered
            assert not bool(wanted.any()), name
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
@pytest.mark.parametrize("mode", MODES)
def test_with_no_main_loss_the_router_learns_and_the_experts_do_not(name: str, mode: str) -> None:
    """One MoE layer: pruning leaves out pairs of the experts, and the balance loss does not pass through those."""
    eager, ids = model_of(name), make_tokens()
    model = enabled(eager, MODES[mode])
    ours, theirs = (gradients(one, one(input_ids=ids, labels=ids).aux_loss) for one in (model, eager))
    router = "model.layers.0.mlp.gate.weight"
    assert float(ours[router].norm()) > 1e-4
    assert all(not bool(grad.any()) for key, grad in ours.items() if ".experts." in key)
    assert_alike(ours, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_its_share_of_the_loss_and_of_the_gradient_is_its_coefficient(mode: str) -> None:
    eager, ids = model_of("qwen3"), make_tokens()
    model, router = enabled(eager, MODES[mode]), "model.layers.0.mlp.gate.weight"
    out = model(input_ids=ids, labels=ids)
    alone = gradients(model, out.aux_loss)[router]
    plain = model(input_ids=ids, labels=ids, output_router_logits=False)
    torch.testing.assert_close(out.loss, plain.loss + COEFFICIENT * out.aux_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.aux_loss, eager(input_ids=ids, labels=ids).aux_loss, rtol=1e-12, atol=0)
    grads = []
    for balance in (True, False):  # the same kept set twice: copies start at the same call
        one = enabled(eager, MODES[mode])
        found = one(input_ids=ids, labels=ids, output_router_logits=balance)
        grads.append(gradients(one, found.loss)[router])
    share = grads[0] - grads[1]  # as exact as the host's softmax, which is in fp32
    torch.testing.assert_close(share, COEFFICIENT * alone, rtol=1e-4, atol=1e-6 * float(alone.abs().max()))


@pytest.mark.parametrize("valid", [(4, 6), (10, 1), (7, 0)], ids=str)
def test_micro_batches_with_other_numbers_of_valid_tokens(valid: tuple[int, int]) -> None:
    """What the host makes of its masks stays: also its own 0/0 of a micro-batch without a valid token."""
    eager, ids = model_of("qwen3"), make_tokens(batch=2, length=10)
    eager.set_attn_implementation("sdpa")  # the eager kind gives NaN for rows without any key in float64
    model, mask = enabled(eager, MODES["exact"]), torch.zeros(2, 10, dtype=torch.long)
    for row, length in enumerate(valid):
        mask[row, :length] = 1
    for one in (model, eager):
        one.zero_grad(set_to_none=True)
    for row in range(2):
        part = {"input_ids": ids[row : row + 1], "attention_mask": mask[row : row + 1]}
        ours, theirs = (one(**part).aux_loss for one in (model, eager))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0, equal_nan=True)
        if valid[row]:
            for loss in (ours, theirs):
                (COEFFICIENT * loss / 2).backward()
    router = [one.model.layers[0].mlp.gate.weight.grad for one in (model, eager)]
    assert bool(router[0].isfinite().all())
    assert float(router[0].norm()) > 0
    torch.testing.assert_close(*router, rtol=1e-9, atol=1e-14)


def test_a_batch_without_a_valid_token_adds_nothing_that_is_not_finite() -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64, num_hidden_layers=1), make_tokens(1, 6)
    eager.set_attn_implementation("sdpa")
    model = enabled(eager, MODES["sampled"])
    logits = model(input_ids=ids, attention_mask=torch.zeros_like(ids)).logits
    logits.square().mean().backward()
    experts = model.model.layers[0].mlp.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        assert weight.grad is None or not bool(weight.grad.any())


@pytest.mark.parametrize("name", ["glm4", "deepseek3"])
def test_a_bias_that_balances_without_a_loss_still_steers_and_stays(name: str) -> None:
    eager, ids = make_model(name, dtype=torch.float64), make_tokens()
    bias_name, bias = next(
        (key, value) for key, value in eager.named_buffers() if key.endswith("e_score_correction_bias")
    )
    bias.copy_(torch.linspace(-2, 2, bias.numel()))
    model, chosen = enabled(eager, MODES["sampled"]), []
    for one in (model, eager):
        one.get_submodule(bias_name.rsplit(".", 2)[0]).experts.register_forward_pre_hook(
            lambda _, args: chosen.append(args[1])
        )
        one(input_ids=ids, labels=ids).loss.backward()
    assert torch.equal(chosen[0], chosen[1])
    assert set(chosen[0].unique().tolist()) <= {4, 5, 6, 7}, "the bias must have decided"
    assert torch.equal(dict(model.named_buffers())[bias_name], bias)


def rank_gradient(split: bool, config: LRMoEConfig) -> dict[str, Tensor]:
    """Worker: this rank's sequence through the model, its experts spread over both ranks or all here."""
    model = model_of("qwen3")
    if split:
        lrmoe_hf.shard_experts(model, world())
        lrmoe_hf.enable(model, config)
    ids = make_tokens(batch=2)[dist.get_rank() : dist.get_rank() + 1]
    found = gradients(model, model(input_ids=ids, labels=ids).aux_loss)
    return {name: grad for name, grad in found.items() if ".experts." not in name}


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["exact", "sampled"])
def test_expert_parallelism_does_not_scale_it(pool2: Pool, mode: str) -> None:
    """Every rank's gradient is that of its own tokens: what data parallelism averages is as without lrmoe."""
    spread = pool2.run(rank_gradient, True, MODES[mode])
    for ours, theirs in zip(spread, pool2.run(rank_gradient, False, MODES[mode]), strict=True):
        assert "model.layers.0.mlp.gate.weight" in ours
        assert_alike(ours, theirs)
