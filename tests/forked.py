"""Workers, and ranks of torchrun, forked from a process that has imported everything: a start takes no seconds.

For tests of what they do; how they are started for real, tests/training/test_launch.py and tests/test_examples.py show.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any
from unittest import mock

from lrmoe.training import launch, worker
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
    sys.argv = ["worker", folder, str(rank)]
    code = worker.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Within, `run_workers` forks its workers."""
    with mock.patch.object(launch, "_spawn", Forked):
        yield


def torchrun(script: Path, ranks: int = 2, limit_s: float = 100) -> list[tuple[int | None, str]]:
    """Run a script as torchrun does on one host: exit code (None where time ran out) and output of every rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [script.with_suffix(f".rank{rank}") for rank in range(ranks)]
    processes = [
        context().Process(target=_rank, args=(str(script), rank, ranks, port, str(log)), daemon=True)
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit_s)
        process.kill()
    return [(process.exitcode, log.read_text()) for process, log in zip(processes, logs, strict=True)]


def _rank(script: str, rank: int, ranks: int, port: int, log: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    runpy.run_path(script, run_name="__main__")
