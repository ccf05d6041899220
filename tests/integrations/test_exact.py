"""With nothing dropped an enabled model's numbers are the eager model's, for every supported class."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from tests.integrations.models import SUPPORTED, assert_same, make_model, make_tokens, run

EXACT = LRMoEConfig(max_drop=0)
PRUNED = LRMoEConfig(max_drop=0.4, warmup_steps=0)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_enabled_model_equals_eager_model(name: str, dtype: torch.dtype) -> None:
    eager, ids = make_model(name, dtype=dtype), make_tokens()
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, EXACT)
    assert_same(run(model, ids), eager, ids)


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
def test_bfloat16_model_equals_eager_model(name: str) -> None:
    eager, ids = make_model(name, dtype=torch.bfloat16, initializer_range=0.005), make_tokens()
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, EXACT)
    actual = run(model, ids)
    exact, plain = run(eager.double(), ids), run(eager.bfloat16(), ids)
    for key in ("loss", "logits"):
        error, limit = ((x[key].double() - exact[key]).abs().max() for x in (actual, plain))
        assert error <= 2 * limit + 4 * torch.finfo(torch.bfloat16).eps * exact[key].abs().max()


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    eager, ids = make_model(name, dtype=torch.float64), make_tokens()
    model = copy.deepcopy(eager)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    handle = lrmoe_hf.enable(model, EXACT)
    assert_same(run(model, ids), eager, ids)
    calls = handle.summary()["calls"]
    assert calls == len(handle.layers)  # the recompute is the same call, not another


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_pruned_gradients_do_not_depend_on_checkpointing(use_reentrant: bool) -> None:
    plain, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    replayed = copy.deepcopy(plain)
    replayed.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    lrmoe_hf.enable(plain, PRUNED)
    lrmoe_hf.enable(replayed, PRUNED)
    ours, theirs = run(replayed, ids), run(plain, ids)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-12, msg=key)


@pytest.mark.parametrize("estimator", ["sampled", "topk"])
def test_pruning_changes_gradients_and_nothing_of_the_forward(estimator: str) -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    model = copy.deepcopy(eager)
    handle = lrmoe_hf.enable(model, PRUNED.replace(estimator=estimator))
    pruned, exact = run(model, ids), run(eager, ids)
    for key in ("loss", "logits"):
        torch.testing.assert_close(pruned[key], exact[key], rtol=1e-10, atol=0)
    changed = pruned["model.layers.0.mlp.experts.down_proj"] - exact["model.layers.0.mlp.experts.down_proj"]
    assert changed.abs().max() > 1e-3 * exact["model.layers.0.mlp.experts.down_proj"].abs().max()
    pairs = ids.numel() * 2
    for record in handle.telemetry.drain():
        assert record.kept == pairs - int(0.4 * pairs)


@pytest.mark.parametrize(
    "frozen", [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",), ("gate.weight",)], ids=str
)
def test_frozen_parts_get_no_gradient_and_thaw(frozen: tuple[str, ...]) -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    for name, parameter in eager.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, EXACT)
    actual = run(model, ids)
    assert not any(name.endswith(frozen) for name in actual)
    assert_same(actual, eager, ids)
    for parameter in [*model.parameters(), *eager.parameters()]:
        parameter.requires_grad_(True)
    assert_same(run(model, ids), eager, ids)


def test_one_experts_module_used_in_two_layers() -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    layers = eager.model.layers
    layers[1].mlp.experts = layers[0].mlp.experts
    model = copy.deepcopy(eager)
    handle = lrmoe_hf.enable(model, EXACT)
    assert list(handle.layers) == ["model.layers.0.mlp.experts"]
    assert_same(run(model, ids), eager, ids)
    handle.step()
    assert_same(run(model, ids), eager, ids)


def test_tied_parameters_of_two_experts_modules() -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    first, second = (layer.mlp.experts for layer in eager.model.layers)
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    model = copy.deepcopy(eager)
    handle = lrmoe_hf.enable(model, EXACT)
    assert len(handle.layers) == 2
    assert_same(run(model, ids), eager, ids)


def test_micro_batches_add_up() -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens(batch=4)
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, EXACT)
    for micro in ids.split(1):
        (model(input_ids=micro, labels=micro).loss / 4).backward()
    eager(input_ids=ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_weights_computed_by_an_adapter() -> None:
    """What adapter libraries do to fused experts: the weight is a function of a frozen base and a trained part."""

    class LowRank(nn.Module):
        def __init__(self, base: torch.Tensor) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(base.shape[0], base.shape[1], 2, dtype=base.dtype) * 0.1)
            self.b = nn.Parameter(torch.randn(base.shape[0], 2, base.shape[2], dtype=base.dtype) * 0.1)

        def forward(self, base: torch.Tensor) -> torch.Tensor:
            return base + self.a @ self.b

    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    for layer in eager.model.layers:
        experts = layer.mlp.experts
        experts.requires_grad_(False)
        for projection in ("gate_up_proj", "down_proj"):
            adapter = LowRank(getattr(experts, projection))
            nn.utils.parametrize.register_parametrization(experts, projection, adapter)
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, EXACT)
    actual = run(model, ids)
    assert any(name.endswith(".a") for name in actual)
    assert_same(actual, eager, ids)


def test_gradients_in_eval_mode_are_complete_and_warned_of_once() -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64).eval(), make_tokens()
    model = copy.deepcopy(eager)
    handle = lrmoe_hf.enable(model, PRUNED)
    with torch.no_grad():
        model(input_ids=ids)
    with pytest.warns(UserWarning, match=r"evaluation mode.*model\.train\(\)"):
        actual = run(model, ids)
    assert_same(actual, eager, ids)
    assert_same(run(model, ids), eager, ids)  # warnings are errors
    assert handle.summary()["calls"] == 0


def test_autocast_stays_near_the_eager_model() -> None:
    eager, ids = make_model("qwen3"), make_tokens()
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, EXACT)
    exact = run(copy.deepcopy(eager).double(), ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, plain = run(model, ids), run(eager, ids)
    for name in ("logits", "model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"):
        assert actual[name].dtype == plain[name].dtype
        error, limit = ((found[name] - exact[name]).norm() for found in (actual, plain))
        assert error <= 1.5 * limit, name


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
def test_compiled_block_equals_eager_block() -> None:
    eager = make_model("qwen3", dtype=torch.float64)
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, EXACT)
    block, ours_block = eager.model.layers[0].mlp, model.model.layers[0].mlp
    compiled = torch.compile(ours_block, backend="eager")
    for length in (12, 7, 1):
        hidden = torch.randn(2, length, 32, dtype=torch.float64)
        ours, theirs = compiled(hidden), block(hidden)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        ours.square().sum().backward()
        theirs.square().sum().backward()
    for actual, expected in zip(ours_block.parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-10, atol=1e-10)


def test_implementation_name_without_enable_is_exact() -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    model = copy.deepcopy(eager)
    lrmoe_hf.register()
    model.set_experts_implementation("lrmoe")
    assert_same(run(model, ids), eager, ids)
