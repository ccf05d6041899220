"""Named systems: a system is a policy, a storage kind and an estimator, applied to a base configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError, PlanError, did_you_mean
from lrmoe.planning.policies import INFO, PolicyInfo, policy_info

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class System:
    """One compared system.

    Attributes:
        name: what users type after `--systems`.
        about: one line for tables.
        info: what its policy decides from, when, and what it moves.
        changes: fields of LRMoEConfig that define it; every other field comes from the base configuration.
    """

    name: str
    about: str
    info: PolicyInfo
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def storage(self) -> str:
        """Who holds experts between calls: "owned" (their home rank) or "sharded" (all ranks a part of each)."""
        return str(self.changes["storage"])

    def config(self, base: LRMoEConfig) -> LRMoEConfig:
        """The base configuration with this system's own fields set."""
        return base.replace(**self.changes)

    def exact(self, base: LRMoEConfig) -> bool:
        """Whether its gradients are those of the complete backward, with this base configuration."""
        return self.config(base).max_drop == 0 and not self.may_drop

    @property
    def may_drop(self) -> bool:
        """Whether its policy, from a user's file, says that it leaves pairs out by itself."""
        return ":" in self.name and self.info.drops


def _exact(policy: str, about: str, **changes: Any) -> System:
    """A system of exact gradients; `changes` beside what all of them share."""
    fields = {"policy": policy, "storage": "owned", "max_drop": 0.0, **changes}
    return System(name=policy, about=about, info=policy_info(policy), changes=MappingProxyType(fields))


def _lrmoe(name: str, about: str, **changes: Any) -> System:
    fields = {"policy": "lrmoe", "storage": "owned", **changes}
    return System(name=name, about=about, info=INFO["lrmoe"], changes=MappingProxyType(fields))


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        system.name: system
        for system in (
            _exact("megatron", "fixed ownership, exact backward", replica_slots=0),
            _exact("fastermoe", "hottest experts broadcast to all ranks, kept until backward"),
            _exact("flexmoe", "resident copies, changed when the balance is bad"),
            _exact("smartmoe", "experts change owners every 10 calls"),
            _exact("symi", "instances by the last call's load, rebuilt once a step", storage="sharded"),
            _exact("laer", "every rank's experts gathered from shards at each call", storage="sharded"),
            _exact("ultraep", "replicas by the call's own load, fetched again in backward"),
            _exact("topoep", "one matching of hot experts and free slots a call"),
            _exact("eplb", "resident copies by past load, packed anew every 3 calls"),
            _exact("llep", "spilled experts sent along above 1.3 mean loads"),
            _lrmoe("lrmoe", "pruned, compacted backward as configured"),
            _lrmoe(
                "lrmoe-sampled50",
                "half of the pairs sampled for backward",
                estimator="sampled",
                score="lrm",
                max_drop=0.5,
            ),
            _lrmoe(
                "lrmoe-topk20",
                "the published setting: best 80 % by LRM",
                estimator="topk",
                score="lrm",
                max_drop=0.2,
            ),
        )
    }
)


def get_system(name: str) -> System:
    """Look a system up; "my_file.py:MyPolicy" is one too, on owned storage.

    Raises:
        ConfigError: no such system (names the valid ones), or a file that does not hold one.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    if ":" in name:
        return _from_file(name)
    hint = did_you_mean(name, SYSTEMS)
    raise ConfigError(
        f"systems={name!r}: no such system{hint}; valid: {', '.join(SYSTEMS)}, 'my_file.py:MyPolicy', or {ALL!r} alone"
    )


def _from_file(name: str) -> System:
    try:
        info = policy_info(name)
    except PlanError as error:
        raise ConfigError(f"systems={name!r}: {error}") from error
    changes: dict[str, Any] = {"policy": name, "storage": "owned"}
    if not info.drops:
        changes["max_drop"] = 0.0
    return System(name=name, about=info.title, info=info, changes=MappingProxyType(changes))


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with "all" as every system of the package."""
    return tuple(SYSTEMS) if tuple(names) == (ALL,) else tuple(names)


def get_systems(names: Sequence[str]) -> list[System]:
    """Look several systems up, in the order given; "all" alone is every one.

    Raises:
        ConfigError: none given, one given twice, or an unknown one.
    """
    if not names:
        raise ConfigError(f"systems={list(names)!r}: name at least one of {', '.join(SYSTEMS)}, or {ALL!r}")
    names = expand(names)
    if len(set(names)) != len(names):
        raise ConfigError(f"systems={list(names)!r}: each system once")
    return [get_system(name) for name in names]
