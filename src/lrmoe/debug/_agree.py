"""Findings of one rank, made known to all: one integer per rank where nobody found anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lrmoe.distributed import Comm
from lrmoe.errors import CheckError
from lrmoe.planning.problem import IntArray

_MOST = 4000  # characters of a rank's findings that the others are told


class Findings:
    """What this rank found in the call in progress and has not told yet."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        """Keep a finding until the ranks meet next."""
        self._texts.append(text)

    def clear(self) -> None:
        """Forget what was found: the call has failed otherwise."""
        self._texts.clear()

    def meet(self, comm: Comm, place: str, like: Tensor, numbers: Sequence[int] = ()) -> IntArray:
        """All ranks' numbers, int64 (R, W). Every rank comes here, at the same point of the call.

        Raises:
            CheckError: some rank found something; the same on every rank.
        """
        text = "; ".join(self._texts)[:_MOST].encode("ascii", "replace")
        self._texts.clear()
        row = torch.tensor([len(text), *numbers], dtype=torch.int64, device=like.device)
        table = comm.all_gather_ints(row).cpu().numpy()
        if table[:, 0].any():
            raise CheckError(f"{place}: {self._told(comm, text, int(table[:, 0].max()), like)}")
        return table[:, 1:]

    @staticmethod
    def _told(comm: Comm, text: bytes, longest: int, like: Tensor) -> str:
        row = torch.tensor(list(text.ljust(longest)), dtype=torch.int64, device=like.device)
        texts = [bytes(line).decode("ascii").strip() for line in comm.all_gather_ints(row).cpu().tolist()]
        if comm.size == 1:
            return texts[0]
        return " | ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
