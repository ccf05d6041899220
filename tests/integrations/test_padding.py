"""U23 and U24 on whole models: padding carries no load, evaluation touches nothing, generation works."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lrmoe
from lrmoe import InputError, LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.integrations.transformers._padding import token_mask
from lrmoe.layer.padding import current_mask
from tests.integrations.models import assert_same, make_model, make_tokens, run

EXACT = LRMoEConfig(max_drop=0)
LENGTHS = (3, 8)


def padded_batch(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences of 3 and 8 tokens in 8 columns: ids, attention mask, labels."""
    ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        columns = slice(0, length) if side == "right" else slice(8 - length, 8)
        ids[row, columns] = make_tokens(1, length, seed=row)[0]
        mask[row, columns] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[
        mask.cumsum(-1) == 1
    ] = -100  # left of a sequence's first token there is nothing to predict it from
    return ids, mask, labels


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_run_equals_unpadded_run(name: str, side: str) -> None:
    eager = make_model(name, dtype=torch.float64)
    eager.set_attn_implementation("sdpa")  # the eager kind gives NaN for rows without any key in float64
    model = copy.deepcopy(eager)
    handle = lrmoe_hf.enable(model, EXACT)
    ids, mask, labels = padded_batch(side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    actual = run(model, ids, attention_mask=mask, labels=labels, position_ids=positions)
    assert {record.pairs for record in handle.telemetry.drain()} == {2 * sum(LENGTHS)}

    eager.zero_grad()
    predicted = [length - 1 for length in LENGTHS]
    for row, length in enumerate(LENGTHS):
        alone = make_tokens(1, length, seed=row)
        loss = eager(input_ids=alone, labels=alone).loss
        (loss * predicted[row] / sum(predicted)).backward()
    for key, parameter in eager.named_parameters():
        if parameter.grad is not None:
            error = (actual[key] - parameter.grad).abs().max()
            assert error <= 1e-6 * parameter.grad.abs().max(), key  # routers and attention round in float32


@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_quotas_come_from_real_tokens_only(use_reentrant: bool | None) -> None:
    model = make_model("qwen3")
    if use_reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=0))
    ids, mask, labels = padded_batch("right")
    run(model, ids, attention_mask=mask, labels=labels)
    records = handle.telemetry.drain()
    assert [(record.pairs, record.kept) for record in records] == [(22, 11)] * 2


def test_nan_in_padding_does_not_spread() -> None:
    model = make_model("qwen3", dtype=torch.float64)
    lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.3, warmup_steps=0))
    block = model.model.layers[0].mlp
    hidden = torch.randn(2, 8, 32, dtype=torch.float64)
    mask = padded_batch("right")[1]
    dirty = hidden.masked_fill(mask[..., None] == 0, float("nan")).requires_grad_()
    with lrmoe.padding(mask):
        out = block(dirty)
    assert torch.equal(out[mask == 0], torch.zeros(5, 32, dtype=torch.float64))
    out.sum().backward()
    assert out.isfinite().all()
    assert block.experts.gate_up_proj.grad.isfinite().all()
    assert block.experts.down_proj.grad.isfinite().all()
    assert dirty.grad is not None
    assert dirty.grad[mask == 1].isfinite().all()


def test_a_batch_of_padding_only() -> None:
    model = make_model("qwen3")
    lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.3, warmup_steps=0))
    block = model.model.layers[0].mlp
    hidden = torch.randn(2, 4, 32, requires_grad=True)
    with lrmoe.padding(torch.zeros(2, 4, dtype=torch.bool)):
        out = block(hidden)
    assert not out.any()
    out.sum().backward()
    assert not block.experts.gate_up_proj.grad.any()


def test_all_ones_marks_nothing_and_positional_masks_are_read() -> None:
    ids, mask, _ = padded_batch("left")
    assert token_mask({"input_ids": ids, "attention_mask": torch.ones_like(mask)}) is None
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, EXACT)
    model(ids, mask).logits.sum().backward()
    assert {record.pairs for record in handle.telemetry.drain()} == {22}


@pytest.mark.parametrize("other", [None, torch.zeros(2, 1, 8, 8), {"full_attention": None}])
def test_other_kinds_of_masks_are_left_alone(other: object) -> None:
    assert token_mask({"input_ids": torch.ones(2, 8), "attention_mask": other}) is None


