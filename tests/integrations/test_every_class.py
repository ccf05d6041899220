"""Every experts class of the installed Transformers is either computed exactly or refused: none in between."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lrmoe import LRMoEConfig, UnsupportedError
from lrmoe.integrations import transformers as lrmoe_hf

MODELS = Path(transformers.__file__).parent / "models"
DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)\(", re.MULTILINE)
EXPERTS, HIDDEN, WIDTH = 4, 8, 6


def classes() -> Iterator[tuple[str, str, str]]:
    """(class, modeling module, configuration module) of everything decorated."""
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        package = f"transformers.models.{file.parent.name}"
        for name in DECORATED.findall(file.read_text(encoding="utf-8")):
            yield name, f"{package}.{file.stem}", f"{package}.configuration_{file.parent.name}"


def build(cls: Any, configurations: str) -> Any:
    """The class from the first configuration that fits, with small weights; None where no default one does."""
    found = inspect.getmembers(importlib.import_module(configurations), inspect.isclass)
    for name, config in found:
        if not name.endswith("Config") or name == "PreTrainedConfig":
            continue
        try:
            with torch.device("meta"):
                experts = cls(config())
        except Exception:  # a configuration of another part of the model
            continue
        experts.num_experts = EXPERTS
        for projection, shape in {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}.items():
            if hasattr(experts, projection):
                setattr(experts, projection, nn.Parameter(torch.randn(EXPERTS, *shape, dtype=torch.float64)))
        experts.config = copy.copy(experts.config)
        experts.config._experts_implementation_internal = "eager"
        return experts
    return None


def outcome(experts: Any) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    ids = torch.rand(20, EXPERTS, generator=generator).topk(2).indices
    weights = torch.rand(20, 2, dtype=torch.float64, generator=generator).requires_grad_()
    experts.zero_grad()
    out = experts(hidden, ids, weights)
    out.square().sum().backward()
    return {
        "out": out.detach(),
        "hidden": hidden.grad,
        "weights": weights.grad,
        "gate_up": experts.gate_up_proj.grad.clone(),
        "down": experts.down_proj.grad.clone(),
    }


@pytest.mark.filterwarnings("ignore")
def test_every_experts_class_is_exact_or_refused() -> None:
    exact, refused = [], []
    for name, modeling, configurations in classes():
        torch.manual_seed(0)
        experts = build(getattr(importlib.import_module(modeling), name), configurations)
        if experts is None:
            continue
        model = nn.ModuleList([experts])
        try:
            handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0))
        except UnsupportedError as refusal:
            refused.append(str(refusal))
            continue
        ours = outcome(experts)
        handle.disable()
        for key, theirs in outcome(experts).items():
            torch.testing.assert_close(ours[key], theirs, rtol=1e-9, atol=1e-9, msg=f"{name}: {key}")
        exact.append(name)
    assert {"Qwen3MoeExperts", "Glm4MoeExperts", "MixtralExperts", "DeepseekV3Experts"} <= set(exact)
    for name in ("GptOssExperts", "DeepseekV4Experts", "NemotronHExperts", "MuseSparkExperts"):
        assert any(f"0 ({name}): lrmoe does not support" in message for message in refused)
    assert len(exact) >= 40
