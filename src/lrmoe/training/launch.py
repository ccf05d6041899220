"""Start local gloo processes for one function, bring its results back, and leave no process behind.

    run_workers("pkg.module:function", 2, (a, b))
        |-- python -m lrmoe.training.worker FOLDER 0   function(a, b) -> result-0.pickle or failure-0.json
        `-- python -m lrmoe.training.worker FOLDER 1   function(a, b) -> result-1.pickle or failure-1.json

This half imports no torch; `worker` is the other. An interrupt or SIGTERM of the parent interrupts the workers: they
unwind, which closes files and removes half a checkpoint, and are killed if that takes longer than STOP_S. Functions
that take SIGTERM as a request get it passed on instead, and the parent waits for what they return. A worker whose
standard input closes has lost its parent: it unwinds in the same way and removes FOLDER.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import lrmoe.errors
from lrmoe.errors import ConfigError, LRMoEError, RankError
from lrmoe.training.stop import StopRequest, stop_on_sigterm

POLL_S = 0.05
GRACE_S = 5.0  # how long the other ranks may take to report once one has failed
STOP_S = 5.0  # how long a worker may take to unwind once it is told to stop


class WorkerError(LRMoEError, RuntimeError):
    """A worker failed with an error that is not one of this package's, was killed, or ran out of time."""


class StoppedError(WorkerError):
    """A worker was interrupted or ended by SIGTERM."""


def run_workers(
    function: str,
    world_size: int,
    args: Sequence[Any] = (),
    *,
    time_limit_s: float | None = None,
    timeout_s: float = 1800.0,
    pass_sigterm: bool = False,
) -> list[Any]:
    """Call a function in `world_size` new processes that form one gloo group, one thread each.

    Args:
        function: import path "package.module:name"; called as name(*args) on every rank.
        args: picklable arguments, the same for all ranks.
        time_limit_s: wall-clock limit for the whole call; None is none.
        timeout_s: how long a worker waits for another one in an exchange, once all have started.
        pass_sigterm: pass the first SIGTERM of this process on to the workers and wait for what they return.

    Returns:
        What the function returned, by rank.

    Raises:
        LRMoEError: the first failing rank's error, of its own class; its traceback is in `__cause__`.
        WorkerError: a rank failed with another error, was killed, or time ran out. All processes are gone by then.
        SystemExit: this process got SIGTERM, with the exit code of a process that ended by it; with `pass_sigterm` the
            second time only, or where a worker was not ready for it.
    """
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: must be at least 1")
    workers: list[subprocess.Popen[bytes]] = []
    to_all = functools.partial(_signal_all, workers, signal.SIGTERM)
    request = StopRequest(to_all if pass_sigterm else _leave, again=_leave)
    with (
        stop_on_sigterm(request, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL),
        tempfile.TemporaryDirectory(prefix="lrmoe-workers-", ignore_cleanup_errors=True) as name,
    ):
        folder = Path(name)
        (folder / "call.pickle").write_bytes(
            pickle.dumps((function, world_size, tuple(args), timeout_s, sys.path, sys.argv))
        )
        try:
            for rank in range(world_size):
                workers.append(_spawn(folder, rank))
            _wait(workers, folder, time_limit_s)
        except StoppedError:
            if request.asked:
                _leave()
            raise
        finally:
            _end(workers)
        return [pickle.loads((folder / f"result-{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _leave() -> None:
    """Unwind this process as an interrupt does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough
    raise SystemExit(128 + signal.SIGTERM)


def _signal_all(workers: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(number)


def _spawn(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if sys.platform == "linux":
        # By default gloo looks up the host's name, which containers often cannot resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    log: IO[bytes] | None = None if rank == 0 else (folder / f"log-{rank}.txt").open("wb")
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "lrmoe.training.worker", str(folder), str(rank)],
            stdin=subprocess.PIPE,
            stdout=2 if log is None else log,  # results come back by file: standard output is the caller's
            stderr=log,
            env=environment,
            start_new_session=True,  # an interrupt goes to the parent, which ends all of them
        )
    finally:
        if log is not None:
            log.close()


def _wait(workers: list[subprocess.Popen[bytes]], folder: Path, time_limit_s: float | None) -> None:
    """Return when all workers succeeded; raise for the first that failed."""
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    while any(worker.poll() is None for worker in workers):
        if any(worker.poll() not in (None, 0) for worker in workers):
            _settle(workers)
            break
        if deadline is not None and time.monotonic() > deadline:
            waiting = [rank for rank, worker in enumerate(workers) if worker.poll() is None]
            raise WorkerError(f"ranks {waiting} did not finish within {time_limit_s} s")
        time.sleep(POLL_S)
    if any(worker.returncode != 0 for worker in workers):
        _raise_first(workers, folder)


def _settle(workers: list[subprocess.Popen[bytes]], limit_s: float = GRACE_S) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and any(worker.poll() is None for worker in workers):
        time.sleep(POLL_S)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    """Stop what still runs; kill what does not stop, at once if there is a second interrupt."""
    try:
        _signal_all(workers, signal.SIGINT)
        _settle(workers, STOP_S)
    finally:
        for worker in workers:
            if worker.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            if worker.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    worker.stdin.close()


def _raise_first(workers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Raise the earliest failure; errors that only say that another rank failed come last."""
    failures = []
    for rank, worker in enumerate(workers):
        path = folder / f"failure-{rank}.json"
        if path.exists():
            failures.append({"rank": rank, **json.loads(path.read_text())})
        elif worker.returncode not in (None, 0):
            failures.append(_died(rank, worker.returncode, folder))
    first = min(failures, key=lambda failure: (failure["name"] == RankError.__name__, failure["time"]))
    cause = WorkerError(f"rank {first['rank']} failed:\n{first['traceback']}")
    kind = getattr(lrmoe.errors, first["name"], None)
    if isinstance(kind, type) and issubclass(kind, LRMoEError):
        raise kind(first["message"]) from cause
    told = first["name"] == KeyboardInterrupt.__name__ or first["message"] == _ended_by(signal.SIGTERM)
    error = StoppedError if told else WorkerError
    raise error(f"rank {first['rank']}: {first['name']}: {first['message']}") from cause


def _died(rank: int, code: int, folder: Path) -> dict[str, Any]:
    log = folder / f"log-{rank}.txt"
    tail = log.read_text(errors="replace")[-2000:] if log.exists() else "(its output is above)"
    how = _ended_by(-code) if code < 0 else f"exit code {code}"
    # Time 0: a rank that could not even report is the cause of its peers' errors.
    return {"rank": rank, "name": "process", "message": how, "traceback": tail, "time": 0.0}


def _ended_by(number: int) -> str:
    return f"ended by signal {number}"
