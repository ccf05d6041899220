"""What each system of a comparison was given and plans from, for the table that stands beside its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lrmoe.config import LRMoEConfig
from lrmoe.experiments.systems.registry import System
from lrmoe.planning import ExpertShape
from lrmoe.planning.memory import GRADIENT_BYTES

TRAINS = "its own training run"
SHARED = "the shared training run"
EXECUTES = "executes the shared run's calls"

_SLOTS = {
    "none": "0",
    "shared": "{slots}, shared by all layers",
    "resident": "{slots}, held per layer all the time",
    "unbounded": "{slots} (a limit put on it), shared by all layers",
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What slots are made of: an expert, the MoE layers, and bytes of optimizer state for each parameter."""

    expert: ExpertShape
    layers: int
    state_bytes: int


def fairness(system: System, config: LRMoEConfig, role: str, sizes: Sizes | None = None) -> dict[str, Any]:
    """Rows of the fairness table, in order; the same keys for every system.

    Args:
        system: which. config: what its layers run with. role: TRAINS, SHARED or EXECUTES.
        sizes: of the model; without them nothing is said about bytes of slots.
    """
    info, drops = system.info, config.max_drop > 0
    slots = _SLOTS[info.slots].format(slots=config.replica_slots) if config.replica_slots else "0"
    bytes_of_slots: dict[str, Any] = (
        {} if sizes is None else {"bytes_of_slots": slot_bytes(system, config, sizes)}
    )
    if ":" in system.name and info.slots == "unbounded":
        slots, bytes_of_slots = "no limit", {"bytes_of_slots": "no limit"}
    return {
        "title": info.title,
        "gradients_from": role,
        "slots_beyond_E/R": slots,
        **bytes_of_slots,
        "budget_bytes": config.memory_budget or config.layer_budget or "none",
        "plans_from": _said(system, info.inputs),
        "acts": _said(system, info.acts),
        "moves": _said(system, info.moves),
        "traffic_counted": traffic(system),
        "storage": system.storage,
        "estimator": f"{config.estimator}, score {config.score}" if drops else "exact, nothing dropped",
        "max_drop": config.max_drop,
        "exact_warmup_steps": config.warmup_steps if drops else "all",
        "activations": config.activations,
        "rows_on_the_wire": "one per (token, rank)" if config.lean_wire is True else "one per pair",
    }


def slot_bytes(system: System, config: LRMoEConfig, sizes: Sizes) -> int:
    """Bytes of a rank that filled replica slots take, with their fp32 gradients, beside its home experts.

    Shared slots exist once; copies kept until backward stay in every layer of a micro-batch; resident slots are in
    every layer all the time, with optimizer states where those are not sharded.
    """
    expert, layers = sizes.expert, sizes.layers
    slots = 0 if system.info.slots == "none" else config.replica_slots
    weights, gradient = expert.weight_bytes, expert.params * GRADIENT_BYTES
    if system.info.slots == "unbounded":
        return slots * (layers * weights + gradient)
    if system.info.slots != "resident":
        return slots * (weights + gradient)
    states = 0 if system.storage == "sharded" else expert.params * sizes.state_bytes
    return slots * layers * (weights + gradient + states)


def traffic(system: System) -> str:
    """When weights, gradients and optimizer states of its experts cross the wire, as it is executed and counted."""
    if system.storage == "sharded":
        return "every step" if system.info.slots == "resident" else "every call, forward and backward"
    if system.name == "megatron":
        return "none"
    if system.info.slots in ("none", "resident"):
        return "weights and states where the layout changes; gradients of copies once a step"
    return "every call"


def _said(system: System, text: str) -> str:
    """Systems of the package are tested to do what they say; what a user's policy says of itself is a claim."""
    return f"claims: {text}" if ":" in system.name else text
