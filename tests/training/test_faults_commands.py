"""Commands that are stopped or lose a process, and started again: by hand, and by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lrmoe.checkpoint import find_steps
from tests.training.tiny import tiny_config

ROOT = Path(__file__).parents[2]


def command(folder: Path, launcher: list[str], *options: str) -> list[str]:
    """`lrmoe train --auto-resume` of a tiny model in `folder`."""
    config = tiny_config(folder, train={"steps": 2000, "checkpoint_every": 5, "trace": False})
    config.write(folder / "run.toml")
    arguments = ["train", "--config", str(folder / "run.toml"), "--auto-resume", *options]
    return [sys.executable, "-m", *launcher, "lrmoe", *arguments]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], limit_s: float = 150) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"exit code {process.returncode}: {process.communicate()[1]}")
        assert time.monotonic() < end, "out of time"
        time.sleep(0.05)


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_sigterm_to_the_command_stops_its_ranks_and_the_same_command_goes_on(tmp_path: Path) -> None:
    run = start(command(tmp_path, [], "--ep", "2"))
    saved = tmp_path / "run" / "checkpoints"
    try:
        wait_for(lambda: bool(find_steps(saved)), run)
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    done = summary["steps"]
    assert find_steps(saved)[-1] == done < 2000
    assert f"stopped at step {done} of 2000; --resume goes on" in said
    again = start(command(tmp_path, [], "--json", "--steps", str(done + 2)))  # on as many ranks as before
    printed, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert f"resumed from step {done}" in said.splitlines()
    assert {json.loads(line)["context"]["world_size"] for line in printed.splitlines()} == {2}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["finished"]) == (done + 2, True)


def ranks_below(parent: int) -> list[int]:
    """Processes that torchrun started."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of processes")
def test_torchrun_restarts_from_the_last_checkpoint_and_passes_sigterm_on(tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m"]
    run = start(command(tmp_path, launcher))
    saved = tmp_path / "run" / "checkpoints"
    try:
        wait_for(lambda: bool(find_steps(saved)), run)
        killed = ranks_below(run.pid)
        os.kill(killed[1], signal.SIGKILL)
        wait_for(lambda: len(ranks_below(run.pid)) == 2 and not set(ranks_below(run.pid)) & set(killed), run)
        reached = find_steps(saved)[-1]
        wait_for(lambda: find_steps(saved)[-1] > reached, run)
        os.kill(ranks_below(run.pid)[0], signal.SIGTERM)
        _, said = run.communicate(timeout=120)
    finally:
        run.terminate()
        run.wait(60)
    assert run.returncode == 0, said
    assert f"resumed from step {reached}" in said
    assert "stopped at step" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"] is False
