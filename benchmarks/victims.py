"""A run to be killed: its processes, how far it is, and ways to end it. Linux only: reads /proc."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lrmoe.checkpoint import find_steps

POLL_S = 0.004
START_UP_S, STEP_S, SAVE_S = 8.0, 0.1, 0.03  # about how long each takes
LINE_BYTES = 1 << 16  # more than a line of metrics.jsonl has
START_S = 300.0  # how long a start may take on a busy machine


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run lies.

    Attributes:
        work: its own folder, which no other process names on its command line.
        name: of the run below work/runs.
    """

    work: Path
    name: str

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.work / "runs" / self.name

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints lie."""
        return self.folder / "checkpoints"

    @property
    def newest(self) -> int:
        """Step of the newest complete checkpoint; 0 without any."""
        return max(find_steps(self.checkpoints), default=0)

    @property
    def step(self) -> int:
        """Step of the last line of metrics.jsonl; 0 without any."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LINE_BYTES))
                return int(json.loads(file.read().split(b"\n")[-2])["step"])
        except (OSError, ValueError, IndexError):  # not there yet, or being written anew
            return 0


class Run:
    """One start of the command, and the processes below it.

    Args:
        place: where the run lies. ranks: how many it starts. options: more of the command line.
    """

    def __init__(self, place: Place, ranks: int, options: Sequence[str]) -> None:
        self.place, self.ranks, self._begin = place, ranks, time.time()
        temp = place.work / "tmp"
        temp.mkdir(exist_ok=True)
        self.log = place.work / "log.txt"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lrmoe", "train", "--ep", str(ranks), *options],
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": str(temp)},  # workers name a folder in it
                start_new_session=True,
            )

    @property
    def training(self) -> bool:
        """Whether it writes metrics: it has loaded everything."""
        return self._written(self.place.folder / "metrics.jsonl")

    @property
    def saving(self) -> bool:
        """Whether it is writing a checkpoint; what an earlier start left half written does not count."""
        return any(self._written(path) for path in self.place.checkpoints.glob(".partial-*"))

    def _written(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            return path.stat().st_mtime > self._begin
        return False

    @property
    def ended(self) -> bool:
        """Whether the command has ended; not whether everything below it has."""
        return self.process.poll() is not None

    def workers(self) -> list[int]:
        """Process ids by rank; fewer than `ranks` while they are being started."""
        found = {}
        for pid, words in commands(self.place.work):
            if "lrmoe.training.worker" in words and words[-1].isdigit():
                found[int(words[-1])] = pid
        return [found[rank] for rank in sorted(found)]

    def until(self, condition: Callable[[], bool], limit_s: float = START_S) -> bool:
        """Wait for a condition; False where the command ended before.

        Raises:
            TimeoutError: neither happened in time.
        """
        end = time.monotonic() + limit_s
        while not condition():
            if self.ended:
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"nothing happened within {limit_s} s; see {self.log}")
            time.sleep(POLL_S)
        return True

    def wait(self, limit_s: float) -> bool:
        """Wait for the command to end; False where it has not in time."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def left(self, limit_s: float) -> int:
        """Processes that outlive the command by more than the limit; they are killed."""
        end = time.monotonic() + limit_s
        while (pids := [pid for pid, _ in commands(self.place.work)]) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in pids:
            send(pid, signal.SIGKILL)
        return len(pids)


def commands(work: Path) -> list[tuple[int, list[str]]]:
    """(process id, words of its command line) of all processes that name the folder; dead ones have no command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")[:-1]
            if any(str(work) in word for word in words):
                found.append((int(path.parent.name), words))
    return found


def send(pid: int, number: int) -> None:
    """A signal, to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Killer:
    """Ends a run in some way at a random moment.

    Args:
        every: steps between its checkpoints. seed: of all that is random.
    """

    WAYS = ("rank", "saving", "stopped", "saving", "start", "rank", "saving", "parent", "sigterm", "saving")

    def __init__(self, every: int, seed: int) -> None:
        self.every, self._random = every, random.Random(seed)
        self._actions: dict[str, Callable[[Run], str]] = {
            "start": self._at_the_start,
            "rank": lambda run: self._later(run, signal.SIGKILL),
            "stopped": lambda run: self._later(run, signal.SIGSTOP),
            "saving": self._while_saving,
            "parent": lambda run: self._parent(run, signal.SIGKILL),
            "sigterm": self._ask,
        }

    def end(self, run: Run, number: int) -> tuple[str, str]:
        """Kill for the number-th time; (way, what was done).

        Raises:
            RuntimeError: the run ended before.
        """
        way = self.WAYS[number % len(self.WAYS)]
        done = self._actions[way](run)
        if not done:
            raise RuntimeError(f"the run ended by itself before it could be killed ({way}); see {run.log}")
        return way, done

    def _at_the_start(self, run: Run) -> str:
        """Anywhere between the first process and the first steps."""
        if not run.until(lambda: len(run.workers()) == run.ranks):
            return ""
        end, step = time.monotonic() + self._random.uniform(0, START_UP_S), run.place.newest + 1
        run.until(lambda: time.monotonic() > end or (run.training and run.place.step > step))
        return self._rank(run, signal.SIGKILL)

    def _steps(self, run: Run) -> bool:
        """Some steps, and part of one, beyond the newest checkpoint."""
        target = max(run.place.newest, 1) + self._random.randrange(2 * self.every)
        ready = run.until(lambda: run.training and run.place.step >= target)
        time.sleep(self._random.uniform(0, STEP_S))
        return ready

    def _later(self, run: Run, number: int) -> str:
        return self._rank(run, number) if self._steps(run) else ""

    def _while_saving(self, run: Run) -> str:
        """Once a checkpoint is being written, this one or the next."""
        if self._random.random() < 0.5 and not self._steps(run):
            return ""
        if not run.until(lambda: run.saving):
            return ""
        time.sleep(self._random.uniform(0, SAVE_S))
        return self._rank(run, signal.SIGKILL)

    def _parent(self, run: Run, number: int) -> str:
        if not self._steps(run):
            return ""
        send(run.process.pid, number)
        return "the command itself"

    def _ask(self, run: Run) -> str:
        """SIGTERM, to a rank or to the command."""
        if self._random.random() < 0.5:
            return self._parent(run, signal.SIGTERM)
        return self._later(run, signal.SIGTERM)

    def _rank(self, run: Run, number: int) -> str:
        workers = run.workers()
        if not workers:
            return ""
        rank = self._random.randrange(len(workers))
        send(workers[rank], number)
        return f"rank {rank}"
