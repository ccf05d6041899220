"""One file per system. Every policy answers a Problem with a LayerPlan that passes its legality check."""

from __future__ import annotations

from collections.abc import Callable

from lrmoe.errors import PlanError
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies import lrmoe, megatron
from lrmoe.planning.problem import Problem

Policy = Callable[[Problem], LayerPlan]

_POLICIES: dict[str, Policy] = {"lrmoe": lrmoe.plan, "megatron": megatron.plan}


def get_policy(name: str) -> Policy:
    """The planning function of a system.

    Raises:
        PlanError: no policy of that name in this version.
    """
    if name not in _POLICIES:
        raise PlanError(f"policy={name!r}: must be one of {', '.join(map(repr, _POLICIES))}")
    return _POLICIES[name]
