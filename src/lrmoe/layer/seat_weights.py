"""What the experts at this rank's seats compute with, and what they leave: weights and their gradients.

Shape letters: L seats of home experts, F foreign seats, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from lrmoe.layer.buffers import Sink, brings_memory
from lrmoe.ops import empty

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
