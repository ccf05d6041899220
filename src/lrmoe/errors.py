"""Every error a user can meet, what it suggests, and the import of optional dependencies."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class LRMoEError(Exception):
    """Base class of all errors raised by this package."""


class ConfigError(LRMoEError, ValueError):
    """A configuration field is out of range or contradicts another; the message names field, value, valid values."""


class InputError(LRMoEError, ValueError):
    """Tensors given to the layer have the wrong shape, dtype or content."""


class PlanError(LRMoEError, ValueError):
    """A plan is illegal, or the question put to a planner is malformed."""


class ReplayError(LRMoEError, RuntimeError):
    """A recompute of activation checkpointing matches no earlier forward."""


class RankError(LRMoEError, RuntimeError):
    """Another rank of the group reported an error, or the ranks disagree. Raised on every rank of the group."""


class InfeasibleError(LRMoEError, RuntimeError):
    """No plan fits the budget. The command line exits with code 3.

    Attributes:
        smallest: bytes of the smallest budget that would do, where the planner knows it.
    """

    def __init__(self, message: str, *, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class CheckpointError(LRMoEError, RuntimeError):
    """A checkpoint is missing, partial or corrupt."""


class UnsupportedError(LRMoEError, NotImplementedError):
    """A feature of the host model or library that is refused, named in the message."""


class CheckError(LRMoEError, RuntimeError):
    """A check of `lrmoe.debug` failed. Raised on every rank of the group, with what each rank found."""


class MissingExtraError(LRMoEError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def require_extra(module: str, extra: str) -> ModuleType:
    """Import an optional dependency.

    Raises:
        MissingExtraError: `module` is not installed; names the extra of this package that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f'{module} is needed for this and is not installed: pip install -e ".[{extra}]" in the checkout '
            f"(missing: {error.name})"
        ) from error


def did_you_mean(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """What to say behind "no such ...": " (did you mean 'near'?)", or nothing where no name is near.

    Args:
        cutoff: least similarity, 0 to 1.
    """
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return f" (did you mean {near[0]!r}?)" if near else ""
