"""Whatever the layer does not execute is refused by name, before anything is changed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lrmoe import ConfigError, LRMoEConfig, UnsupportedError
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.integrations.transformers._compat import check_version
from tests.integrations.models import make_model

FIRST = "model.layers.0.mlp.experts"


@pytest.mark.filterwarnings("ignore")
def test_gpt_oss_is_refused_with_every_flag() -> None:
    model = make_model("gpt_oss")
    with pytest.raises(UnsupportedError, match=FIRST) as refusal:
        lrmoe_hf.enable(model)
    for flag in ("has_bias=True", "is_transposed=True", "is_concatenated=False", "_apply_gate"):
        assert flag in str(refusal.value)


def _set(flag: str, value: object) -> Callable[[nn.Module], None]:
    return lambda experts: setattr(experts, flag, value)


def _own_gate(experts: Any) -> None:
    experts._apply_gate = lambda rows: rows


def _cut_width(experts: Any) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj[..., :-1].detach().clone())


def _quantise(experts: Any) -> None:
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach().to(torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("has_gate", False), "has_gate=False"),
        (_set("has_bias", True), "has_bias=True"),
        (_set("is_transposed", True), "is_transposed=True"),
        (_set("is_concatenated", False), "is_concatenated=False"),
        (_set("has_post_expert_norm", True), "has_post_expert_norm=True"),
        (_set("act_fn", nn.ReLU()), "act_fn=ReLU()"),
        (_set("act_fn", nn.Bilinear(1, 1, 1)), "act_fn=Bilinear"),
        (_set("num_experts", 7), "num_experts=7"),
        (_set("_is_expert_parallel", True), "ep_implementation='lrmoe'"),
        (_own_gate, "_apply_gate"),
        (_cut_width, "down_proj (8, 32, 15)"),
        (_quantise, "gate_up_proj.dtype=torch.int8"),
    ],
)
def test_a_flag_of_the_second_layer_is_refused_and_the_first_is_untouched(
    change: Callable[[nn.Module], None], named: str
) -> None:
    model = make_model("qwen3")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    change(second)
    with pytest.raises(UnsupportedError, match=re.escape(named)) as refusal:
        lrmoe_hf.enable(model)
    assert "model.layers.1.mlp.experts (Qwen3MoeExperts)" in str(refusal.value)
    assert first.config._experts_implementation == "eager"
    assert not hasattr(first, "_lrmoe")
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("hidden_act", "kind"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh")]
)
def test_activation_is_recognised(hidden_act: str, kind: str) -> None:
    handle = lrmoe_hf.enable(make_model("qwen3", hidden_act=hidden_act))
    assert {layer.activation for layer in handle.layers.values()} == {kind}


@pytest.mark.parametrize("hidden_act", ["relu", "quick_gelu", "gelu_fast", "mish", "gelu_10"])
def test_other_activations_are_refused(hidden_act: str) -> None:
    with pytest.raises(UnsupportedError, match="an activation other than silu, gelu, gelu_tanh"):
        lrmoe_hf.enable(make_model("qwen3", hidden_act=hidden_act))


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Linear has no experts module"):
        lrmoe_hf.enable(nn.Linear(2, 2))


def test_enabling_twice_is_an_error_until_disabled() -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model)
    with pytest.raises(ConfigError, match=r"enabled on this model already; call handle.disable\(\) first"):
        lrmoe_hf.enable(model)
    handle.disable()
    lrmoe_hf.enable(model, LRMoEConfig(max_drop=0))


@pytest.mark.parametrize("version", ["4.57.1", "5.22.0", "5.0.0rc1"])
def test_an_old_transformers_is_refused(version: str) -> None:
    with pytest.raises(
        UnsupportedError,
        match=rf"transformers {version} is installed, lrmoe needs .*>=5.23.*install -U transformers",
    ):
        check_version(version)


@pytest.mark.parametrize("version", ["5.23.0", "5.24.0.dev0", "6.0.0"])
def test_a_new_transformers_is_accepted(version: str) -> None:
    check_version(version)


def test_missing_transformers_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import lrmoe\n"
        "try:\n"
        "    import lrmoe.integrations.transformers\n"
        "except lrmoe.MissingExtraError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert 'pip install -e ".[transformers]"' in done.stdout


def test_importing_registers_nothing() -> None:
    code = (
        "import lrmoe.integrations.transformers as lrmoe_hf\n"
        "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as experts\n"
        "from transformers.distributed.expert_parallel import EPImplementationInterface\n"
        "ep = EPImplementationInterface()\n"
        "assert 'lrmoe' not in experts and 'lrmoe' not in ep\n"
        "lrmoe_hf.register(); lrmoe_hf.register()\n"
        "assert 'lrmoe' in experts and ep['lrmoe'] is lrmoe_hf.LRMoEEP\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
