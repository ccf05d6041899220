"""What the experts at this rank's seats compute with: their weights, gradients to fill, rows by index, scratch.

Shape letters: L seats of home experts, F foreign seats, H hidden, I expert width, M rows in (seat, source) order, N
rows of a source buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

from lrmoe.distributed.probe import current
from lrmoe.ops import Workspace, empty, gather_rows

scratch = Workspace(lambda buffer: current().scratch(buffer))


def release_scratch() -> None:
    """Give this thread's scratch buffers back; the next call takes new ones."""
    scratch.release()


Wait = Callable[[], tuple[Tensor, Tensor]]  # gives gate_up (F, 2I, H) and down (F, H, I) of foreign seats


class Slots:
    """Weights of this rank's foreign seats, brought here beside what the call does meanwhile.

    Args:
        count: F. begin: starts to bring them; what it gives waits for them.
    """

    def __init__(self, count: int, begin: Callable[[], Wait]) -> None:
        self.count = count
        self._begin = begin
        self._wait: Wait | None = None
        self._weights: tuple[Tensor, Tensor] | None = None
        self._released = False

    @classmethod
    def here(cls, gate_up: Tensor, down: Tensor) -> Slots:
        """Weights that need not be brought."""
        return cls(gate_up.shape[0], lambda: lambda: (gate_up, down))

    def start(self) -> None:
        """Begin, once. Every rank does, at the same point between its exchanges."""
        if self._wait is None:
            self._wait = self._begin()

    def wait(self) -> tuple[Tensor, Tensor]:
        """gate_up and down; every rank calls it, as others may wait for what it passes on."""
        self.start()
        if self._weights is None:
            assert self._wait is not None, "begun"
            self._weights = self._wait()
        return self._weights

    def release(self) -> None:
        """Finish, and let go of the weights: nobody reads them again."""
        if not self._released:
            self.wait()
            self._released, self._weights = True, None
            self._begin = self._wait = _gone


def _gone() -> NoReturn:
    raise AssertionError("weights of foreign seats are read after their release")


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Weights of this rank's seats in the compute dtype.

    Attributes:
        gate_up: (L, 2I, H), gate first; down: (L, H, I); activation: a name of ops.ACTIVATIONS.
        slots: those of foreign seats, or None where no rank has any.
    """

    gate_up: Tensor
    down: Tensor
    activation: str
    slots: Slots | None = None

    @property
    def homes(self) -> int:
        """L, the seats before the foreign ones."""
        return self.gate_up.shape[0]

    def of(self, seats: slice) -> tuple[Tensor, Tensor]:
        """gate_up and down of consecutive seats, all of them home seats or all foreign, which are waited for."""
        if seats.start < self.homes:
            return self.gate_up[seats], self.down[seats]
        assert self.slots is not None, "foreign seats have slots"
        gate_up, down = self.slots.wait()
        slots = slice(seats.start - self.homes, seats.stop - self.homes)
        return gate_up[slots], down[slots]

    def start(self) -> None:
        """Let the foreign ones come: rows that they compute with are here, and nothing else is on the wire."""
        if self.slots is not None:
            self.slots.start()

    def release(self) -> None:
        """Let go of the foreign ones, on every rank, also one that has none."""
        if self.slots is not None:
            self.slots.release()

    def foreign(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """gate_up and down of all foreign seats, waited for; on every rank, also one that has none."""
        return (None, None) if self.slots is None else self.slots.wait()


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
        foreign = None if weights.slots is None else weights.slots.count

        def buffer(like: Tensor, experts: int | None, needed: bool, dtype: torch.dtype) -> Tensor | None:
            if experts is None or not needed:
                return None
            found = empty((experts, *like.shape[1:]), like, dtype=dtype)
            return found.zero_() if zero else found

        return cls(
            gate_up=buffer(weights.gate_up, weights.homes, needs.gate_up, home),
            down=buffer(weights.down, weights.homes, needs.down, home),
            slot_gate_up=buffer(weights.gate_up, foreign, needs.gate_up, slots),
            slot_down=buffer(weights.down, foreign, needs.down, slots),
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
