"""Start local gloo processes for one function, bring its results back, and leave no process behind.

    run_workers("pkg.module:function", 2, (a, b))
        |-- python -m lrmoe.training.launch FOLDER 0   function(a, b) -> result-0.pickle or failure-0.json
        `-- python -m lrmoe.training.launch FOLDER 1   function(a, b) -> result-1.pickle or failure-1.json

The parent half imports no torch. An interrupt or SIGTERM of the parent interrupts the workers: they unwind, which
closes files and removes half a checkpoint, and are killed if that takes longer than STOP_S. Functions that take SIGTERM
as a request get it passed on instead, and the parent waits for what they return. A worker whose standard input closes
has lost its parent: it unwinds in the same way and removes FOLDER.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import lrmoe.errors
from lrmoe.errors import ConfigError, LRMoEError, RankError
from lrmoe.training.stop import StopRequest, stop_on_sigterm

POLL_S = 0.05
GRACE_S = 5.0  # how long the other ranks may take to report once one has failed
STOP_S = 5.0  # how long a worker may take to unwind once it is told to stop
START_S = 600.0  # how long workers wait for each other to start
STOPS = (signal.SIGINT, signal.SIGTERM)


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


# The worker's half.


def _stop_when_told() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, once."""

    def stop(number: int, frame: object) -> None:
        _ignore_stops()  # nothing interrupts the clean-up
        raise KeyboardInterrupt

    for number in STOPS:
        signal.signal(number, stop)


def _ignore_stops() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def _leave_with_parent(folder: Path) -> threading.Event:
    """Stop this process when standard input closes: the parent keeps it open and sends nothing.

    Returns:
        Set when the parent is gone: nobody else will remove the folder.
    """
    gone = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        gone.set()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(STOP_S)  # as a daemon: the main thread usually ends the process before
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return gone


def _work(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from lrmoe.distributed.peers import telling, waiting

    function, world_size, args, timeout_s, path, command = pickle.loads((folder / "call.pickle").read_bytes())
    sys.path[:], sys.argv[:] = path, command  # figures name the command that somebody typed
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]  # torch exports it untold
    _wait_for_all(store, rank, world_size)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    module, _, name = function.partition(":")
    with telling():
        result = getattr(importlib.import_module(module), name)(*args)
        part = folder / f"result-{rank}.part"
        part.write_bytes(pickle.dumps(result))
        part.rename(folder / f"result-{rank}.pickle")
        with waiting("the end of all ranks"):
            dist.barrier()  # nobody leaves while a peer may still talk to it
    dist.destroy_process_group()


def _wait_for_all(store: Any, rank: int, world_size: int) -> None:
    """Return when all ranks are here: imports take a while, and longer on one rank than on another.

    Not by the store's own wait, which no signal interrupts.
    """
    store.set(f"here/{rank}", "")
    end = time.monotonic() + START_S
    while not store.check([f"here/{other}" for other in range(world_size)]):
        if time.monotonic() > end:
            raise RankError(f"the start of all ranks: some rank did not come within {START_S:g} s")
        time.sleep(POLL_S)


def main() -> int:
    """Entry of one worker: `python -m lrmoe.training.launch FOLDER RANK`."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    _stop_when_told()
    parent_gone = _leave_with_parent(folder)
    try:
        _work(folder, rank)
        return 0
    except BaseException as error:  # a worker has nobody else to tell
        _ignore_stops()  # it is on its way out
        with contextlib.suppress(FileNotFoundError):  # the folder goes with the parent
            _report(folder, rank, error)
        return 1
    finally:
        if parent_gone.is_set():
            shutil.rmtree(folder, ignore_errors=True)


def _report(folder: Path, rank: int, error: BaseException) -> None:
    failure = {
        "name": type(error).__name__,
        "message": str(error),
        "traceback": traceback.format_exc(),
        "time": time.time(),
    }
    part = folder / f"failure-{rank}.part"
    part.write_text(json.dumps(failure))
    part.rename(folder / f"failure-{rank}.json")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # peers may have died: no clean-up that could wait for them
