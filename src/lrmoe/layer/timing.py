"""How long the layer's first exact calls took on this rank: what `drop="auto"` is calibrated with."""

from __future__ import annotations

from collections import deque

import numpy as np

from lrmoe.layer.drops import DropControl
from lrmoe.planning.problem import FloatArray
from lrmoe.telemetry.record import OpenCall

_FORWARD = ("dispatch", "experts", "combine")
_BACKWARD = ("exchange", "experts_backward", "return")
_WAITING = 4  # calls whose times may still come


class Timing:
    """Calls that are to be timed, read once their backward is done and their times need no waiting.

    Args:
        drops: says whether more is to be measured; without `drop="auto"` nothing is.
    """

    def __init__(self, drops: DropControl) -> None:
        self._drops = drops
        self._calls: deque[OpenCall] = deque(maxlen=_WAITING)

    def watch(self, call: OpenCall) -> None:
        """A call begins; exact training calls are timed."""
        auto = self._drops.auto
        exact = call.record.kept == call.record.pairs and call.record.drop_reason != "eval"
        if auto is not None and auto.measuring and exact:
            self._calls.append(call)

    def take(self, *, training: bool) -> FloatArray:
        """This rank's part of a message, float64 (4,): see `AutoDrop.measure`; (0,) without `drop="auto"`.

        Packing happens in both passes and counts half in each. Evaluation tells nothing and leaves all for later.
        """
        if self._drops.auto is None:
            return np.zeros(0)
        for call in tuple(self._calls) if training else ():
            if call.finished and call.clock.ready():
                self._calls.remove(call)
                ms, record = call.clock.read()[0], call.record
                pack = ms.get("pack", 0.0) / 2
                forward, backward = (
                    pack + sum(ms.get(name, 0.0) for name in names) for names in (_FORWARD, _BACKWARD)
                )
                rows = (record.rows_forward_local, record.rows_backward_local)
                return np.array([forward, backward, *map(float, rows)])
        return np.zeros(4)
