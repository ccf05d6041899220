"""What ranks tell each other at the start of a layer call, so that a fault on one rank is an error on all of them.

The header rides in the counts all-gather: no collective of its own. A rank whose input is bad still joins, with its
fault in the header, and every rank raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from lrmoe.errors import RankError
from lrmoe.planning.problem import IntArray


class Fault(IntEnum):
    """Why a rank cannot go on with a call."""

    NONE = 0
    INPUT = 1
    OTHER = 2


_FAULT_TEXT = {
    Fault.INPUT: "was given bad input",
    Fault.OTHER: "failed",
}


PLACE = ("layer", "training", "step", "micro_batch")  # which call it is


@dataclass(frozen=True, kw_only=True)
class Header:
    """One rank's part of a call's all-gather, besides its counts.

    Fields after `tokens` must be equal on all ranks.

    Attributes:
        layer: index of the layer.
        training: 1 in a training call, which `step` and `micro_batch` count from 0; 0 in evaluation.
    """

    fault: int = 0
    tokens: int = 0
    layer: int = 0
    step: int = 0
    micro_batch: int = 0
    hidden: int = 0
    dtype: int = 0
    training: int = 0
    gradients: int = 0
    config: int = 0

    WIDTH = 10
    AGREE = ("config", *PLACE, "hidden", "dtype", "gradients")

    def to_ints(self) -> IntArray:
        """int64 (WIDTH,), in the order of the table's columns."""
        return np.array([getattr(self, name) for name in _COLUMNS], dtype=np.int64)


_COLUMNS = ("fault", "tokens", *Header.AGREE)


class HeaderTable:
    """All ranks' headers, (R, WIDTH)."""

    def __init__(self, table_RW: IntArray) -> None:
        self._columns = {name: table_RW[:, i] for i, name in enumerate(_COLUMNS)}

    @property
    def tokens_R(self) -> IntArray:
        """Tokens of every rank, int64 (R,)."""
        return self._columns["tokens"].copy()  # no view, which would keep the whole table

    def raise_on_trouble(self, rank: int, layer: int) -> None:
        """Raise the same RankError on every rank where one reported a fault or the ranks disagree."""
        faults = self._columns["fault"]
        if faults.any():
            parts = [f"rank {r} {_FAULT_TEXT[Fault(int(f))]}" for r, f in enumerate(faults) if f]
            raise RankError(
                f"MoE layer {layer}: {'; '.join(parts)} (this is rank {rank}; see that rank's own error)"
            )
        for name in Header.AGREE:
            values = self._columns[name]
            if (values != values[0]).any():
                seen = ", ".join(f"rank {r}: {int(v)}" for r, v in enumerate(values))
                calls = f"; {self._calls()}" if name in PLACE else ""
                raise RankError(f"MoE layer {layer}: {MEANING[name]} differs between ranks ({seen}){calls}")

    def _calls(self) -> str:
        """Where every rank is."""
        rows = zip(*(self._columns[name].tolist() for name in PLACE), strict=True)
        where = [
            f"rank {r} makes {call_name(*call)} of layer {layer}" for r, (layer, *call) in enumerate(rows)
        ]
        return f"{', '.join(where)}: every rank must make the same calls, in evaluation and generation too"


def call_name(training: int, step: int, micro_batch: int) -> str:
    """A layer's call in words."""
    return f"training call {micro_batch + 1} of step {step}" if training else "a call in evaluation mode"


MEANING = {
    "layer": "the layer's index",
    "config": "the configuration (hash; seed and all limits must be the same on every rank)",
    "step": "the optimizer step (did every rank step its clock?)",
    "micro_batch": "the number of calls in this step (did every rank call the layer equally often?)",
    "hidden": "the hidden size of the input",
    "dtype": "the dtype (code) experts compute in: their weights' or autocast's",
    "training": "training or evaluation mode",
    "gradients": "which tensors need gradients, or checkpointing (bits: input 1, routing weights 2, gate_up 4, down 8, "
    "16 under no_grad, 32 under a non-reentrant checkpoint)",
}
