"""Checks of what a caller gives the layer, before any work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError, InputError
from lrmoe.layer.padding import check_mask, current_mask
from lrmoe.ops import ACTIVATIONS
from lrmoe.planning.shards import Cut

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Checked inputs: x (T, H), ids (T, K) with "no expert" where a token is padding, alpha (T, K)."""

    x_TH: Tensor
    ids_TK: Tensor
    alpha_TK: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes a layer was built for."""

    experts: int
    local_experts: int
    hidden: int
    width: int
    cuts: tuple[Cut, Cut] | None = None  # of gate_up and down where storage is sharded

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the projections that a call is given."""
        if self.cuts is not None:
            return {
                "gate_up_proj": (self.experts, self.cuts[0].shard),
                "down_proj": (self.experts, self.cuts[1].shard),
            }
        return {
            "gate_up_proj": (self.local_experts, 2 * self.width, self.hidden),
            "down_proj": (self.local_experts, self.hidden, self.width),
        }


def check_build(config: object, activation: object, **sizes: object) -> None:
    """Refuse what a layer cannot be built from.

    Raises:
        ConfigError: `config` is no LRMoEConfig, an unknown activation, or a size that is no integer of at least 1.
    """
    if not isinstance(config, LRMoEConfig):
        raise ConfigError(f"config: got {config!r}; must be an LRMoEConfig")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ConfigError(f"activation={activation!r}: must be one of {', '.join(map(repr, ACTIVATIONS))}")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name}={size!r}: must be an integer of at least 1")


def check_inputs(
    shape: LayerShape, hidden_states: Tensor, ids: Tensor, alpha: Tensor, gate_up: Tensor, down: Tensor,
    mask: Tensor | None,
) -> Inputs:  # fmt: skip
    """Flatten leading dimensions, check every shape and dtype, and take padding out of the ids.

    Raises:
        InputError: names the argument, what was given and what is valid.
    """
    given = {
        "hidden_states": hidden_states,
        "top_k_index": ids,
        "top_k_weights": alpha,
        **dict(zip(shape.parameters(), (gate_up, down), strict=True)),
    }
    for name, value in given.items():
        _check_tensor(name, value)
    _check_float("hidden_states", hidden_states)
    _check_float("top_k_weights", alpha)
    if hidden_states.ndim < 2 or hidden_states.shape[-1] != shape.hidden:
        raise InputError(
            f"hidden_states has shape {tuple(hidden_states.shape)}: must be (tokens, {shape.hidden})"
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(f"top_k_index has dtype {ids.dtype}: must be an integer dtype (int64)")
    x_TH = hidden_states.reshape(-1, shape.hidden)
    for name in ("top_k_index", "top_k_weights"):
        if given[name].device != x_TH.device:
            raise InputError(
                f"{name} lies on {given[name].device} and hidden_states on {x_TH.device}: must agree"
            )
    _check_pairs(x_TH, ids, alpha)
    _check_weights(shape, x_TH, gate_up, down)
    ids_TK, alpha_TK = ids.reshape(-1, ids.shape[-1]).long(), alpha.reshape(-1, alpha.shape[-1])
    tokens = x_TH.shape[0]
    mask_T = current_mask(tokens) if mask is None else check_mask(mask, tokens)
    if mask_T is not None:
        ids_TK = ids_TK.masked_fill(~mask_T.to(ids.device).unsqueeze(1), shape.experts)
    return Inputs(x_TH=x_TH, ids_TK=ids_TK, alpha_TK=alpha_TK)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is a {type(value).__name__}: must be a tensor")
    if value.layout != torch.strided:
        raise InputError(f"{name} has layout {value.layout}: must be a dense tensor (torch.strided)")


def _check_float(name: str, value: Tensor) -> None:
    if value.dtype not in _FLOATS:
        raise InputError(f"{name} has dtype {value.dtype}: must be one of {', '.join(map(str, _FLOATS))}")


def _check_pairs(x_TH: Tensor, ids: Tensor, alpha: Tensor) -> None:
    if ids.shape != alpha.shape:
        raise InputError(
            f"top_k_index has shape {tuple(ids.shape)} and top_k_weights {tuple(alpha.shape)}: must agree"
        )
    if ids.ndim < 2 or ids.shape[-1] < 1 or ids.shape[:-1].numel() != x_TH.shape[0]:
        raise InputError(
            f"top_k_index has shape {tuple(ids.shape)}: must be (tokens, top_k) with {x_TH.shape[0]} tokens, top_k >= 1"
        )


def _check_weights(shape: LayerShape, x_TH: Tensor, gate_up: Tensor, down: Tensor) -> None:
    first = "local experts first" if shape.cuts is None else "this rank's part of all experts"
    for weight, (name, size) in zip((gate_up, down), shape.parameters().items(), strict=True):
        _check_float(name, weight)
        if tuple(weight.shape) != size:
            raise InputError(f"{name} has shape {tuple(weight.shape)}: must be {size} ({first})")
        if weight.device != x_TH.device:
            raise InputError(f"{name} lies on {weight.device} and hidden_states on {x_TH.device}: must agree")
    if gate_up.dtype != down.dtype:
        raise InputError(f"gate_up_proj has dtype {gate_up.dtype} and down_proj {down.dtype}: must agree")
