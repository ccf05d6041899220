from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from lrmoe.experiments.workers import Job, JobsFailed, run_jobs
from lrmoe.experiments.workers_display import Display

HERE = "tests.experiments.test_workers"
Report = Callable[[int], None]


def write(folder: str, name: str, report: Report) -> None:
    import torch

    for step in range(1, 4):
        report(step)
    (Path(folder) / name).write_text(f"{os.getpid()} {torch.get_num_threads()}")


def fail(folder: str, name: str, report: Report) -> None:
    raise ValueError(f"{name} cannot be")


def die(folder: str, name: str, report: Report) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def linger(folder: str, name: str, report: Report) -> None:
    (Path(folder) / name).write_text(str(os.getpid()))
    for step in range(600):
        report(step)
        time.sleep(0.1)


def jobs(folder: Path, **targets: str) -> list[Job]:
    return [
        Job(name=name, target=f"{HERE}:{target}", args=(str(folder), name), steps=3)
        for name, target in targets.items()
    ]


def test_all_jobs_run_on_a_few_processes_of_one_thread(tmp_path: Path) -> None:
    out = io.StringIO()
    given = jobs(tmp_path, a="write", b="write", c="write", d="write")
    with Display("four", jobs=4, steps=12, console=Console(file=out)) as display:
        run_jobs(given, workers=2, display=display)
    found = [(tmp_path / name).read_text().split() for name in "abcd"]
    assert len({pid for pid, _ in found}) <= 2
    assert str(os.getpid()) not in {pid for pid, _ in found}
    assert {threads for _, threads in found} == {"1"}
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("[4/4] ")
    assert all("done" in line for line in lines)
    assert "left" in lines[0]


def test_failures_are_named_and_stop_no_other(tmp_path: Path) -> None:
    out = io.StringIO()
    given = jobs(tmp_path, a="fail", b="die", c="write", d="write")
    with (
        Display("four", jobs=4, steps=12, console=Console(file=out)) as display,
        pytest.raises(JobsFailed, match="2 of the jobs failed") as caught,
    ):
        run_jobs(given, workers=1, display=display)
    assert caught.value.names == ["a", "b"]
    assert "ValueError: a cannot be" in str(caught.value)
    assert "b: its process ended by signal 9" in str(caught.value)
    assert (tmp_path / "c").exists()
    assert (tmp_path / "d").exists()
    assert "a FAILED: ValueError: a cannot be" in out.getvalue()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        f"from pathlib import Path; from tests.experiments.test_workers import jobs; "
        f"from lrmoe.experiments.workers import run_jobs\n"
        f"if __name__ == '__main__': run_jobs(jobs(Path({str(tmp_path)!r}), a='linger', b='linger'), workers=2)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        waited = time.monotonic() + 100
        while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "ab"):
            assert time.monotonic() < waited
            assert parent.poll() is None
            time.sleep(0.1)
        pids = [int((tmp_path / name).read_text()) for name in "ab"]
        assert all(alive(pid) for pid in pids)
        parent.send_signal(number)
        assert parent.wait(30) != 0
        waited = time.monotonic() + 20
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < waited
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()


def test_a_terminal_shows_what_runs_and_what_is_left() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with Display("runs", jobs=5, steps=40, done=1, console=console) as display:
        display.finished("first", 10, 3.0, None)
        display.running([("second", 5, 10)])
    text = out.getvalue()
    assert "runs: 2 of 5" in text
    assert "second" in text
    assert "step 5 of 10" in text


def test_off_a_terminal_what_was_done_before_is_said_once() -> None:
    out = io.StringIO()
    with Display("runs", jobs=3, steps=10, done=2, console=Console(file=out)) as display:
        display.finished("last", 10, 3.0, None)
    assert out.getvalue().splitlines() == ["runs: 2 of 3 done before", "[3/3] last done, 3 s"]
