"""What can be wrong with a call, and the field that its error has to name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from fuzz_calls import FuzzCall, Given, give
from fuzz_run import WrongError
from tests.reference import GRADS

from lrmoe.config import LRMoEConfig
from lrmoe.errors import LRMoEError
from lrmoe.layer import MoELayer


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A change to one argument.

    Attributes:
        names: what the message has to match. where: "config", "layer" or "call". of: the argument.
        change: from the right value to the wrong one.
    """

    names: str
    where: str
    of: str
    change: Callable[[Any], Any] = field(repr=False)


def _fixed(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _table() -> dict[str, Fault]:
    found: dict[str, Fault] = {}
    for name, values in _CONFIGS.items():
        for value in values:
            found[f"{name}={value!r}"] = Fault(names=name, where="config", of=name, change=_fixed(value))
    for name, values in _SIZES.items():
        for value in values:
            names = "experts" if name == "num_experts" else name
            found[f"{name}={value!r}"] = Fault(names=names, where="layer", of=name, change=_fixed(value))
    for name, changes in _CALLS.items():
        for word, change in changes.items():
            names = "padding mask|padding_mask" if name == "padding_mask" else name
            found[f"{name}: {word}"] = Fault(names=names, where="call", of=name, change=change)
    return found


_WORDS = ("", "bogus", None, 3, ["lrm"])
_CONFIGS: dict[str, tuple[Any, ...]] = {
    "max_drop": (1.0, 1, -0.1, float("nan"), float("inf"), "0.3", None, True, 1 + 0j, [0.1]),
    "peak_target": (0.0, -1.0, float("nan"), "1", None),
    "max_added_variance": (0.0, -1, float("inf"), float("nan"), "0.1", True),
    "min_keep": (-1, 1.5, "1", None, True),
    "replica_slots": (-1, 1.5, "2", None, float("nan")),
    "check_every": (-1, 0.5, "1", None),
    "warmup_steps": (-1, 2.0, "20", None),
    "cooldown_steps": (-1, 1.0, None, 5),
    "total_steps": (0, -3, 1.5, "9"),
    "seed": (-1, 0.0, "a", None),
    "memory_budget": (0, -5, 1.5, "", "60", "60Gi", "101%", "-1GiB", True, 2**61, [1]),
    "layer_budget": (0, -5, 1.5, "", "x", "0%", "1e9", False, "nanGiB"),
    "observe": (1, "yes", None),
    "policy": ("", "megatron ", None, 3),
    **dict.fromkeys(("drop", "estimator", "score", "selection", "select_in", "router_grad"), _WORDS),
    **dict.fromkeys(("storage", "activations"), _WORDS),
    "lean_wire": ("on", None, 1, 0),
}
_CONFIGS["memory_budget"] = tuple(v for v in _CONFIGS["memory_budget"] if v != "60")  # 60 bytes: a size
_SIZES: dict[str, tuple[Any, ...]] = {
    "num_experts": (0, -4, 2.5, "8", None, True),
    "hidden_size": (0, -1, 8.0, "16", None, True),
    "intermediate_size": (0, -1, 1.5, None, True),
    "activation": ("relu", "", None, 3, ["silu"]),
    "config": (None, {"max_drop": 0.3}, 0.3, LRMoEConfig),
}
_CALLS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "hidden_states": {
        "another width": lambda x: torch.cat([x, x[:, :1]], dim=1),
        "one dimension": lambda x: x.reshape(-1),
        "no dimension": _fixed(torch.tensor(1.0)),
        "integers": lambda x: x.detach().long(),
        "booleans": lambda x: x.detach() > 0,
        "complex": lambda x: x.to(torch.complex64),
        "8 bits": lambda x: x.detach().float().to(torch.float8_e4m3fn),
        "numpy": lambda x: x.detach().double().numpy(),
        "list": lambda x: x.tolist(),
        "None": _fixed(None),
        "sparse": lambda x: x.detach().to_sparse(),
    },
    "top_k_index": {
        "floats": lambda x: x.double(),
        "booleans": lambda x: x > 0,
        "complex": lambda x: x.to(torch.complex64),
        "one dimension": lambda x: x.reshape(-1),
        "one token more": lambda x: torch.cat([x, x.new_zeros(1, x.shape[1])]),
        "no slots": lambda x: x[:, :0],
        "another device": lambda x: x.to("meta"),
        "list": lambda x: x.tolist(),
        "None": _fixed(None),
    },
    "top_k_weights": {
        "integers": lambda x: x.detach().long(),
        "one slot more": lambda x: torch.cat([x, x[:, :1]], dim=1),
        "one token more": lambda x: torch.cat([x, x.new_zeros(1, x.shape[1])]),
        "another device": lambda x: x.to("meta"),
        "None": _fixed(None),
        "a number": _fixed(0.5),
    },
    "gate_up_proj": {
        "an expert more": lambda x: torch.cat([x, x[:1]]),
        "half the rows": lambda x: x[:, ::2],
        "two dimensions": lambda x: x[0],
        "integers": lambda x: x.detach().to(torch.int8),
        "another device": lambda x: x.to("meta"),
        "None": _fixed(None),
        "numpy": lambda x: x.detach().double().numpy(),
    },
    "down_proj": {
        "no experts": lambda x: x[:0],
        "a row more": lambda x: torch.cat([x, x[:, :1]], dim=1),
        "another dtype": lambda x: x.to(torch.float16 if x.dtype != torch.float16 else torch.float32),
        "a list of matrices": lambda x: list(x),
        "None": _fixed(None),
    },
    "padding_mask": {
        "one token more": lambda x: torch.ones(len(x) + 1, dtype=torch.bool),
        "floats": lambda x: torch.ones(len(x)),
        "complex": lambda x: torch.ones(len(x), dtype=torch.complex64),
        "list": lambda x: [True] * len(x),
        "a number": _fixed(1),
    },
}
FAULTS: Mapping[str, Fault] = MappingProxyType(_table())
_TENSORS = ("hidden_states", "top_k_index", "top_k_weights", "gate_up_proj", "down_proj")


