"""What is simulated: a layer on a cluster, the systems, and what each of them is given.

Shape letters: R ranks, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lrmoe.errors import ConfigError, InfeasibleError, PlanError
from lrmoe.planning.hardware import Hardware, get_hardware
from lrmoe.planning.memory import GRADIENT_BYTES, PUBLISHED_HIDDEN_ROWS, ExpertShape
from lrmoe.planning.policies import INFO, Policy, PolicyInfo, get_policy, policy_info
from lrmoe.planning.problem import Topology

SYSTEMS = tuple(INFO)
_LIMITS = ("slots", "max_shadows")  # options by which a system without a limit of its own takes one


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One MoE layer and the devices it runs on.

    Attributes:
        shape: sizes of one expert. top_k: experts per token. hardware: the devices.
    """

    shape: ExpertShape = field(default_factory=lambda: ExpertShape(hidden=2048, width=768, element_bytes=2))
    top_k: int = 8
    hardware: Hardware = field(default_factory=lambda: get_hardware("h100"))

    @property
    def row_bytes(self) -> int:
        """Token buffer of one pair at its expert's rank: five hidden rows, as in the published account."""
        return PUBLISHED_HIDDEN_ROWS * self.shape.row_bytes

    @property
    def expert_bytes(self) -> int:
        """Weights and fp32 gradients of one expert."""
        return self.shape.weight_bytes + self.shape.params * GRADIENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What every system is given, the same for all.

    Attributes:
        slots: weight slots per rank beyond those of the home experts.
        budget_bytes: bytes per rank for one layer call (experts, replicas, token buffers), or None.
        max_drop: cap on the share of pairs that backward leaves out; only systems that prune backward use it.
        drop: "always" or "overload".
    """

    slots: int = 2
    budget_bytes: int | None = None
    max_drop: float = 0.2
    drop: str = "always"

    def __post_init__(self) -> None:
        if self.slots < 0:
            raise ConfigError(f"slots={self.slots}: must be at least 0")
        if not 0 <= self.max_drop < 1:
            raise ConfigError(f"max_drop={self.max_drop}: must lie in [0, 1)")
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise ConfigError(f"budget={self.budget_bytes}: must be at least 1 byte")

    def budget_rows(self, layer: Layer, topology: Topology) -> int | None:
        """Rows that fit a rank beside its home experts, or None without a budget.

        Raises:
            InfeasibleError: the home experts alone exceed the budget.
        """
        if self.budget_bytes is None:
            return None
        base = topology.experts_per_rank * layer.expert_bytes
        rows = (self.budget_bytes - base) // layer.row_bytes
        if rows < 1:
            raise InfeasibleError(
                f"budget={self.budget_bytes}: the {topology.experts_per_rank} home experts of a rank take {base} bytes "
                f"with their gradients, and one pair {layer.row_bytes}"
            )
        return int(rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class System:
    """One system as it is simulated.

    Attributes:
        name: as users type it. policy: plans a call. info: what the fairness table says.
        limited: the option by which the common number of slots was put on a system without a limit, or None.
    """

    name: str
    policy: Policy
    info: PolicyInfo
    limited: str | None = None

    @property
    def remembers(self) -> bool:
        """Whether its plans depend on earlier calls."""
        return self.info.inputs not in ("nothing", "current counts")


def make_system(name: str, slots: int) -> System:
    """A system with the common number of slots.

    Raises:
        ConfigError: no such system.
    """
    try:
        policy, info = get_policy(name), policy_info(name)
    except PlanError as error:
        raise ConfigError(f"systems={name!r}: {error}") from error
    if info.slots == "unbounded":
        for limit in _LIMITS:
            if limit in {f.name for f in _fields(policy)}:
                limited = _replace(policy, **{limit: slots})
                return System(name=name, policy=limited, info=info, limited=limit)
    return System(name=name, policy=policy, info=info)


def _fields(policy: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(policy) if dataclasses.is_dataclass(policy) else ()


def _replace(policy: Any, **changes: Any) -> Policy:
    changed: Policy = dataclasses.replace(policy, **changes)
    return changed


def make_systems(names: list[str], slots: int) -> list[System]:
    """Several systems, in the order given.

    Raises:
        ConfigError: none, one twice, or an unknown one.
    """
    if not names:
        raise ConfigError(f"systems={names!r}: name at least one of {', '.join(SYSTEMS)}")
    if len(set(names)) != len(names):
        raise ConfigError(f"systems={names!r}: each system once")
    return [make_system(name, slots) for name in names]


def fairness(
    system: System, layer: Layer, allowance: Allowance, found: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """What a system was given and plans from, for the table that stands beside every comparison.

    Args:
        system: which. layer, allowance: of the simulation.
        found: its figures in every cluster; what it leaves out is read off its plans, not taken on trust.
    """
    info, budget = system.info, allowance.budget_bytes
    slots = {"none": "0"}.get(info.slots, f"{allowance.slots} ({info.slots})")
    if info.slots == "unbounded":
        slots = f"{allowance.slots} (put on it by {system.limited})" if system.limited else "no limit"
    return {
        "title": info.title,
        "slots per rank beyond E / R": slots,
        "bytes of a slot": layer.expert_bytes,
        "bytes of a pair": layer.row_bytes,
        "budget per rank and call": "none" if budget is None else budget,
        "plans from": _claim(system, info.inputs),
        "acts": _claim(system, info.acts),
        "moves": _claim(system, info.moves),
        "estimator": _estimator(found),
        "chunks": _chunks(system, found),
        "activations": "five hidden rows per pair, nobody recomputes unless the budget forces it",
        "drops in forward": _forward_drops(system, found),
        "note": info.note,
    }


def _claim(system: System, said: str) -> str:
    """Built-in systems are tested to do what they say; what a user's policy says of itself is a claim."""
    claims: bool | None = getattr(system.policy, "claims", None)
    return said if claims is None else f"claims: {said}" if claims else "claims nothing"


def _estimator(found: Sequence[Mapping[str, Any]]) -> str:
    planned = [f for f in found if f["calls"]]
    if not planned:
        return "no call planned"
    least = min(f["kept_share"] for f in planned)
    return "exact backward" if least == 1 else f"backward kept {100 * least:.3g}%"


def _forward_drops(system: System, found: Sequence[Mapping[str, Any]]) -> str:
    most = max((f["overflow_share"] for f in found if f["calls"]), default=0.0)
    if most > 0:
        return f"{100 * most:.3g}% of pairs"
    return "by option, off here" if system.info.drops and not hasattr(system.policy, "claims") else "no"


def _chunks(system: System, found: Sequence[Mapping[str, Any]]) -> str:
    """Of the built-in systems only lrmoe reads how many chunks a call may run in."""
    used = max((max(f["forward_chunks"], f["backward_chunks"]) for f in found if f["calls"]), default=1)
    if used > 1:
        return f"offered under a budget, {used:.3g} used"
    own = system.name == "lrmoe" or hasattr(system.policy, "claims")
    return "offered under a budget, none used" if own else "not offered"
