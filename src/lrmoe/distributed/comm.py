"""Collectives over rows: variable all-to-all and a small all-gather, with the bytes that leave this rank.

Shape letters: R ranks, N rows sent, M rows received.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.distributed.peers import waiting
from lrmoe.distributed.probe import Check, current

# Newer torch has the same collective under another name and deprecates the old one.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_ROWS = "an exchange of rows"

Keep = Callable[[tuple[object, ...]], None]

# Of exchanges that failed, or that nobody waited for: a backend may still be at work in them. Never freed, not even
# where the interpreter ends: it gives modules' references up while a backend's threads go on.
abandoned: list[tuple[object, ...]] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(abandoned))


class Arriving:
    """Rows on their way: what an all-to-all in progress will have received.

    Attributes:
        received: rows that it fills; not to be read before `wait`.

    Args:
        sent: rows that it reads; they stay as they are until `wait`.
        work: the collective; None where it has ended. name: whose it is, for errors.
        check: looks at what has arrived.
    """

    def __init__(
        self,
        received: Tensor,
        sent: Tensor,
        work: dist.Work | None = None,
        name: str = "",
        check: Check | None = None,
    ) -> None:
        self.received, self._work, self._name, self._check = received, work, name, check
        self._sent: Tensor | None = sent

    def wait(self) -> Tensor:
        """The received rows; later calls return them at once."""
        if self._work is not None:
            with waiting(f"{self._name}: {_ROWS}"):
                self._work.wait()
            self._work = None
        self._sent = None
        if self._check is not None:
            self._check(self.received)
            self._check = None
        return self.received

    def __del__(self, keep: Keep = abandoned.append) -> None:  # globals are gone where the interpreter ends
        # Nobody has waited: the backend may still be at work. Its thread must not be the last to hold the work: letting
        # go of its tensors needs the interpreter, whose end would then abort the process.
        if self._work is not None:
            keep((self.received, self._sent, self._work))


class Comm:
    """One expert-parallel group as the layer uses it; a group of one needs no process group.

    Args:
        group: process group, or None for a single rank.
        name: whose exchanges these are, for errors. Every exchange that fails because of another rank is a RankError.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str = "experts") -> None:
        self.group, self.name = group, name
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def all_gather_ints(self, row: Tensor, what: str = "an exchange of numbers") -> Tensor:
        """All ranks' int64 vectors, (R, W) on the device of `row`; `what` says in errors what for."""
        if self.size == 1:
            return row.unsqueeze(0)
        out = row.new_empty((self.size, row.shape[0]))
        with waiting(f"{self.name}: {what}"):
            _ALL_GATHER(out.view(-1), row.contiguous(), group=self.group)
        return out

    def all_to_all(self, rows: Tensor, send_R: Sequence[int], receive_R: Sequence[int]) -> Tensor:
        """Send `send_R[r]` consecutive rows to rank r and receive `receive_R[r]` rows from it, in rank order.

        Args:
            rows: (N, ...) contiguous, N = sum(send_R), any dtype (rows cross as bytes).

        Returns:
            (M, ...), M = sum(receive_R).
        """
        return self._exchange(rows, send_R, receive_R, beside=False).wait()

    def start_all_to_all(self, rows: Tensor, send_R: Sequence[int], receive_R: Sequence[int]) -> Arriving:
        """`all_to_all` that goes on beside what the caller does next; `rows` must not change until it has ended."""
        return self._exchange(rows, send_R, receive_R, beside=True)

    def _exchange(
        self, rows: Tensor, send_R: Sequence[int], receive_R: Sequence[int], *, beside: bool
    ) -> Arriving:
        if self.size == 1:
            return Arriving(rows, rows)
        check = current().crossing(self, rows, send_R, receive_R)
        out = rows.new_empty((sum(receive_R), *rows.shape[1:]))
        with waiting(f"{self.name}: {_ROWS}"), _lent(out, rows) as (to, of):
            work = dist.all_to_all_single(
                to, of, list(receive_R), list(send_R), group=self.group, async_op=beside
            )
        return Arriving(out, rows, work if beside else None, self.name, check)

    def sent_bytes(self, rows: Tensor, send_R: Sequence[int]) -> int:
        """Bytes of an all-to-all that leave this rank."""
        if self.size == 1 or rows.shape[0] == 0:
            return 0
        width = rows[0].numel() * rows.element_size()
        return (sum(send_R) - send_R[self.rank]) * width


@contextmanager
def _lent(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Views as bytes for a collective whose tensors somebody else keeps until it has ended.

    gloo's thread lets go of its tensors a moment after a collective has ended. On CPU it is given views that own
    nothing, so that a buffer is gone when its last user is and memory is what a plan says.
    """
    try:
        yield [_unowned(t) if t.device.type == "cpu" and t.numel() else _as_bytes(t) for t in tensors]
    except BaseException:
        abandoned.append(tensors)
        raise


def _unowned(rows: Tensor) -> Tensor:
    """(N, bytes of a row) view of a contiguous tensor's memory that does not keep it alive."""
    memory = (ctypes.c_uint8 * rows.nbytes).from_address(rows.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows.shape[0], -1)


def _as_bytes(rows: Tensor) -> Tensor:
    """(N, bytes of a row) view: backends need not know the dtype."""
    width = rows[:1].numel() * rows.element_size() if rows.shape[0] else 1
    if rows.shape[0] == 0:
        return rows.new_empty((0, width), dtype=torch.uint8)
    return rows.reshape(rows.shape[0], -1).view(torch.uint8)