def judge_fault(call: FuzzCall) -> None:
    """Make a call with a fault: WrongError where it is not refused, or by a message that does not name the field."""
    fault = FAULTS[call.fault]
    try:
        _make(call, fault)
    except LRMoEError as error:
        if not re.search(fault.names, str(error)):
            raise WrongError(
                f"{call.fault}: {type(error).__name__} does not name {fault.names}: {error}"
            ) from error
    else:
        raise WrongError(f"{call.fault}: accepted")


def _make(call: FuzzCall, fault: Fault) -> None:
    fields = call.settings.to_dict()
    if fault.where == "config":
        fields[fault.of] = fault.change(None)
    arguments: dict[str, Any] = {
        "num_experts": call.experts,
        "hidden_size": call.hidden,
        "intermediate_size": call.width,
        "config": LRMoEConfig(**fields),
        "activation": call.activation,
    }
    if fault.where == "layer":
        arguments[fault.of] = fault.change(None)
    layer = MoELayer(**arguments)
    layer(**arguments_of(give(call, 0), fault), training=call.trains)


def arguments_of(one: Given, fault: Fault | None) -> dict[str, Any]:
    """What a layer is called with, one of it wrong where a fault says so."""
    hidden, weights, gate_up, down = (one.views[n] for n in GRADS)
    given: dict[str, Any] = dict(zip(_TENSORS, (hidden, one.ids, weights, gate_up, down), strict=True))
    given["padding_mask"] = one.mask
    if fault is not None and fault.where == "call":
        of = one.ids[:, 0] if fault.of == "padding_mask" else given[fault.of]
        given[fault.of] = fault.change(of)
    return given
