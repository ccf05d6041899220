"""Start local gloo processes for one function, bring its results back, and leave no process behind.

    run_workers("pkg.module:function", 2, (a, b))
        |-- python -m lrmoe.training.launch FOLDER 0   function(a, b) -> result-0.pickle or failure-0.json
        `-- python -m lrmoe.training.launch FOLDER 1   function(a, b) -> result-1.pickle or failure-1.json

The parent half imports no torch. A worker ends when its standard input closes, that is when its parent is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import lrmoe.errors
from lrmoe.errors import ConfigError, LRMoEError, RankError

POLL_S = 0.05
GRACE_S = 5.0  # how long the other ranks may take to report once one has failed


class WorkerError(LRMoEError, RuntimeError):
    """A worker failed with an error that is not one of this package's, was killed, or ran out of time."""


def run_workers(
    function: str, world_size: int, args: Sequence[Any] = (), *, time_limit_s: float | None = None
) -> list[Any]:
    """Call a function in `world_size` new processes that form one gloo group, one thread each.

    Args:
        function: import path "package.module:name"; called as name(*args) on every rank.
        args: picklable arguments, the same for all ranks.
        time_limit_s: wall-clock limit for the whole call; None is none.

    Returns:
        What the function returned, by rank.

    Raises:
        LRMoEError: the first failing rank's error, of its own class; its traceback is in `__cause__`.
        WorkerError: a rank failed with another error, was killed, or time ran out. All processes are gone by then.
    """
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: must be at least 1")
    with tempfile.TemporaryDirectory(prefix="lrmoe-workers-") as name:
        folder = Path(name)
        (folder / "call.pickle").write_bytes(pickle.dumps((function, world_size, tuple(args), sys.path)))
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                workers.append(_spawn(folder, rank))
            _wait(workers, folder, time_limit_s)
        finally:
            _end(workers)
        return [pickle.loads((folder / f"result-{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _spawn(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if sys.platform == "linux":
        # By default gloo looks up the host's name, which containers often cannot resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    log: IO[bytes] | None = None if rank == 0 else (folder / f"log-{rank}.txt").open("wb")
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "lrmoe.training.launch", str(folder), str(rank)],
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


def _settle(workers: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and any(worker.poll() is None for worker in workers):
        time.sleep(POLL_S)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
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
    raise WorkerError(f"rank {first['rank']}: {first['name']}: {first['message']}") from cause


def _died(rank: int, code: int, folder: Path) -> dict[str, Any]:
    log = folder / f"log-{rank}.txt"
    tail = log.read_text(errors="replace")[-2000:] if log.exists() else "(its output is above)"
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    # Time 0: a rank that could not even report is the cause of its peers' errors.
    return {"rank": rank, "name": "process", "message": how, "traceback": tail, "time": 0.0}


# The worker's half.


def _leave_with_parent() -> None:
    """End this process when standard input closes: the parent keeps it open and sends nothing."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    function, world_size, args, path = pickle.loads((folder / "call.pickle").read_bytes())
    sys.path[:] = path
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*args)
    part = folder / f"result-{rank}.part"
    part.write_bytes(pickle.dumps(result))
    part.rename(folder / f"result-{rank}.pickle")
    dist.barrier()  # nobody leaves while a peer may still talk to it
    dist.destroy_process_group()


def main() -> int:
    """Entry of one worker: `python -m lrmoe.training.launch FOLDER RANK`."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    _leave_with_parent()
    try:
        _work(folder, rank)
        return 0
    except BaseException as error:  # a worker has nobody else to tell
        failure = {
            "name": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
            "time": time.time(),
        }
        part = folder / f"failure-{rank}.part"
        part.write_text(json.dumps(failure))
        part.rename(folder / f"failure-{rank}.json")
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # peers may have died: no clean-up that could wait for them
