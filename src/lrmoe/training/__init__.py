"""The reference trainer: data, model, optimizer and loop, alone or with expert parallelism."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "TrainConfig": "lrmoe.training.config",
    "Trainer": "lrmoe.training.loop",
    "StepMetrics": "lrmoe.training.metrics",
    "Corpus": "lrmoe.training.data",
    "run_workers": "lrmoe.training.launch",
}

__all__ = ["Corpus", "StepMetrics", "TrainConfig", "Trainer", "run_workers"]

if TYPE_CHECKING:
    from lrmoe.training.config import TrainConfig as TrainConfig
    from lrmoe.training.data import Corpus as Corpus
    from lrmoe.training.launch import run_workers as run_workers
    from lrmoe.training.loop import Trainer as Trainer
    from lrmoe.training.metrics import StepMetrics as StepMetrics


def __getattr__(name: str) -> Any:
    # Lazy, so that reading a configuration or starting workers does not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'lrmoe.training' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
