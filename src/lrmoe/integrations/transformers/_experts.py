"""Finding a model's experts modules and reading what they need: honoured or refused by name, never guessed.

Shapes: E experts held (all ranks together), E_local on this rank, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lrmoe.errors import UnsupportedError
from lrmoe.integrations.transformers._compat import default_apply_gate

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PROJECTIONS = ("gate_up_proj", "down_proj")
# What the flags of Transformers' `use_experts_implementation` must be, and what the other value would mean.
_FLAGS: dict[str, tuple[bool, str]] = {
    "has_gate": (True, "experts without a gate projection"),
    "has_bias": (False, "biases on the expert projections"),
    "is_transposed": (False, "projections stored as (E, in, out)"),
    "is_concatenated": (True, "gate and up rows interleaved"),
    "has_post_expert_norm": (False, "a norm after every expert"),
}
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """One experts module as the layer sees it. `local_experts` counts those whose weights this rank holds."""

    local_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str


def is_experts(module: nn.Module) -> bool:
    """Whether Transformers' `use_experts_implementation` made this module's class."""
    return all(hasattr(module, flag) for flag in _FLAGS)


def inner_experts(module: nn.Module) -> nn.Module | None:
    """The experts module that this module is, or adapts: adapter libraries keep what they wrap as `base_layer`."""
    inner: object = module
    while isinstance(inner, nn.Module):
        if is_experts(inner):
            return inner
        inner = getattr(inner, "base_layer", None)
    return None


def refuse_adapters(model: nn.Module, *, spread: bool = False) -> None:
    """Refuse adapters around experts whose rows are, or are to be, spread over ranks: they are as wide as all experts.

    Args:
        spread: whether all experts are to be spread.

    Raises:
        UnsupportedError: names the experts.
    """
    for name, module in model.named_modules():
        experts = inner_experts(module)
        if experts is None or experts is module:
            continue
        if spread or any(expert_mesh_size(weight) > 1 for weight in experts.parameters()):
            raise UnsupportedError(
                f"{plain_name(name)}: adapters on experts that are spread over ranks are not supported; adapt other "
                "layers, train the experts themselves, use data parallelism, or call shard_experts before the adapters "
                "are added"
            )


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Experts modules by name, in module order; a module used in two places appears once, under its first name.

    Names are those of the model itself, also where DDP, FSDP, `torch.compile` or checkpointing wraps it.

    Raises:
        UnsupportedError: there is none.
    """
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no experts module that lrmoe can run: it looks for classes decorated with "
            "transformers' use_experts_implementation (experts kept in nn.ModuleList are not supported)"
        )
    plain = {plain_name(name): module for name, module in found.items()}
    return plain if len(plain) == len(found) else found


def plain_name(name: str) -> str:
    """A name as the model itself has it, also where DDP, FSDP, `torch.compile` or checkpointing wraps it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def read_spec(module: nn.Module, name: str) -> ExpertsSpec:
    """Check every flag of an experts module and return its sizes. Changes nothing.

    Raises:
        UnsupportedError: a flag, parameter or activation that the layer does not execute; names module and flag.
    """
    own: ExpertsSpec | None = getattr(module, "lrmoe_spec", None)
    if own is not None:  # a module of this package, whose parameters are shards
        return own
    refused = [
        (f"{flag}={getattr(module, flag)}", meaning)
        for flag, (needed, meaning) in _FLAGS.items()
        if bool(getattr(module, flag)) is not needed
    ]
    if getattr(type(module), "_apply_gate", None) is not default_apply_gate or "_apply_gate" in vars(module):
        refused.append(("_apply_gate", "a gate of its own instead of act_fn(gate) * up"))
    if refused:
        raise _refusal(
            name, module, ", ".join(flag for flag, _ in refused), "; ".join(why for _, why in refused)
        )
    activation = _activation(module, name)
    return _sizes(module, name, activation)


def _activation(module: nn.Module, name: str) -> str:
    """The activation by behaviour: what it does to probe values, whatever class computes it."""
    probe = torch.linspace(-50, 50, 401, dtype=torch.float64)  # far enough to meet clamps
    act_fn: Any = getattr(module, "act_fn", None)
    try:
        with torch.no_grad():
            values = act_fn(probe)
    except Exception as error:
        raise _refusal(
            name, module, f"act_fn={act_fn!r}", f"an activation that failed on a probe: {error}"
        ) from error
    for kind, reference in _ACTIVATIONS.items():
        if isinstance(values, torch.Tensor) and torch.allclose(
            values, reference(probe), rtol=1e-12, atol=1e-14
        ):
            return kind
    raise _refusal(name, module, f"act_fn={act_fn!r}", f"an activation other than {', '.join(_ACTIVATIONS)}")


def _sizes(module: nn.Module, name: str, activation: str) -> ExpertsSpec:
    up_EGH, down_EHI = (_projection(module, name, projection) for projection in PROJECTIONS)
    experts, gate_up, hidden = up_EGH.shape
    width = down_EHI.shape[2]
    if gate_up != 2 * width or tuple(down_EHI.shape[:2]) != (experts, hidden):
        raise _refusal(
            name,
            module,
            f"gate_up_proj {tuple(up_EGH.shape)}, down_proj {tuple(down_EHI.shape)}",
            "shapes other than (E, 2I, H) and (E, H, I)",
        )
    local = getattr(module, "num_experts", None)
    # Sharded over an expert-parallel mesh the parameter keeps its global shape, num_experts is this rank's.
    ranks = expert_mesh_size(up_EGH)
    if not isinstance(local, int) or local * ranks != experts:
        raise _refusal(
            name, module, f"num_experts={local}", f"not the {experts // ranks} experts of its parameters"
        )
    return ExpertsSpec(
        local_experts=local, hidden_size=hidden, intermediate_size=width, activation=activation
    )


def _projection(module: nn.Module, name: str, projection: str) -> torch.Tensor:
    weight = getattr(module, projection, None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 3:
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise _refusal(name, module, f"{projection}={shape}", "a projection that is not one 3-D tensor")
    if weight.dtype not in DTYPES:
        raise _refusal(name, module, f"{projection}.dtype={weight.dtype}", "quantised expert weights")
    return weight


def expert_mesh_size(weight: torch.Tensor) -> int:
    """Number of expert-parallel ranks a parameter is spread over; 1 for a plain tensor."""
    mesh = getattr(weight, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return mesh.size(names.index("ep")) if mesh is not None and "ep" in names else 1


def _refusal(name: str, module: nn.Module, flag: str, meaning: str) -> UnsupportedError:
    return UnsupportedError(f"{name} ({type(module).__name__}): lrmoe does not support {flag}: {meaning}")
