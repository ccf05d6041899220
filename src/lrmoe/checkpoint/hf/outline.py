"""What the model of a transformers configuration consists of, found without its memory."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lrmoe.checkpoint.hf.names import Style, is_experts, style_of
from lrmoe.errors import CheckpointError, UnsupportedError, require_extra

# Fields of a configuration that say nothing of the model's weights, or differ between versions and readers.
NOT_OF_THE_MODEL = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What a model consists of.

    Attributes:
        architecture: its class.
        style: how published checkpoints of its family name tensors.
        shapes: every tensor's name -> shape, in the order of the state dict, tied ones once; experts are (E, rows,
            columns).
        kept: names of those that keep the dtype they are stored in, whatever the model's: buffers, and what the class
            keeps in float32.
        spare: patterns of names that a file may hold and nothing reads: tied weights, parts that the class leaves out.
    """

    architecture: str
    style: Style
    shapes: Mapping[str, tuple[int, ...]]
    kept: frozenset[str]
    spare: tuple[str, ...]

    def is_spare(self, name: str) -> bool:
        """Whether a file may hold a tensor of this name that nothing reads."""
        return any(re.search(pattern, name) for pattern in self.spare)


def outline_of(config: Any) -> Outline:
    """The outline of a transformers configuration's causal language model.

    Raises:
        UnsupportedError: a family whose published names are not known, or a model without experts.
    """
    style = style_of(config.model_type)
    hf = require_extra("transformers", "transformers")
    with torch.device("meta"):
        # A copy: transformers writes the dtype into the configuration it is given.
        model = hf.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    model.tie_weights()
    seen: set[int] = set()
    shapes, spare = {}, [r"\.rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ())]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            spare.append(f"^{re.escape(name)}$")
        else:
            seen.add(id(tensor))
            shapes[name] = tuple(tensor.shape)
    if not any(map(is_experts, shapes)):
        raise UnsupportedError(f"{type(model).__name__} with these settings has no layer with experts")
    return Outline(
        architecture=type(model).__name__,
        style=style,
        shapes=shapes,
        kept=frozenset(shapes) & _kept(model),
        spare=tuple(spare),
    )


def _kept(model: Any) -> set[str]:
    parts = kept_in_float32(model)
    found = {name for name, _ in model.named_buffers()}
    return found | {name for name, _ in model.named_parameters() if any(part in name for part in parts)}


def kept_in_float32(model: Any) -> list[str]:
    """Parts of names of the parameters that a transformers model keeps in float32 whatever its dtype."""
    kinds = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return [part for kind in kinds for part in getattr(model, kind, None) or ()]


def model_fields(config: Any) -> dict[str, Any]:
    """A transformers configuration as JSON-able fields, without what does not change the model."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in fields.items() if name[0] != "_" and name not in NOT_OF_THE_MODEL}


def config_of(fields: Mapping[str, Any], where: str) -> Any:
    """The transformers configuration that `model_fields` made fields of.

    Raises:
        CheckpointError: transformers does not know the model or refuses a field; begins with `where`.
    """
    hf = require_extra("transformers", "transformers")
    try:
        return type(hf.AutoConfig.for_model(fields["model_type"])).from_dict(dict(fields))
    except Exception as error:  # the validators of huggingface_hub raise classes of their own
        raise CheckpointError(f"{where}: transformers cannot use the model's fields: {error}") from error
