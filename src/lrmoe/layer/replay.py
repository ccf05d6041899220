"""Activation checkpointing: a recompute reuses the routing ids and the plan of its first forward.

A recompute runs inside a backward. It is matched to its first forward by a token drawn from the CPU generator, whose
state checkpointing restores before it recomputes, so both draw the same.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.errors import ReplayError
from lrmoe.layer.announce import Planned

_LIMIT = 256  # first forwards remembered per layer


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstForward:
    """What a recompute needs: narrow int ids (T, K) after padding was taken out, and the planned call."""

    ids_TK: Tensor
    planned: Planned


class ReplayStore:
    """First forwards of one layer that a recompute may ask for."""

    def __init__(self) -> None:
        self._calls: OrderedDict[int, FirstForward | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, token: int, call: FirstForward) -> None:
        """Remember a call; beyond the limit the oldest is forgotten, and of two with one token both."""
        self._calls[token] = None if token in self._calls else call
        if len(self._calls) > _LIMIT:
            self._calls.popitem(last=False)

    def take(self, token: int, *, keep: bool) -> FirstForward:
        """The first forward with this token; `keep` it for a further recompute.

        Raises:
            ReplayError: no such call.
        """
        call = self._calls.get(token) if keep else self._calls.pop(token, None)
        if call is None:
            raise ReplayError(
                "a training-mode call inside a backward matches no earlier forward. Under torch.utils.checkpoint keep "
                "preserve_rng_state=True (the default), do not seed the CPU generator alike for two forwards in "
                f"flight, and recompute before the next optimizer step; the layer keeps the last {_LIMIT} forwards"
            )
        return call

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()


def draw_token() -> int:
    """A number from the CPU generator: the same in a first forward and its recompute."""
    return int(torch.randint(2**62, ()).item())


def inside_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def may_recompute() -> bool:
    """Whether this forward may be run again by checkpointing: gradients off, or hooks on saved tensors."""
    return (
        not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )
