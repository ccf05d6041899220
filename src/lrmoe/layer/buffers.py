"""What the experts at this rank's seats compute with: their weights, gradients to fill, rows by index, scratch.

Shape letters: L seats of home experts, F foreign seats, H hidden, I expert width, M rows in (seat, source) order, N
rows of a source buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from lrmoe.distributed.probe import current
from lrmoe.ops import Workspace, empty, gather_rows

scratch = Workspace(lambda buffer: current().scratch(buffer))


def release_scratch() -> None:
    """Give this thread's scratch buffers back; the next call takes new ones."""
    scratch.release()


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Weights of this rank's seats in the compute dtype.

    Attributes:
        gate_up: (L, 2I, H), gate first; down: (L, H, I); activation: a name of ops.ACTIVATIONS.
        slot_gate_up, slot_down: the same of foreign seats (F first), or None where there is none.
    """

    gate_up: Tensor
    down: Tensor
    activation: str
    slot_gate_up: Tensor | None = None
    slot_down: Tensor | None = None

    @property
    def homes(self) -> int:
        """L, the seats before the foreign ones."""
        return self.gate_up.shape[0]

    def of(self, seats: slice) -> tuple[Tensor, Tensor]:
        """gate_up and down of consecutive seats, all of them home seats or all foreign."""
        if seats.start < self.homes:
            return self.gate_up[seats], self.down[seats]
        assert self.slot_gate_up is not None, "foreign seats have slots"
        assert self.slot_down is not None, "foreign seats have slots"
        slots = slice(seats.start - self.homes, seats.stop - self.homes)
        return self.slot_gate_up[slots], self.slot_down[slots]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Which weights need gradients."""

    gate_up: bool
    down: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightGrads:
    """Gradients of this rank's seats, shaped as in Weights; None where not asked for (and without foreign seats)."""

    gate_up: Tensor | None
    down: Tensor | None
    slot_gate_up: Tensor | None = None
    slot_down: Tensor | None = None

    @classmethod
    def like(
        cls, weights: Weights, needs: Needs, *, home: torch.dtype, slots: torch.dtype, zero: bool
    ) -> WeightGrads:
        """Buffers for the gradients in the given dtypes: zeros to add to, or uninitialised."""

        def buffer(tensor: Tensor | None, needed: bool, dtype: torch.dtype) -> Tensor | None:
            if tensor is None or not needed:
                return None
            found = empty(tuple(tensor.shape), tensor, dtype=dtype)
            return found.zero_() if zero else found

        return cls(
            gate_up=buffer(weights.gate_up, needs.gate_up, home),
            down=buffer(weights.down, needs.down, home),
            slot_gate_up=buffer(weights.slot_gate_up, needs.gate_up, slots),
            slot_down=buffer(weights.slot_down, needs.down, slots),
        )

    def of(self, seats: slice, homes: int) -> tuple[Tensor | None, Tensor | None]:
        """Buffers of consecutive seats, all of them home seats or all foreign."""
        foreign = seats.start >= homes
        gate_up, down = (self.slot_gate_up, self.slot_down) if foreign else (self.gate_up, self.down)
        at = slice(seats.start - homes, seats.stop - homes) if foreign else seats
        return None if gate_up is None else gate_up[at], None if down is None else down[at]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows of a buffer taken by index, without a copy until they are needed.

    Attributes:
        source: (S, width); index_M: int64 (M,) or None where the rows already lie in order.
    """

    source: Tensor
    index_M: Tensor | None

    def take(self, name: str, begin: int, end: int) -> Tensor:
        """Rows begin..end as one contiguous buffer (scratch under `name` where they must be gathered)."""
        if self.index_M is None:
            return self.source[begin:end]
        out = scratch.take(name, (end - begin, self.source.shape[1]), self.source)
        return gather_rows(self.source, self.index_M[begin:end], out=out)

    def part(self, rows: slice) -> Rows:
        """Some consecutive rows."""
        if self.index_M is None:
            return Rows(source=self.source[rows], index_M=None)
        return Rows(source=self.source, index_M=self.index_M[rows])


@dataclass(kw_only=True, eq=False)
class Stash:
    """First projections that stay for backward, of some of the rows: taken out of each block while it is in cache.

    Attributes:
        index_P: int64 (P,), the rows that stay among those in (seat, source) order, ascending.
        counts_S: how many of them each seat has.
        h_P2I: theirs, in that order, once `experts_forward` has run.
    """

    index_P: Tensor
    counts_S: Sequence[int]
    h_P2I: Tensor | None = field(default=None, init=False)

    def add(self, h: Tensor, seats: slice, at: slice) -> None:
        """Copy from the first projections `h` of the rows `at`, which belong to `seats`."""
        ends = [0, *accumulate(self.counts_S)]
        if self.h_P2I is None:  # not before the first product is there: its inputs are gone by then
            self.h_P2I = scratch.lasting((ends[-1], h.shape[1]), h)
        stay = slice(ends[seats.start], ends[seats.stop])
        gather_rows(h, self.index_P[stay] - at.start, out=self.h_P2I[stay])
