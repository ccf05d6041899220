"""One persistent pool of gloo processes per world size: a case is a module-level function sent to every rank.

    parent --- pipe --- rank 0 \\
           --- pipe --- rank 1  | one gloo group over loopback, one thread per process
           --- pipe --- ...    /

Every case has a time limit. When it runs out the pool collects the stack of every rank, kills the processes
and starts fresh ones for the next case. Processes are daemons and also leave when their pipe closes, so none
outlives the tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

CASE_LIMIT_S = 30.0
# Imported once, before ranks are forked: what every rank would otherwise spend seconds on, after every restart too.
PRELOAD = [
    "tests.distributed.pool",
    "tests.distributed.truth",
    "tests.layer.harness",
    "lrmoe.integrations.transformers",
    "lrmoe.training.loop",
]
GRACE_S = 5.0  # how long the other ranks may take once one has failed


def context() -> Any:
    """Where processes are forked from: one server for all of this test process, which imports PRELOAD once."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOAD)
    return found


class PoolError(AssertionError):
    """A case failed or ran out of time on some rank; the message holds every rank's traceback."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank answered: a value, or an error with its traceback."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""


def world() -> dist.ProcessGroup:
    """The group of all ranks of a pool, which there is in its processes."""
    group = dist.group.WORLD
    assert group is not None
    return group


class Pool:
    """`world_size` gloo processes that run one case after another."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix=f"lrmoe-pool{world_size}-")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._starts = 0

    def run(self, case: Callable[..., Any], *args: Any, limit_s: float = CASE_LIMIT_S) -> list[Any]:
        """Call `case(*args)` on every rank and return the values by rank; any failure raises PoolError."""
        outcomes = self.outcomes(case, *args, limit_s=limit_s)
        if any(o.error is not None for o in outcomes):
            self.stop()
            raise PoolError(f"{case.__name__} failed:\n{_report(outcomes)}")
        return [o.value for o in outcomes]

    def outcomes(self, case: Callable[..., Any], *args: Any, limit_s: float = CASE_LIMIT_S) -> list[Outcome]:
        """Like `run`, but hand back errors per rank; a rank that does not answer in time still raises."""
        self._start()
        for pipe in self._pipes:
            pipe.send((case, args))
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + limit_s
        while len(found) < self.world_size:
            open_pipes = [p for r, p in enumerate(self._pipes) if r not in found]
            ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            for rank in (r for r, p in enumerate(self._pipes) if p in ready):
                found[rank] = _receive(self._pipes[rank])
                if found[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() >= deadline and len(found) < self.world_size:
                self._give_up(case.__name__, found, limit_s)
        if any(o.traceback.startswith("rank died") for o in found.values()):
            self.stop()
        return [found[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """End the processes; the next case starts fresh ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def close(self) -> None:
        """End the processes and remove the pool's files."""
        self.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        if self._processes and all(p.is_alive() for p in self._processes):
            return
        self.stop()
        self._starts += 1
        forking = context()
        for rank in range(self.world_size):
            ours, theirs = forking.Pipe()
            process = forking.Process(
                target=_serve,
                args=(rank, self.world_size, theirs, str(self._store()), str(self._stack(rank))),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _store(self) -> Path:
        return Path(self._folder.name) / f"store{self._starts}"

    def _stack(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack{self._starts}-{rank}"

    def _give_up(self, name: str, found: dict[int, Outcome], limit_s: float) -> None:
        missing = [rank for rank in range(self.world_size) if rank not in found]
        for rank in missing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)  # faulthandler writes all stacks
        time.sleep(0.5)
        stacks = {}
        for rank in missing:
            path = self._stack(rank)
            text = path.read_text() if path.exists() else "(no stack)"
            stacks[rank] = Outcome(error=TimeoutError("no answer"), traceback=text)
        self.stop()
        outcomes = [{**found, **stacks}[rank] for rank in range(self.world_size)]
        raise PoolError(f"{name}: ranks {missing} gave no answer (limit {limit_s} s):\n{_report(outcomes)}")


def _report(outcomes: list[Outcome]) -> str:
    lines = []
    for rank, outcome in enumerate(outcomes):
        state = "done" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
        lines.append(f"--- rank {rank}: {state}\n{outcome.traceback}")
    return "\n".join(lines)


def _receive(pipe: Connection) -> Outcome:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        return Outcome(error=RuntimeError(f"the process ended: {error!r}"), traceback="rank died")


def _serve(rank: int, world_size: int, pipe: Connection, store_path: str, stack_path: str) -> None:
    """Join the group, then answer cases until the pipe closes."""
    stack = Path(stack_path).open("w")  # noqa: SIM115 - open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is no garbage: collections need not go through it
    store = FileStore(store_path, world_size)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    while True:
        try:
            case, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # the parent has gone: no collective clean-up, the peers may be gone as well
        pipe.send(_answer(case, args))


def _answer(case: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    torch.manual_seed(0)
    try:
        value = case(*args)
        pickle.dumps(value)
        return Outcome(value=value)
    except Exception as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return Outcome(error=error, traceback=text)
