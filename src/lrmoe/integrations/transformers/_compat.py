"""The names this adapter takes from Transformers, checked for presence and version before anything else."""

from __future__ import annotations

import re

from lrmoe.errors import UnsupportedError, require_extra

MINIMUM = (5, 23)
TESTED = ("5.24.0",)

_hf = require_extra("transformers", "transformers")


def check_version(version: str) -> None:
    """Refuse a Transformers that has no expert-parallel registry.

    Raises:
        UnsupportedError: `version` is older than the least supported one; names both.
    """
    numbers = re.findall(r"\d+", version)[:2]
    if tuple(int(number) for number in numbers) < MINIMUM:
        least = ".".join(map(str, MINIMUM))
        raise UnsupportedError(
            f"transformers {version} is installed, lrmoe needs transformers>={least} (tested: {', '.join(TESTED)}): "
            "pip install -U transformers"
        )


check_version(_hf.__version__)

# After the check, so that an old version gives the message above and not a bare ImportError.
from transformers import PreTrainedModel, TrainerCallback  # noqa: E402
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface  # noqa: E402
from transformers.integrations import moe as _moe  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

ALL_EXPERTS_FUNCTIONS = _moe.ALL_EXPERTS_FUNCTIONS
default_apply_gate = _moe._default_apply_gate

__all__ = [
    "ALL_EXPERTS_FUNCTIONS",
    "MINIMUM",
    "TESTED",
    "EPImplementation",
    "EPImplementationInterface",
    "ExportableState",
    "PreTrainedModel",
    "TrainerCallback",
    "check_version",
    "default_apply_gate",
]
