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


Pair = tuple[Tensor | None, Tensor | None]  # gate_up and down
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


class Sink:
    """Rows or matrices that blocks fill in parts, or what the product of an only block has brought.

    Torch's grouped product on CUDA takes no destination: copied into one, its result would lie there twice.

    Args:
        make: gives the buffer, at the latest when the first part is filled.
    """

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._buffer: Tensor | None = None

    def part(self, at: slice, *, alone: bool = False) -> Tensor | None:
        """Destination of a block; None: the block is `alone`, fills everything, and may bring its own memory."""
        return None if alone and self._buffer is None else self.whole[at]

    def take(self) -> None:
        """Have the buffer made now."""
        self._buffer = self.whole

    def put(self, made: Tensor) -> Tensor:
        """Take over what a block has made, whether or not it lies there already."""
        if self._buffer is None:
            self._buffer = made
        return made

    @property
    def whole(self) -> Tensor:
        """The buffer."""
        if self._buffer is None:
            self._buffer = self._make()
        return self._buffer

    @property
    def there(self) -> Tensor | None:
        """The buffer, or None as long as nothing was put there."""
        return self._buffer


def brings_memory(like: Tensor) -> bool:
    """Whether products take no destination where tensors are like this."""
    return like.is_cuda


class WeightGrads:
    """Gradients of this rank's seats, shaped as in Weights; None where not asked for (and without foreign seats).

    Args:
        homes, slots: gate_up and down of home seats, and of foreign ones.
    """

    def __init__(
        self, homes: tuple[Sink | None, Sink | None], slots: tuple[Sink | None, Sink | None]
    ) -> None:
        self._homes, self._slots = homes, slots

    @classmethod
    def like(
        cls, weights: Weights, needs: Needs, *, home: torch.dtype, slots: torch.dtype, zero: bool
    ) -> WeightGrads:
        """Buffers for the gradients in the given dtypes: zeros to add to, or uninitialised."""
        foreign = None if weights.slots is None else weights.slots.count

        def sink(like: Tensor, experts: int | None, needed: bool, dtype: torch.dtype) -> Sink | None:
            if experts is None or not needed:
                return None
            found = Sink(lambda: empty((experts, *like.shape[1:]), like, dtype=dtype))
            if zero:
                found.whole.zero_()
            elif dtype != like.dtype or not brings_memory(like):
                found.take()
            return found

        both = ((weights.gate_up, needs.gate_up), (weights.down, needs.down))
        gate_up, down = (
            (sink(like, weights.homes, needed, home), sink(like, foreign, needed, slots))
            for like, needed in both
        )
        return cls((gate_up[0], down[0]), (gate_up[1], down[1]))

    @property
    def home(self) -> Pair:
        """gate_up and down of home seats."""
        return _wholes(self._homes)

    @property
    def foreign(self) -> Pair:
        """gate_up and down of foreign seats."""
        return _wholes(self._slots)

    @property
    def there(self) -> list[Tensor | None]:
        """gate_up and down of home seats, then of foreign ones, as far as they lie somewhere already."""
        return [None if sink is None else sink.there for sink in (*self._homes, *self._slots)]

    def of(self, seats: slice, homes: int) -> Pair:
        """Of consecutive seats, all of them home seats or all foreign."""
        gate_up, down = self.foreign if seats.start >= homes else self.home
        at = _among(seats, homes)
        return None if gate_up is None else gate_up[at], None if down is None else down[at]

    def needs(self, projection: int) -> bool:
        """Whether gate_up (0) or down (1) gets gradients."""
        return self._homes[projection] is not None

    def fill(
        self,
        projection: int,
        seats: slice,
        homes: int,
        product: Callable[[Tensor | None], Tensor],
        *,
        add: bool,
    ) -> None:
        """Compute gradients of gate_up (0) or down (1) of consecutive seats, all home or all foreign, where asked for.

        Args:
            product: computes into its argument; into memory of its own where that is None.
            add: `product` adds.
        """
        sinks = self._slots if seats.start >= homes else self._homes
        sink = sinks[projection]
        if sink is not None:
            sink.put(product(sink.part(_among(seats, homes), alone=not add)))


def _among(seats: slice, homes: int) -> slice:
    """Consecutive seats among the home seats, or among the foreign ones."""
    before = homes if seats.start >= homes else 0
    return slice(seats.start - before, seats.stop - before)


def _wholes(sinks: tuple[Sink | None, Sink | None]) -> Pair:
    gate_up, down = (None if sink is None else sink.whole for sink in sinks)
    return gate_up, down


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
