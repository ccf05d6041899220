"""Passes over rows compiled from C: gated activation with norms, its backward, sums per token."""

from lrmoe.ops.cpu.choose import inclusion, sample
from lrmoe.ops.cpu.library import LEVELS, fuses, limited, state
from lrmoe.ops.cpu.passes import combine, gate, gate_backward, indexes, norms

__all__ = [
    "LEVELS",
    "combine",
    "fuses",
    "gate",
    "gate_backward",
    "inclusion",
    "indexes",
    "limited",
    "norms",
    "sample",
    "state",
]
