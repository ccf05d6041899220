"""Traffic of expert copies that stay with their ranks: what a changed layout moves, and the sum of copies' gradients.

    change        new host <--- weights and optimizer state --- a host it had before      when the layout changes
    synchronise   host i collects part i of k from the other hosts, adds, sends the sum back     once a step

Part by part every host sends 2 (k - 1) / k of a gradient, as a ring all-reduce does.

Shape letters: R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrmoe.distributed import Comm
from lrmoe.distributed.messages import Exchange
from lrmoe.planning import LayerPlan

Hosts = NDArray[np.bool_]  # (R, E), whether a rank holds a copy of an expert


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A copy that a rank receives from another."""

    expert: int
    sender: int
    receiver: int


def hosts_of(plan: LayerPlan) -> Hosts:
    """Which rank holds which expert under a plan, bool (R, E)."""
    hosts_RE = np.zeros((plan.topology.ranks, plan.topology.experts), dtype=np.bool_)
    hosts_RE[plan.instance_rank_J, plan.instance_expert_J] = True
    return hosts_RE


def arrivals(old_RE: Hosts, new_RE: Hosts) -> list[Arrival]:
    """Copies that a change of layout makes, each from one of the hosts before, which take turns."""
    found = []
    for expert in np.flatnonzero((new_RE & ~old_RE).any(axis=0)).tolist():
        senders = np.flatnonzero(old_RE[:, expert]).tolist()
        receivers = np.flatnonzero(new_RE[:, expert] & ~old_RE[:, expert]).tolist()
        for number, receiver in enumerate(receivers):
            found.append(Arrival(expert=expert, sender=senders[number % len(senders)], receiver=receiver))
    return found


def change(comm: Comm, old_RE: Hosts, new_RE: Hosts, *, expert_bytes: int) -> int:
    """Move what a changed layout moves. Every rank calls it.

    The messages have the size of weights and optimizer state; their content is none, since the caller keeps the copies
    of a system that it only executes.

    Args:
        expert_bytes: of one expert's weights and optimizer state.

    Returns:
        Bytes that this rank sent.
    """
    moved = arrivals(old_RE, new_RE)
    sends = [
        (a.receiver, torch.zeros(expert_bytes, dtype=torch.uint8)) for a in moved if a.sender == comm.rank
    ]
    receives = [
        (a.sender, torch.empty(expert_bytes, dtype=torch.uint8)) for a in moved if a.receiver == comm.rank
    ]
    Exchange(comm, sends, receives).wait()
    return len(sends) * expert_bytes


def synchronise(comm: Comm, hosts_RE: Hosts, gradients: Mapping[int, Tensor]) -> int:
    """Give every host of an expert with several the sum of their gradients, in place. Every rank calls it.

    Args:
        gradients: by expert, flat, of all experts that this rank hosts, fp32 or fp64, alike on all ranks.

    Returns:
        Bytes that this rank sent.
    """
    shared = list(_shared(comm.rank, hosts_RE, gradients))
    sends, receives = [], []
    staged = [torch.empty((len(s.hosts) - 1, s.own.numel()), dtype=s.own.dtype) for s in shared]
    for copy, others in zip(shared, staged, strict=True):
        sends += [(host, part) for host, part in copy.foreign(comm.rank)]
        receives += list(zip((h for h in copy.hosts if h != comm.rank), others, strict=True))
    Exchange(comm, sends, receives).wait()
    for copy, others in zip(shared, staged, strict=True):
        copy.add(comm.rank, others)
    back = [(host, copy.own) for copy in shared for host in copy.hosts if host != comm.rank]
    Exchange(comm, back, [pair for copy in shared for pair in copy.foreign(comm.rank)]).wait()
    return sum(part.nbytes for _, part in (*sends, *back))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Shared:
    """An expert that this rank and others host: the gradient in equal parts, one per host."""

    hosts: list[int]
    parts: tuple[Tensor, ...]
    own: Tensor

    def foreign(self, rank: int) -> Iterator[tuple[int, Tensor]]:
        """The other hosts, each with its part."""
        return ((host, part) for host, part in zip(self.hosts, self.parts, strict=True) if host != rank)

    def add(self, rank: int, others: Tensor) -> None:
        """Own part plus the others', in the order of ranks."""
        place = self.hosts.index(rank)
        rows = [*others[:place], self.own, *others[place:]]
        total = rows[0].clone()
        for row in rows[1:]:
            total.add_(row)
        self.own.copy_(total)


def _shared(rank: int, hosts_RE: Hosts, gradients: Mapping[int, Tensor]) -> Iterator[_Shared]:
    for expert in np.flatnonzero(hosts_RE[rank] & (hosts_RE.sum(axis=0) > 1)).tolist():
        hosts = np.flatnonzero(hosts_RE[:, expert]).tolist()
        parts = gradients[expert].tensor_split(len(hosts))
        yield _Shared(hosts=hosts, parts=parts, own=parts[hosts.index(rank)])
