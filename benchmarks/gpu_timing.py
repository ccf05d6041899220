"""Times and peaks of calls that take turns, for `gpu_check.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[..., object]
WARM_UP = 3
FEW_ROUNDS, LONG_MS = 3, 400.0  # a call that takes longer runs in few rounds


def medians(calls: Mapping[str, Call], repeats: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of each call, which take turns; the first rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    warm = {name: [elapsed_ms(call, device) for _ in range(WARM_UP)][-1] for name, call in calls.items()}
    for turn in range(repeats):
        for name, call in calls.items():
            if turn < FEW_ROUNDS or warm[name] < LONG_MS:
                times[name].append(elapsed_ms(call, device))
    return {name: statistics.median(values) for name, values in times.items()}


def elapsed_ms(call: Call, device: torch.device) -> float:
    """Wall time until the device is done: host work that the device waits for counts."""
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return (time.perf_counter() - start) * 1e3


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most that a call has allocated on a CUDA device."""
    _wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
