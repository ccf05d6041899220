"""Passes over rows compiled from C: gated activation with norms, its backward, sums per token, the choice of pairs."""

from lrmoe.ops.cpu.choose import inclusion, keep
from lrmoe.ops.cpu.library import LEVELS, fuses, limited, state
from lrmoe.ops.cpu.passes import combine, gate, gate_backward, indexes, norms
from lrmoe.ops.cpu.sums import score_sums, token_entries

__all__ = [
    "LEVELS",
    "combine",
    "fuses",
    "gate",
    "gate_backward",
    "inclusion",
    "indexes",
    "keep",
    "limited",
    "norms",
    "score_sums",
    "state",
    "token_entries",
]
