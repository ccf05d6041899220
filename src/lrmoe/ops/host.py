"""Numbers between host and device without waiting for what the device has still to do.

A copy to or from ordinary host memory may wait for all that was asked of the device before; one to or from pinned
memory does not. A pinned buffer may be let go of while a copy is on its way: torch's allocator hands its memory out
again only after the copy. On a CPU nothing is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


def upload(values: ArrayLike, device: torch.device) -> Tensor:
    """An array of the host on `device`, in its dtype; on a CPU it shares the array's memory.

    The caller may go on at once, and change or drop the array where the device is another one.
    """
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda" or host.numel() == 0:
        return host.to(device)
    return _pinned(host).to(device, non_blocking=True)


class Reading:
    """A tensor's values on their way to the host; the tensor may be dropped, but not changed on a CPU, until `wait`."""

    def __init__(self, values: Tensor) -> None:
        self._event: Any = None
        if values.device.type == "cuda" and values.numel():
            self._host = _room(values)
            self._host.copy_(values, non_blocking=True)
            self._event = _recorded(values.device)
        else:
            self._host = values.cpu()

    def wait(self) -> Tensor:
        """The values, on the host; waits for the copy and what led to it, not for what was asked for later."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


def _pinned(host: Tensor) -> Tensor:
    return host.pin_memory()


def _room(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _recorded(device: torch.device) -> torch.cuda.Event:
    """An event after all that was asked of the device's current stream so far."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
