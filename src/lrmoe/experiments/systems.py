"""Named systems: a system is a policy, a storage kind and an estimator, applied to a base configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lrmoe.config import POLICIES, LRMoEConfig
from lrmoe.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class System:
    """One compared system.

    Attributes:
        name: what users type after `--systems`.
        about: one line for tables.
        plans_from: which counts its planner sees: "nothing", "current counts" or "history".
        changes: fields of LRMoEConfig that define it; every other field comes from the base configuration.
    """

    name: str
    about: str
    plans_from: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def config(self, base: LRMoEConfig) -> LRMoEConfig:
        """The base configuration with this system's own fields set."""
        return base.replace(**self.changes)


def _system(name: str, about: str, plans_from: str, **changes: Any) -> System:
    return System(name=name, about=about, plans_from=plans_from, changes=MappingProxyType(changes))


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        system.name: system
        for system in (
            _system(
                "megatron",
                "fixed ownership, exact backward",
                "nothing",
                policy="megatron",
                storage="owned",
                max_drop=0.0,
                replica_slots=0,
            ),
            _system(
                "lrmoe",
                "pruned, compacted backward as configured",
                "current counts",
                policy="lrmoe",
                storage="owned",
            ),
            _system(
                "lrmoe-sampled50",
                "half of the pairs sampled for backward",
                "current counts",
                policy="lrmoe",
                storage="owned",
                estimator="sampled",
                score="lrm",
                max_drop=0.5,
            ),
            _system(
                "lrmoe-topk20",
                "the published setting: best 80 % by LRM",
                "current counts",
                policy="lrmoe",
                storage="owned",
                estimator="topk",
                score="lrm",
                max_drop=0.2,
            ),
        )
    }
)


def get_system(name: str) -> System:
    """Look a system up.

    Raises:
        ConfigError: no such system (names the valid ones), or one that this version does not run.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    valid = ", ".join(SYSTEMS)
    if name in POLICIES or ":" in name:
        raise ConfigError(
            f"systems={name!r}: training under it is not available in this version; valid: {valid}; "
            f"lrmoe simulate --systems {name} plans with it"
        )
    near = difflib.get_close_matches(name, list(SYSTEMS), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ConfigError(f"systems={name!r}: no such system{hint}; valid: {valid}")


def get_systems(names: Sequence[str]) -> list[System]:
    """Look several systems up, in the order given.

    Raises:
        ConfigError: none given, one given twice, or an unknown one.
    """
    if not names:
        raise ConfigError(f"systems={list(names)!r}: name at least one of {', '.join(SYSTEMS)}")
    if len(set(names)) != len(names):
        raise ConfigError(f"systems={list(names)!r}: each system once")
    return [get_system(name) for name in names]
