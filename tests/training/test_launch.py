from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lrmoe.errors import ConfigError
from lrmoe.training.launch import WorkerError, run_workers

pytestmark = pytest.mark.distributed


def add_up(value: int) -> tuple[int, int, int]:
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), torch.get_num_threads()


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


def test_results_by_rank() -> None:
    found = run_workers(here("add_up"), 2, (10,), time_limit_s=60)
    assert found == [(0, 21, 1), (1, 21, 1)]


def test_an_error_of_ours_keeps_its_class_and_brings_the_traceback() -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"data.path='x': gone") as caught:
        run_workers(here("fail_on_one"), 2, (1, "ours"), time_limit_s=60)
    assert "rank 1 failed" in str(caught.value.__cause__)
    assert "in fail_on_one" in str(caught.value.__cause__)
    assert time.monotonic() - begin < 30


def test_other_errors_and_killed_workers_are_reported() -> None:
    with pytest.raises(WorkerError, match=r"rank 0: KeyError: 'lost'"):
        run_workers(here("fail_on_one"), 2, (0, "other"), time_limit_s=60)
    with pytest.raises(WorkerError, match=r"rank 1: process: ended by signal 9"):
        run_workers(here("die_on_one"), 2, (1,), time_limit_s=60)


def test_out_of_time_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"ranks \[0, 1\] did not finish within 12.0 s"):
        run_workers(here("note_and_sleep"), 2, (str(tmp_path),), time_limit_s=12.0)
    assert len(pids(tmp_path)) == 2
    assert all(gone(pid) for pid in pids(tmp_path))


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "from lrmoe.training.launch import run_workers; "
        f"run_workers({here('note_and_sleep')!r}, 2, ({str(tmp_path)!r},))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        end = time.monotonic() + 40
        while len(pids(tmp_path)) < 2 and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    workers = pids(tmp_path)
    assert len(workers) == 2
    end = time.monotonic() + 10
    while not all(gone(pid) for pid in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert all(gone(pid) for pid in workers)


def test_no_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"world_size=0"):
        run_workers(here("add_up"), 0)
