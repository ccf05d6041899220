"""Buffers of the experts at this rank's seats: scratch, what blocks fill, rows by index.

Shape letters: H hidden, I expert width, M rows in (seat, source) order, S rows of a source buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from lrmoe.distributed.probe import current
from lrmoe.ops import Workspace, gather_rows

scratch = Workspace(lambda buffer: current().scratch(buffer))


def release_scratch() -> None:
    """Give this thread's scratch buffers back; the next call takes new ones."""
    scratch.release()


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
