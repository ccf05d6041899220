"""The examples run as their first lines say, offline and quickly, and do what they claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*command: str) -> str:
    """Run a Python command offline on one thread per process and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_trainer_callback():
    printed = run(str(EXAMPLES / "trainer_callback.py"))
    kept = [float(found) for found in re.findall(r"kept (\d\.\d\d) ", printed)]
    losses = [float(found) for found in re.findall(r"loss (\d\.\d+)", printed)]
    assert kept == [1.0, 0.7, 0.7, 0.7]
    assert losses[-1] < losses[0] - 0.5
    assert "20 steps, 40 MoE calls" in printed


@pytest.mark.distributed
def test_ep_torchrun():
    printed = run("-m", "torch.distributed.run", "--nproc_per_node", "2", str(EXAMPLES / "ep_torchrun.py"))
    kept = [float(found) for found in re.findall(r"kept (\d\.\d\d) ", printed)]
    losses = [float(found) for found in re.findall(r"loss (\d\.\d+)", printed)]
    assert kept == [1.0] * 4 + [0.5] * 8
    assert losses[-1] < losses[0] - 0.5
    assert int(re.findall(r"bytes rank 0 sent: (\d+)", printed)[0]) > 0
