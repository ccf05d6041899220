"""The random generators of a training process, as JSON-able values and back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """The state of the generators of Python, NumPy and torch, as JSON-able values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _hex(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        found["cuda"] = _hex(torch.cuda.get_rng_state())
    return found


def restore_random(saved: Mapping[str, Any]) -> None:
    """Put back what `random_state` gave."""
    version, keys, gauss = saved["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = saved["numpy"]
    np.random.set_state((kind, np.array(numbers, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(saved["torch"]))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(saved["cuda"]))


def _hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
