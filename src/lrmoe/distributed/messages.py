"""Whole tensors from rank to rank, sent from where they lie and received where they are used."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.distributed.comm import Comm, Keep, abandoned
from lrmoe.distributed.peers import waiting


class Exchange:
    """Sends and receives on their way; the tensors must stay as they are until `wait`.

    The messages between two ranks must come in the same order on both. On CUDA everything is one batch, ordered after
    the current stream's work; a rank without messages takes no part.

    Args:
        sends: (rank, tensor) to send there; one that is not contiguous is copied first.
        receives: (rank, contiguous tensor) to fill from there.
    """

    def __init__(
        self, comm: Comm, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]
    ) -> None:
        self._works: list[dist.Work] = []
        self._ops = [
            dist.P2POp(way, _as_bytes(tensor), group=comm.group, group_peer=rank)
            for way, rank, tensor in chain(
                ((dist.irecv, rank, tensor) for rank, tensor in receives),
                ((dist.isend, rank, tensor.contiguous()) for rank, tensor in sends),
            )
        ]
        self._what = f"{comm.name}: an exchange of weights or gradients"
        with waiting(self._what):
            if self._ops:
                self._works = dist.batch_isend_irecv(self._ops)

    def wait(self) -> None:
        """Return when everything has arrived; on CUDA the current stream waits, not the host.

        Raises:
            RankError: some rank was lost, or did not come in time.
        """
        with waiting(self._what):
            for work in self._works:
                work.wait()
        self._ops, self._works = [], []

    def __del__(self, keep: Keep = abandoned.append) -> None:
        # Nobody has waited: without its receive gloo leaves a message unread, and the two ranks meet no more.
        if self._works:
            keep((self._ops, self._works))


def _as_bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor: backends need not know the dtype."""
    return tensor.detach().view(-1).view(torch.uint8)
