"""Whether lrmoe can run the experts of a model: its own checks, on the model built without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lrmoe.doctor.finding import Finding
from lrmoe.errors import ConfigError, UnsupportedError, require_extra
from lrmoe.training.config import ModelConfig
from lrmoe.training.model import read_config
from lrmoe.training.presets import PRESETS


def look_at(name: str) -> Iterator[Finding]:
    """Findings about a preset, a folder or file with a transformers configuration, or a model in the local Hub cache.

    Raises:
        ConfigError: there is no such preset, folder or cached model. Nothing is downloaded.
        MissingExtraError: transformers is not installed.
    """
    config = _config(name)
    kind = type(config).__name__
    yield Finding(area="model", name="configuration", state="info", text=f"{name}: {kind}")
    if getattr(config, "quantization_config", None) is not None:
        text = "its checkpoint is quantised: quantised expert weights are refused; load it dequantised"
        yield Finding(area="model", name="weights", state="fault", text=text)
    try:
        model = _build(config)
    except Exception as error:  # whatever a model's code raises for a configuration that it does not like
        text = f"transformers cannot build it: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        yield Finding(area="model", name="experts", state="fault", text=text)
        return
    yield from _experts(model)


def _config(name: str) -> Any:
    hf = require_extra("transformers", "transformers")
    if name in PRESETS:
        return read_config(ModelConfig(preset=name))
    path = Path(name)
    if path.exists():
        return read_config(ModelConfig(preset=None, config=name))
    try:
        return hf.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--model {name}: neither a preset ({', '.join(PRESETS)}), nor a folder or file with a transformers "
            "configuration, nor a model in the local Hub cache; doctor downloads nothing: fetch the configuration "
            f"first, with `hf download {name} config.json`"
        ) from error


def _build(config: Any) -> nn.Module:
    """The model without weights."""
    hf = require_extra("transformers", "transformers")
    with torch.device("meta"):
        try:
            model: nn.Module = hf.AutoModelForCausalLM.from_config(config)
        except ValueError:  # no language model of that kind: whatever it is
            model = hf.AutoModel.from_config(config)
    return model


def _experts(model: nn.Module) -> Iterator[Finding]:
    """One finding where all is well, one for each reason where not."""
    from lrmoe.integrations.transformers._experts import find_experts, read_spec

    try:
        modules = find_experts(model)
    except UnsupportedError as error:
        yield Finding(area="model", name="experts", state="fault", text=str(error))
        return
    specs, reasons = [], Counter[str]()
    for name, module in modules.items():
        try:
            specs.append(read_spec(module, name))
        except UnsupportedError as error:
            reasons[str(error).removeprefix(f"{name} ")] += 1
    for reason, count in reasons.items():
        text = f"{count} of {len(modules)} experts modules: {reason}"
        yield Finding(area="model", name="experts", state="fault", text=text)
    if specs and not reasons:
        yield _supported(specs)


def _supported(specs: list[Any]) -> Finding:
    counts = sorted({spec.local_experts for spec in specs})
    first = specs[0]
    ranks = [str(n) for n in range(1, counts[0] + 1) if all(count % n == 0 for count in counts)]
    text = (
        f"supported: {len(specs)} MoE layers of {' or '.join(map(str, counts))} experts, hidden {first.hidden_size}, "
        f"width {first.intermediate_size}, {first.activation}; expert-parallel over {', '.join(ranks)} ranks"
    )
    return Finding(area="model", name="experts", state="ok", text=text)
