"""Why an exchange failed: a rank that fails says so in the store that formed the group, and the others read it there.

    rank 1   ValueError -> store["lrmoe/failed/1"] -> ends, and its connections close
    rank 0   waits in an exchange -> connection closed, or time is up -> reads the store -> RankError that says why

Nothing is told or read as long as all goes well. A rank that is killed or hangs tells nothing; then the RankError says
what this rank waited for, and what the backend reported.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lrmoe.errors import LRMoEError, RankError

T = TypeVar("T")
HEARD_S = 1.0  # how long a rank listens for another's reason
STORE_S = 3.0  # how long the store may take: the process that keeps it may be the one that is gone
POLL_S = 0.05
LONGEST = 2000  # characters of a reason


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Around one collective or the wait for it: its failure is a RankError.

    Args:
        what: names it, such as "MoE layer 3: all-to-all".

    Raises:
        RankError: the collective failed. Says what, and why where some rank told or the backend knows.
    """
    try:
        yield
    except (LRMoEError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise RankError(f"{what}: {_why(error)}") from error


@contextmanager
def telling() -> Iterator[None]:
    """Tell the other ranks of what is raised inside, for those that will wait for this one in vain.

    What this rank told before is forgotten: the group has outlived it.
    """
    if not _alone():
        _within(STORE_S, lambda: _store().delete_key(_key(dist.get_rank())))
    try:
        yield
    except BaseException as error:
        tell(error)
        raise


def tell(error: BaseException) -> None:
    """Leave an error where other ranks look for it. The first one stays; what only passes on another rank's is none."""
    if isinstance(error, (RankError, SystemExit)) or _alone():
        return
    text = f"{type(error).__name__}: {error}"[:LONGEST]

    def put() -> None:
        store, key = _store(), _key(dist.get_rank())
        if not store.check([key]):
            store.set(key, text)

    _within(STORE_S, put)


def tell_when_failing() -> None:
    """From now on, tell of the uncaught error that ends this process; it is shown as before. Repeated calls do nothing.

    For models in somebody else's training loop, where nobody else could tell.
    """
    if not isinstance(sys.excepthook, _TellFirst):
        sys.excepthook = _TellFirst(sys.excepthook)


class _TellFirst:
    """The hook for uncaught errors, with telling before it."""

    def __init__(self, hook: Callable[..., object]) -> None:
        self._hook = hook

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        tell(error)
        self._hook(kind, error, traceback)


def _why(error: RuntimeError) -> str:
    """What the ranks told, or what the backend's words mean."""
    told = _within(HEARD_S + STORE_S, _heard)
    if told is not None:
        rank, text = told
        return f"rank {rank} failed: {text}"
    said = _first_sentence(str(error))
    if "timed out" in said.lower() or "timeout" in said.lower():
        return (
            f"some rank did not come in time: it hangs, was stopped, or makes other calls than this one ({said}); "
            "every rank must make the same calls, in evaluation and generation too"
        )
    return f"some rank was lost: it was killed, or left without an error of its own ({said})"


def _heard() -> tuple[int, str] | None:
    """The first rank that told of an error, and its words."""
    if _alone():
        return None
    store, end = _store(), time.monotonic() + HEARD_S
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    while True:
        for rank in others:
            if store.check([_key(rank)]):
                return rank, bytes(store.get(_key(rank))).decode(errors="replace")
        if time.monotonic() >= end:
            return None
        time.sleep(POLL_S)


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def _store() -> Any:
    """The store of the default group; the only one whose keys all ranks share for sure."""
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    return f"lrmoe/failed/{rank}"


def _within(limit_s: float, action: Callable[[], T]) -> T | None:
    """What `action` gives; None where it fails or takes longer, as with a store whose process hangs."""
    found: list[T] = []

    def act() -> None:
        with suppress(Exception):
            found.append(action())

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else None


def _first_sentence(text: str) -> str:
    """A backend's error without the place in its source and without advice, in ASCII."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", text.strip())
    first: Sequence[str] = re.split(r"\.\s|\n", text, maxsplit=1)
    return first[0].encode("ascii", "ignore").decode().strip()
