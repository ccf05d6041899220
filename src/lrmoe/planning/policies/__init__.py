"""One file per system. Every policy answers a Problem with a LayerPlan that passes its legality check.

A policy is a callable, mostly a frozen dataclass of its options: `get_policy(name)` gives the one with default
options, the classes below take others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lrmoe.errors import PlanError
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies import (
    eplb,
    fastermoe,
    flexmoe,
    laer,
    llep,
    lrmoe,
    megatron,
    smartmoe,
    symi,
    topoep,
    ultraep,
)
from lrmoe.planning.policies._fit import fit_policy
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.policies._user import UserPolicy, load_policy
from lrmoe.planning.policies.eplb import EPLB
from lrmoe.planning.policies.fastermoe import FasterMoE
from lrmoe.planning.policies.flexmoe import FlexMoE
from lrmoe.planning.policies.laer import Laer
from lrmoe.planning.policies.llep import LLEP
from lrmoe.planning.policies.smartmoe import SmartMoE
from lrmoe.planning.policies.symi import Symi
from lrmoe.planning.policies.topoep import TopoEP
from lrmoe.planning.policies.ultraep import UltraEP
from lrmoe.planning.problem import Problem

Policy = Callable[[Problem], LayerPlan]

_POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "megatron": megatron.plan,
        "fastermoe": FasterMoE(),
        "flexmoe": FlexMoE(),
        "smartmoe": SmartMoE(),
        "symi": Symi(),
        "laer": Laer(),
        "ultraep": UltraEP(),
        "topoep": TopoEP(),
        "eplb": EPLB(),
        "llep": LLEP(),
        "lrmoe": lrmoe.plan,
    }
)

INFO: Mapping[str, PolicyInfo] = MappingProxyType(
    {
        "megatron": PolicyInfo(
            title="Megatron-LM (fixed ownership)",
            source="NVIDIA/Megatron-LM megatron/core/transformer/moe, dropless all-to-all",
            inputs="nothing",
            acts="never",
            moves="nothing",
            slots="none",
        ),
        "fastermoe": fastermoe.INFO,
        "flexmoe": flexmoe.INFO,
        "smartmoe": smartmoe.INFO,
        "symi": symi.INFO,
        "laer": laer.INFO,
        "ultraep": ultraep.INFO,
        "topoep": topoep.INFO,
        "eplb": eplb.INFO,
        "llep": llep.INFO,
        "lrmoe": PolicyInfo(
            title="LRMoE",
            source="this package",
            inputs="current counts",
            acts="every call",
            moves="replica weights forward and again backward, gradients home",
            slots="shared",
            note="placement, routing and peaks from current counts alone, past counts are never read; how quotas share "
            "the drop also from mean scores of past calls",
        ),
    }
)


def get_policy(name: str) -> Policy:
    """The planning function of a system, with its default options.

    Args:
        name: a system, or "path/to/file.py:Name" for a policy of your own (see `load_policy`).

    Raises:
        PlanError: no policy of that name, or a file that does not hold one.
    """
    if ":" in name:
        return load_policy(name)
    if name not in _POLICIES:
        raise PlanError(
            f"policy={name!r}: must be one of {', '.join(map(repr, _POLICIES))}, or 'my_file.py:MyPolicy'"
        )
    return _POLICIES[name]


def policy_info(name: str) -> PolicyInfo:
    """What tables say of a system; of a policy from a file its `INFO` attribute, or what can be said without.

    Raises:
        PlanError: as `get_policy`.
    """
    if ":" in name:
        return load_policy(name).info
    get_policy(name)
    return INFO[name]


__all__ = [
    "EPLB",
    "FasterMoE",
    "FlexMoE",
    "INFO",
    "LLEP",
    "Laer",
    "Policy",
    "PolicyInfo",
    "SmartMoE",
    "Symi",
    "TopoEP",
    "UltraEP",
    "UserPolicy",
    "fit_policy",
    "get_policy",
    "load_policy",
    "policy_info",
]
