from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.checkpoint import Content, save
from lrmoe.errors import ConfigError
from lrmoe.telemetry.figures import environment
from lrmoe.training.launch import STOP_S, WorkerError, run_workers
from tests.forked import forked_workers

pytestmark = pytest.mark.distributed


def add_up(value: int) -> tuple[int, int, int, str]:
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), torch.get_num_threads(), str(environment()["command"])


def fail_on_one(rank: int, kind: str) -> None:
    if dist.get_rank() == rank:
        raise ConfigError("data.path='x': gone") if kind == "ours" else KeyError("lost")
    dist.barrier()


def die_on_one(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def note_and_sleep(folder: str) -> None:
    (Path(folder) / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(120)


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*")]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"  # dead, waiting for its parent


def here(name: str) -> str:
    return f"tests.training.test_launch:{name}"


def test_results_by_rank_and_the_command_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/lrmoe/__main__.py", "train", "--ep", "1"])
    found = run_workers(here("add_up"), 2, (10,), time_limit_s=60)
    assert found == [(rank, 21, 1, "python -m lrmoe train --ep 1") for rank in (0, 1)]


def test_an_error_of_ours_keeps_its_class_and_brings_the_traceback() -> None:
    begin = time.monotonic()
    with forked_workers(), pytest.raises(ConfigError, match=r"data.path='x': gone") as caught:
        run_workers(here("fail_on_one"), 2, (1, "ours"), time_limit_s=60)
    assert "rank 1 failed" in str(caught.value.__cause__)
    assert "in fail_on_one" in str(caught.value.__cause__)
    assert time.monotonic() - begin < 30


def test_other_errors_and_killed_workers_are_reported() -> None:
    with forked_workers(), pytest.raises(WorkerError, match=r"rank 0: KeyError: 'lost'"):
        run_workers(here("fail_on_one"), 2, (0, "other"), time_limit_s=60)
    with pytest.raises(WorkerError, match=r"rank 1: process: ended by signal 9"):
        run_workers(here("die_on_one"), 2, (1,), time_limit_s=60)


def test_out_of_time_leaves_no_process(tmp_path: Path) -> None:
    with forked_workers(), pytest.raises(WorkerError, match=r"ranks \[0, 1\] did not finish within 6.0 s"):
        run_workers(here("note_and_sleep"), 2, (str(tmp_path),), time_limit_s=6.0)
    assert len(pids(tmp_path)) == 2
    assert all(gone(pid) for pid in pids(tmp_path))


class Slow(dict[str, torch.Tensor]):
    """Tensors of a checkpoint that take their time."""

    def __init__(self, folder: str) -> None:
        super().__init__(a=torch.zeros(1))
        self.folder = folder

    def items(self) -> Any:
        note_and_sleep(self.folder)
        return super().items()


def save_slowly(folder: str) -> None:
    """Rank 0 stops in the middle of a checkpoint, rank 1 in the exchange that waits for it."""
    root = Path(folder)
    try:
        save(root / "checkpoints", 1, Content(dense={"a": torch.zeros(1)}), group=dist.group.WORLD)
        if dist.get_rank() == 1:
            (root / "pid-1").write_text(str(os.getpid()))
        save(root / "checkpoints", 2, Content(dense=Slow(folder)), group=dist.group.WORLD)
    finally:
        (root / f"closed-{dist.get_rank()}").touch()


def ignore_stops(folder: str) -> None:
    vars(sys.modules["__main__"])["STOP_S"] = 1.0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    note_and_sleep(folder)


def stopped_parent(function: str, folder: Path, number: int, stop_s: float = STOP_S) -> int:
    """Start a parent of two workers, send it a signal once both work, and return its exit code when all are gone."""
    temp = folder / "temp"
    temp.mkdir()
    code = (
        f"from lrmoe.training import launch; launch.STOP_S = {stop_s}; "
        f"launch.run_workers({here(function)!r}, 2, ({str(folder)!r},))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], env={**os.environ, "TMPDIR": str(temp)}
    )
    try:
        end = time.monotonic() + 60
        while len(pids(folder)) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        parent.send_signal(number)
        parent.wait(30)
    finally:
        parent.kill()
        parent.wait()
    workers = pids(folder)
    assert len(workers) == 2
    end = time.monotonic() + 20
    while not (all(gone(pid) for pid in workers) and not any(temp.iterdir())) and time.monotonic() < end:
        time.sleep(0.1)
    assert all(gone(pid) for pid in workers)
    assert list(temp.iterdir()) == []
    return parent.returncode


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_workers_of_a_stopped_parent_clean_up(tmp_path: Path, number: int, code: int) -> None:
    assert stopped_parent("save_slowly", tmp_path, number) == code
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert (tmp_path / "closed-0").exists()
    assert (tmp_path / "closed-1").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_that_do_not_stop_are_ended(tmp_path: Path, number: int) -> None:
    begin = time.monotonic()
    stopped_parent("ignore_stops", tmp_path, number, stop_s=1.0)
    assert time.monotonic() - begin < 90


def test_no_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"world_size=0"):
        run_workers(here("add_up"), 0)
