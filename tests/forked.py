"""Workers of `run_workers` forked from a process that has imported everything: a start takes no seconds of imports.

For tests of what workers do; how they are started for real, tests/training/test_launch.py shows.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any
from unittest import mock

from lrmoe.training import launch
from tests.distributed.pool import context


class Forked:
    """What `run_workers` uses of a `subprocess.Popen`."""

    def __init__(self, folder: Path, rank: int) -> None:
        theirs, ours = multiprocessing.Pipe(duplex=False)
        self._process: Any = context().Process(target=_work, args=(str(folder), rank, theirs))
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid
        self.stdin = ours  # open as long as the parent lives

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self.returncode


def _work(folder: str, rank: int, stdin: Connection) -> None:
    """A worker's process, with the streams and the session that a started one has."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.setsid()
    os.dup2(stdin.fileno(), 0)
    sys.stdin = os.fdopen(0)
    if rank:
        log: IO[bytes] = (Path(folder) / f"log-{rank}.txt").open("wb")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.argv = ["launch", folder, str(rank)]
    code = launch.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Within, `run_workers` forks its workers."""
    with mock.patch.object(launch, "_spawn", Forked):
        yield
