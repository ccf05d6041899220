"""A lock that ends with its process, on a file beside what it protects."""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lrmoe.errors import ConfigError

POLL_S = 0.1
UNKNOWN = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system that has no locks


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file, which is made where it is missing and stays; no lock where the file system has none.

    Args:
        wait: for a process that holds it.

    Raises:
        BlockingIOError: `wait` is false, and another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in UNKNOWN:
                raise
        yield


@contextmanager
def alone(folder: Path, *, setting: str, command: str, patience_s: float = 0.0) -> Iterator[None]:
    """Be the only process at work in a run's folder.

    Args:
        setting: what names the folder. command: of `lrmoe`, that works there.
        patience_s: how long another one may take to end.

    Raises:
        ConfigError: another one is.
    """
    end = time.monotonic() + patience_s
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder / ".lock", wait=False))
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ConfigError(
                        f"{setting}={folder.name!r}: another `lrmoe {command}` is at work in {folder}; let it end, or "
                        "choose another --name"
                    ) from None
                time.sleep(POLL_S)
        yield
