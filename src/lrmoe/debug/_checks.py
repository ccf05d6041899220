"""The probe that checks. What one rank finds is told at the next point where all ranks meet, which is soon:
before every exchange, since rows that do not add up would leave ranks waiting for each other, and at the end of a walk.

Shape letters: R ranks, Q seats, S seats of this rank, E experts, N pairs of this source, M rows received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrmoe.debug._agree import Findings
from lrmoe.debug._find import digests, expert_of_row, not_finite
from lrmoe.debug._poison import PoisonEmpty, poison
from lrmoe.distributed import Comm
from lrmoe.distributed.probe import Check, Phases, Probe
from lrmoe.errors import CheckError
from lrmoe.planning import LayerPlan
from lrmoe.planning.problem import IntArray


class _Latest:
    """Stands in for a clock where there is no walk."""

    latest = ""


class Checks(Probe):
    """What `lrmoe.debug` looks at in layer calls.

    Attributes:
        made: how many checks were made, by kind: "plan", "exchange", "kept", "finite", "poison".
    """

    def __init__(self, *, poison: bool, plans: bool, rows: bool, finite: bool) -> None:
        self.made: Counter[str] = Counter()
        self._poison, self._plans, self._rows, self._finite = poison, plans, rows, finite
        self._findings = Findings()
        self._comm: Comm | None = None
        self._where = "outside a layer call"
        self._clock: Phases = _Latest()
        self._like = torch.empty(0)

    def plan(self, comm: Comm, layer: int, plan: LayerPlan, like: Tensor) -> None:
        """Every rank must have made the same plan."""
        if not self._plans:
            return
        self.made["plan"] += 1
        place = f"MoE layer {layer}, phase plan"
        prints = self._findings.meet(comm, place, like, [plan.fingerprint()])[:, 0]
        if (prints == prints[0]).all():
            return
        hashes = _hashes(plan)
        table = self._findings.meet(comm, place, like, list(hashes.values()))
        unlike = [str(rank) for rank, one in enumerate(prints) if one != prints[0]]
        names = [name for name, column in zip(hashes, table.T, strict=True) if (column != column[0]).any()]
        raise CheckError(
            f"{place}: plans differ between ranks: rank {', '.join(unlike)} from rank 0, in {', '.join(names)}"
        )

    @contextmanager
    def walk(self, comm: Comm, layer: int, direction: str, clock: Phases, like: Tensor) -> Iterator[None]:
        """Poison what is allocated within; at the end all ranks tell what they found."""
        before = self._comm, self._where, self._clock, self._like
        where = f"MoE layer {layer}, {direction}"
        self._comm, self._where, self._clock, self._like = comm, where, clock, like
        clock.latest = ""  # the phase before is over
        try:
            with PoisonEmpty() if self._poison else nullcontext():
                yield
            self._findings.meet(comm, self._where, like)
        finally:
            self._findings.clear()
            self._comm, self._where, self._clock, self._like = before

    def tokens(self, name: str, rows: Tensor, pair_N: Tensor, slots: int, *, by_pair: bool = False) -> None:
        """Tokens without a pair may hold anything: padding often does."""
        if by_pair:
            self._look(
                name, rows.reshape(-1, 1), pair_N, lambda pair: f"token {pair // slots}, slot {pair % slots},"
            )
        else:
            self._look(name, rows, pair_N // max(slots, 1), lambda token: f"token {token}")

    def weights(self, experts: Sequence[int], named: Mapping[str, Tensor | None]) -> None:
        """Every expert's entry is finite."""
        for name, tensor in named.items():
            if tensor is not None:
                self._look(name, tensor.flatten(1), None, lambda entry: f"expert {experts[entry]}")

    def experts(
        self,
        name: str,
        rows: Tensor | None,
        index_M: Tensor | None,
        experts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """Every row was written, with finite numbers."""
        if rows is not None:
            self._look(
                name,
                rows,
                None,
                lambda row: f"a row of expert {int(expert_of_row(index_M, experts, counts)[row])}",
            )

    def kept(self, plan: LayerPlan, expert_Q: IntArray, kept_RQ: IntArray, mine: Tensor | None) -> None:
        """Quotas are kept to, and the table of kept pairs is what this rank kept."""
        if not self._rows or self._comm is None:
            return
        self.made["kept"] += 1
        kept_E = np.zeros_like(plan.quota_E)
        np.add.at(kept_E, expert_Q, kept_RQ.sum(axis=0))
        for expert in np.flatnonzero(kept_E != plan.quota_E)[:3]:
            self._found(
                f"{kept_E[expert]} pairs of expert {expert} kept, its quota is {plan.quota_E[expert]}"
            )
        told = int(kept_RQ[self._comm.rank].sum())
        held = told if mine is None else int((mine > 0).sum())
        if held != told:
            self._found(f"{held} pairs of this rank have a weight, the ranks were told {told}")
        self._findings.meet(self._comm, self._where, self._like)

    def values(self, named: Mapping[str, Tensor | None]) -> None:
        """What a walk gives back is finite."""
        for name, tensor in named.items():
            if tensor is not None:
                self._look(name, tensor, None, lambda token: f"token {token}")

    def scratch(self, buffer: Tensor) -> None:
        """Kept scratch holds what its last user left."""
        if self._poison and self._comm is not None:
            self.made["poison"] += 1
            poison(buffer)

    def crossing(
        self, comm: Comm, rows: Tensor, send_R: Sequence[int], receive_R: Sequence[int]
    ) -> Check | None:
        """What every rank sends is what the others wait for, and what arrives is what was sent."""
        if not self._rows:
            return None
        self.made["exchange"] += 1
        if rows.shape[0] != sum(send_R):
            self._found(f"{rows.shape[0]} rows packed, {sum(send_R)} to be sent")
        marks = digests(rows, send_R) if rows.shape[0] == sum(send_R) else [0] * comm.size
        table = self._findings.meet(comm, self._where, rows, [*send_R, *receive_R, *marks])
        send_RR, receive_RR, mark_RR = np.split(table, 3, axis=1)
        for source, to in np.argwhere(send_RR != receive_RR.T)[:1]:
            raise CheckError(
                f"{self._place}: rank {source} sends {send_RR[source, to]} rows to rank {to}, which waits for "
                f"{receive_RR[to, source]}"
            )
        return partial(self._crossed, receive_R, mark_RR[:, comm.rank].tolist())

    def _crossed(self, receive_R: Sequence[int], expected_R: Sequence[int], rows: Tensor) -> None:
        """What arrived has the digests of what was sent."""
        for source, (found, told) in enumerate(zip(digests(rows, receive_R), expected_R, strict=True)):
            if found != told:
                self._found(f"rows from rank {source} are not those that it sent")

    @property
    def _place(self) -> str:
        return f"{self._where}, phase {self._clock.latest}" if self._clock.latest else self._where

    def _found(self, text: str) -> None:
        """Tell it at the next meeting; alone, at once."""
        if self._comm is not None and self._comm.size == 1:
            raise CheckError(f"{self._place}: {text}")
        phase = self._clock.latest
        self._findings.add(f"{text} (phase {phase})" if phase else text)

    def _look(self, name: str, rows: Tensor, index: Tensor | None, label: Callable[[int], str]) -> None:
        if not (self._finite or self._poison):
            return
        self.made["finite"] += 1
        text = not_finite(rows, index, label, unwritten_only=not self._finite)
        if text is not None:
            self._found(f"{name}: {text}")


def _hashes(plan: LayerPlan) -> dict[str, int]:
    """A hash of each field that decides what a plan does."""
    given = {field.name: getattr(plan, field.name) for field in fields(plan)}
    nothing = np.zeros(0, dtype=np.int64)
    arrays: dict[str, Any] = {name: nothing for name, value in given.items() if isinstance(value, np.ndarray)}
    bare = replace(plan, traffic=None, **arrays)
    return {name: replace(bare, **{name: value}).fingerprint() for name, value in given.items()}
