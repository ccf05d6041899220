"""lrmoe: Mixture-of-Experts training with a planned, pruned, compacted backward pass.

The names below are the public API; each is imported when first used, so that `import lrmoe` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LRMoEConfig": "lrmoe.config",
    "MoELayer": "lrmoe.layer",
    "StepClock": "lrmoe.layer",
    "padding": "lrmoe.layer",
    "LRMoEError": "lrmoe.errors",
    "ConfigError": "lrmoe.errors",
    "InputError": "lrmoe.errors",
    "PlanError": "lrmoe.errors",
    "RankError": "lrmoe.errors",
    "ReplayError": "lrmoe.errors",
    "InfeasibleError": "lrmoe.errors",
    "CheckpointError": "lrmoe.errors",
    "UnsupportedError": "lrmoe.errors",
    "MissingExtraError": "lrmoe.errors",
    "CheckError": "lrmoe.errors",
}

_MODULES = ("debug",)

__all__ = ["__version__", *_HOMES, *_MODULES]  # noqa: PLE0604 - the names are resolved by __getattr__

if TYPE_CHECKING:
    from lrmoe import debug as debug
    from lrmoe.config import LRMoEConfig as LRMoEConfig
    from lrmoe.errors import (
        CheckError as CheckError,
    )
    from lrmoe.errors import (
        CheckpointError as CheckpointError,
    )
    from lrmoe.errors import (
        ConfigError as ConfigError,
    )
    from lrmoe.errors import (
        InfeasibleError as InfeasibleError,
    )
    from lrmoe.errors import (
        InputError as InputError,
    )
    from lrmoe.errors import (
        LRMoEError as LRMoEError,
    )
    from lrmoe.errors import (
        MissingExtraError as MissingExtraError,
    )
    from lrmoe.errors import (
        PlanError as PlanError,
    )
    from lrmoe.errors import (
        RankError as RankError,
    )
    from lrmoe.errors import (
        ReplayError as ReplayError,
    )
    from lrmoe.errors import (
        UnsupportedError as UnsupportedError,
    )
    from lrmoe.layer import MoELayer as MoELayer
    from lrmoe.layer import StepClock as StepClock
    from lrmoe.layer import padding as padding


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"lrmoe.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'lrmoe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
