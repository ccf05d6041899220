"""Runs many jobs on a few processes of one thread each, with a display of the whole.

    parent: run_jobs(jobs) --task--> worker 0 .. W-1: target(*args, report)     one job after the other
                           <--step / done / error--

Workers are started once, since importing torch takes seconds. One that dies fails its job and is replaced. However the
parent ends, its pipes close, and a worker without a parent leaves at its next step. Imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from lrmoe.errors import LRMoEError
from lrmoe.experiments.workers_display import Display

_POLL_S = 0.2
_STOP_S = 5.0  # workers may take to end once they are told to
_SHOWN = 3  # failures that are told in full


@dataclass(frozen=True, kw_only=True)
class Job:
    """One piece of work.

    Attributes:
        name: for people.
        target: import path "package.module:function", called as function(*args, report) in a worker; it calls
            report(step) as it goes on.
        args: picklable.
        steps: that it will report.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    steps: int


class JobsFailed(LRMoEError, RuntimeError):
    """Jobs failed; the others are done. The message names each, with its error.

    Attributes:
        names: of the jobs.
    """

    def __init__(self, errors: dict[str, str]) -> None:
        self.names = list(errors)
        shown = [f"{name}: {text}" for name, text in list(errors.items())[:_SHOWN]]
        more = f"\nand {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        super().__init__(f"{len(errors)} of the jobs failed\n" + "\n".join(shown) + more)


@dataclass(eq=False)
class _Worker:
    """A process and the job it is at."""

    process: SpawnProcess
    pipe: Connection
    job: Job | None = None
    step: int = 0
    since: float = field(default_factory=time.monotonic)


def run_jobs(jobs: Sequence[Job], *, workers: int | None = None, display: Display | None = None) -> None:
    """Run all jobs, in their order as far as workers are free.

    Args:
        workers: processes; None: one per core that this process may use.
        display: shows them; None: nothing is shown.

    Raises:
        JobsFailed: some failed; raised when all others are done.
        KeyboardInterrupt, SystemExit: as this process got them; the workers are gone by then.
    """
    count = min(workers or cores(), len(jobs))
    pool = _Pool(jobs, display)
    with _sigterm_raises():
        try:
            pool.run(count)
        finally:
            pool.stop()
    if pool.errors:
        raise JobsFailed(pool.errors)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Pool:
    def __init__(self, jobs: Sequence[Job], display: Display | None) -> None:
        self._waiting = deque(jobs)
        self._display = display
        self._workers: list[_Worker] = []
        self.errors: dict[str, str] = {}

    def run(self, count: int) -> None:
        for _ in range(count):
            self._start()
        while self._workers:
            ready = wait([worker.pipe for worker in self._workers], timeout=_POLL_S)
            for worker in [worker for worker in self._workers if worker.pipe in ready]:
                self._hear(worker)
            self._show()

    def stop(self) -> None:
        """End every process that is left: asked first, then killed."""
        for worker in self._workers:
            worker.process.terminate()
        deadline = time.monotonic() + _STOP_S
        for worker in self._workers:
            worker.process.join(max(deadline - time.monotonic(), 0.0))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self._workers.clear()

    def _start(self) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that ours ends with the worker
        worker = _Worker(process=process, pipe=ours)
        self._workers.append(worker)
        self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        """Give a free worker its next job, or let it go."""
        worker.job = self._waiting.popleft() if self._waiting else None
        worker.step, worker.since = 0, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # dead: found out when it is heard
            worker.pipe.send(worker.job)
        if worker.job is None:
            worker.process.join(_STOP_S)
            worker.pipe.close()
            self._workers.remove(worker)

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._died(worker)
            return
        if kind == "step":
            worker.step = value
            return
        self._finish(worker, value if kind == "error" else None)
        self._hand_out(worker)

    def _died(self, worker: _Worker) -> None:
        worker.process.join()
        code = worker.process.exitcode
        ended = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        self._workers.remove(worker)
        worker.pipe.close()
        if worker.job is not None:
            self._finish(worker, f"its process ended {ended}")
        if self._waiting:
            self._start()

    def _finish(self, worker: _Worker, error: str | None) -> None:
        assert worker.job is not None
        if error is not None:
            self.errors[worker.job.name] = error
        if self._display is not None:
            # The last line of a traceback says what happened; all of it comes with the exception.
            line = None if error is None else error.strip().splitlines()[-1]
            self._display.finished(worker.job.name, worker.job.steps, time.monotonic() - worker.since, line)

    def _show(self) -> None:
        if self._display is not None:
            self._display.running(
                [(w.job.name, w.step, w.job.steps) for w in self._workers if w.job is not None]
            )


def _work(pipe: Connection) -> None:
    """What a worker does: jobs, until there is none, or no parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to the parent, which ends all of them
    signal.signal(signal.SIGTERM, _leave)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is there
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (job := pipe.recv()) is not None:
            pipe.send(_done(job, lambda step: pipe.send(("step", step))))


def _done(job: Job, report: Callable[[int], None]) -> tuple[str, Any]:
    try:
        import torch

        torch.set_num_threads(1)
        module, _, name = job.target.partition(":")
        # What a run says of itself would cross the display.
        with contextlib.redirect_stderr(io.StringIO()):
            getattr(importlib.import_module(module), name)(*job.args, report)
    except BrokenPipeError:
        raise
    except Exception:
        return "error", traceback.format_exc()
    return "done", None


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _sigterm_raises() -> Any:
    """Let SIGTERM unwind this process as an interrupt does, where nobody else handles it."""
    ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
