"""The examples run as their first lines say, offline and quickly, and do what they claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
README = Path(__file__).parent.parent / "README.md"


def run(*command: str) -> str:
    """Run a Python command offline on one thread per process and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_trainer_callback() -> None:
    printed = run(str(EXAMPLES / "trainer_callback.py"))
    kept = [float(found) for found in re.findall(r"kept (\d\.\d\d) ", printed)]
    losses = [float(found) for found in re.findall(r"loss (\d\.\d+)", printed)]
    assert kept == [1.0, 0.7, 0.7, 0.7]
    assert losses[-1] < losses[0] - 0.5
    assert "20 steps, 40 MoE calls" in printed


@pytest.mark.distributed
def test_ep_torchrun() -> None:
    printed = run("-m", "torch.distributed.run", "--nproc_per_node", "2", str(EXAMPLES / "ep_torchrun.py"))
    kept = [float(found) for found in re.findall(r"kept (\d\.\d\d) ", printed)]
    losses = [float(found) for found in re.findall(r"loss (\d\.\d+)", printed)]
    assert kept == [1.0] * 4 + [0.5] * 8
    assert losses[-1] < losses[0] - 0.5
    assert int(re.findall(r"bytes rank 0 sent: (\d+)", printed)[0]) > 0
    peaks = re.compile(r"step 11 .*busiest rank (\S+) -> (\S+) of the mean")
    shown, found = (peaks.search(text) for text in (README.read_text(encoding="utf-8"), printed))
    assert shown is not None
    assert found is not None
    assert [float(x) for x in shown.groups()] == pytest.approx([float(x) for x in found.groups()], abs=0.1)


def test_ep_torchrun_says_how_to_start_it() -> None:
    command = [sys.executable, str(EXAMPLES / "ep_torchrun.py")]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 2
    assert "torchrun --nproc_per_node 2 examples/ep_torchrun.py" in done.stderr
    assert "Traceback" not in done.stderr
