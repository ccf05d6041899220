"""Activation checkpointing: a recompute reuses the routing ids and the plan of its first forward.

A recompute runs inside a backward. It is matched to its first forward by a token drawn from the CPU generator, whose
state checkpointing restores before it recomputes, so both draw the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.errors import ReplayError
from lrmoe.layer.announce import Planned
from lrmoe.layer.call import Memo
from lrmoe.ops import Reading

_LIMIT = 256  # first forwards remembered per layer
_USED_LIMIT = 8  # of those, already recomputed once: a retained graph or a nested checkpoint asks again
_AGREE = (
    0.5  # least share of equal ids between a forward and its recompute; noise moves few, another call most
)


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstForward:
    """What a recompute needs: narrow int ids (T, K) after padding was taken out, the planned call, what both share."""

    ids_TK: Tensor
    planned: Planned
    memo: Memo


class ReplayStore:
    """First forwards of one layer that a recompute may ask for. All are forgotten at the next optimizer step."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, FirstForward | None] = OrderedDict()
        self._used: OrderedDict[int, FirstForward] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, token: int, call: FirstForward) -> None:
        """Remember a call; beyond the limit the oldest is forgotten, and of two with one token both."""
        self._used.pop(token, None)
        self._waiting[token] = None if token in self._waiting else call
        if len(self._waiting) > _LIMIT:
            self._waiting.popitem(last=False)

    def take(self, token: int, ids_TK: Tensor, *, again: bool) -> tuple[FirstForward, Callable[[], None]]:
        """The first forward with this token, and a check of it for when the recompute has been asked of the device.

        The check waits for no more than the ids, so that a device has work meanwhile; a CPU checks at once.

        Args:
            ids_TK: the recompute's own ids, to tell another call's token from a little noise in the router.
            again: a further recompute is certain (this one runs without gradients).

        Raises:
            ReplayError: no such call, or its ids are another call's; the check raises the same.
        """
        call = self._waiting.get(token) or self._used.get(token)
        if call is None or call.ids_TK.shape != ids_TK.shape:
            raise _no_such_call()
        same = Reading(_same_call(call.ids_TK, ids_TK))

        def check() -> None:
            if not bool(same.wait()):
                raise _no_such_call()

        if _at_once(ids_TK.device):
            check()
        if not again and self._waiting.pop(token, None) is not None:
            self._used[token] = call
            if len(self._used) > _USED_LIMIT:
                self._used.popitem(last=False)
        return call, check

    def clear(self) -> None:
        """Forget all calls."""
        self._waiting.clear()
        self._used.clear()


def _no_such_call() -> ReplayError:
    return ReplayError(
        "a training-mode call inside a backward matches no earlier forward. Under torch.utils.checkpoint keep "
        "preserve_rng_state=True (the default), do not seed the CPU generator alike for two forwards in "
        f"flight, and recompute before the next optimizer step; the layer keeps the last {_LIMIT} forwards "
        f"and the last {_USED_LIMIT} that were recomputed"
    )


def _at_once(device: torch.device) -> bool:
    """Whether reading a value waits for no work of a device."""
    return device.type == "cpu"


def _same_call(stored_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Whether ids (T, K) of a recompute can be those of the stored first forward, bool scalar."""
    exists = stored_TK >= 0  # padding is masked in the stored ids only
    equal = ((stored_TK == ids_TK) & exists).sum()
    return equal >= _AGREE * exists.sum()


def draw_token() -> int:
    """A number from the CPU generator: the same in a first forward and its recompute."""
    return int(torch.randint(2**62, (), device="cpu").item())


def inside_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def lets_go() -> bool:
    """Whether a non-reentrant checkpoint lets go of what this forward saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def may_recompute() -> bool:
    """Whether this forward may be run again by checkpointing: gradients off, or hooks on saved tensors."""
    return (
        not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )
