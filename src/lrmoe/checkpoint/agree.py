"""Go on only when every rank could: the same error on all ranks, and nobody waits for one that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import lrmoe.errors
from lrmoe.distributed.peers import waiting
from lrmoe.errors import LRMoEError, RankError

T = TypeVar("T")


def rank_of(group: dist.ProcessGroup | None) -> int:
    """This process's rank in the group; 0 without a group."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: dist.ProcessGroup | None) -> int:
    """The group's size; 1 without a group."""
    return 1 if group is None else dist.get_world_size(group)


def gathered(group: dist.ProcessGroup | None, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and return the results by rank; they must be small and picklable.

    Raises:
        LRMoEError: `action` failed on some rank. Every rank raises the lowest failing rank's error: of its class when
            it is one of this package's, a RankError otherwise. The rank's own error is the cause where there is one.
        RankError: some rank was lost, or did not come in time.
    """
    if size_of(group) == 1:
        return [action()]
    own: Exception | None = None
    outcome: tuple[str, str, T | None]
    try:
        outcome = ("", "", action())
    except Exception as error:
        own = error
        outcome = (type(error).__name__, str(error), None)
    outcomes: list[Any] = [None] * size_of(group)
    with waiting("what all ranks have to agree on"):
        dist.all_gather_object(outcomes, outcome, group=group)
    for rank, (name, message, _) in enumerate(outcomes):
        if name:
            raise _error(rank, name, message) from own
    return [value for _, _, value in outcomes]


def agreed(group: dist.ProcessGroup | None, action: Callable[[], T]) -> T:
    """Like `gathered`, for results that stay on their rank.

    Raises:
        LRMoEError: as `gathered`.
    """
    results: list[T] = []
    gathered(group, lambda: results.append(action()))
    return results[0]


def all_true(group: dist.ProcessGroup | None, value: bool) -> bool:
    """Whether `value` holds on every rank of the group: one all-reduce of one number."""
    if size_of(group) == 1:
        return value
    device = "cpu" if "gloo" in dist.get_backend_config(group) else "cuda"
    flag = torch.tensor(int(value), device=device)
    with waiting("what all ranks have to agree on"):
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _error(rank: int, name: str, message: str) -> LRMoEError:
    kind = getattr(lrmoe.errors, name, None)
    if isinstance(kind, type) and issubclass(kind, LRMoEError):
        return kind(message)
    return RankError(f"rank {rank}: {name}: {message}")
