"""A lock that ends with its process, on a file beside what it protects."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lrmoe.errors import ConfigError


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file, which is made where it is missing and stays.

    Args:
        wait: for a process that holds it.

    Raises:
        BlockingIOError: `wait` is false, and another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def alone(folder: Path, *, setting: str, command: str) -> Iterator[None]:
    """Be the only process at work in a run's folder.

    Args:
        setting: what names the folder. command: of `lrmoe`, that works there.

    Raises:
        ConfigError: another one is.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".lock", wait=False))
        except BlockingIOError:
            raise ConfigError(
                f"{setting}={folder.name!r}: another `lrmoe {command}` is at work in {folder}; let it end, or choose "
                "another --name"
            ) from None
        yield