@pytest.mark.parametrize("shape", [(2, 7), (1, 8), (3, 8)])
def test_a_mask_of_the_wrong_shape_is_refused(shape: tuple[int, int]) -> None:
    model = make_model("qwen3")
    lrmoe_hf.enable(model, EXACT)
    ids = make_tokens(2, 8)
    with pytest.raises(InputError, match="attention_mask has shape"):
        model(input_ids=ids, attention_mask=torch.zeros(shape))
    run(model, ids)  # nothing is left open


def test_the_context_closes_when_forward_fails() -> None:
    model = make_model("qwen3")
    lrmoe_hf.enable(model, EXACT)
    ids, mask, _ = padded_batch("left")
    with pytest.raises(TypeError):
        model(input_ids=ids, attention_mask=mask, labels=3)
    hidden = torch.randn(1, 5, 32)
    assert model.model.layers[0].mlp(hidden).abs().sum(-1).all()


def test_two_models_in_one_container_read_their_own_masks() -> None:
    models = torch.nn.ModuleList([make_model("qwen3"), make_model("glm4")])
    handle = lrmoe_hf.enable(models, EXACT)
    ids, mask, labels = padded_batch("right")
    run(models[0], ids, attention_mask=mask, labels=labels)
    run(models[1], ids, labels=labels)
    assert [record.pairs for record in handle.telemetry.drain()] == [22, 22, 32]


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_with_left_padding(name: str, use_cache: bool) -> None:
    eager = make_model(name, dtype=torch.float64).eval()
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, EXACT)
    ids, mask, _ = padded_batch("left")
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache, "pad_token_id": 0}
    ours = model.generate(ids, attention_mask=mask, **options)
    theirs = eager.generate(ids, attention_mask=mask, **options)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_touches_nothing(grad_mode: type) -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    model = copy.deepcopy(eager)
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.4, warmup_steps=0))
    before = run(model, ids)
    state = handle.state_dict()
    model.eval()
    with grad_mode():
        logits = model(input_ids=ids).logits
    assert handle.state_dict() == state
    torch.testing.assert_close(logits, before["logits"], rtol=1e-12, atol=0)
    model.train()

    again = copy.deepcopy(eager)
    twin = lrmoe_hf.enable(again, LRMoEConfig(max_drop=0.4, warmup_steps=0))
    run(again, ids)
    for handle_ in (handle, twin):
        handle_.step()
    ours, theirs = run(model, ids), run(again, ids)
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


def test_auxiliary_loss_still_reaches_the_router() -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, EXACT)
    assert_same(run(model, ids, output_router_logits=True), eager, ids, output_router_logits=True)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_copied_model_carries_no_mask_hooks(pickled: bool, tmp_path: Path) -> None:
    """The copy is not enabled; enabling it must not leave two hooks whose masks outlive the forward."""
    model = make_model("qwen3", dtype=torch.float64)
    plain = copy.deepcopy(model)
    lrmoe_hf.enable(model, EXACT)
    if pickled:
        torch.save(model, tmp_path / "model.pt")
        other = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        other = copy.deepcopy(model)
    lrmoe_hf.enable(other, EXACT)
    ids, mask, labels = padded_batch("right")
    run(other, ids, attention_mask=mask, labels=labels)
    assert current_mask(16) is None
    wanted, found = (run(m, ids)["logits"] for m in (plain, other))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_two_threads_run_one_model_with_their_own_masks() -> None:
    model = make_model("qwen3", dtype=torch.float64).eval()
    lrmoe_hf.enable(model, EXACT)
    ids, mask, _ = padded_batch("right")
    barrier = threading.Barrier(2, timeout=20)

    def meet(*_: object) -> None:
        barrier.wait()

    hook = model.model.layers[0].register_forward_pre_hook(meet)
    wait = model.lm_head.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        jobs = [pool.submit(lambda: model(input_ids=ids, attention_mask=mask).logits) for _ in range(2)]
        first, second = (job.result(timeout=60) for job in jobs)
    hook.remove()
    wait.remove()
    assert torch.equal(first, second)
