"""The benchmarks of faults and of many steps: they see what they look for, and their figures hold in small."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lrmoe.checkpoint import Content, save
from tests import benchmark


@pytest.fixture
def faults() -> ModuleType:
    return benchmark.load("faults")


@pytest.fixture
def soak() -> ModuleType:
    return benchmark.load("soak")


def place(faults: ModuleType, work: Path, name: str, *tensors: torch.Tensor) -> Any:
    """A run's folder with a checkpoint of some tensors after each of steps 3, 6, ..."""
    found = faults.Place(work=work, name=name)
    for step, tensor in enumerate(tensors, start=1):
        save(found.checkpoints, 3 * step, Content(dense={"a": tensor, "b": torch.zeros(2)}), keep_last=9)
    return found


def test_a_lost_or_damaged_checkpoint_is_seen(faults: ModuleType, tmp_path: Path) -> None:
    run = place(faults, tmp_path, "run", torch.ones(1), torch.ones(1))
    assert run.newest == faults.newest_usable(run) == 6
    (run.checkpoints / "step-00000006" / "dense.safetensors").write_bytes(b"x")
    assert faults.newest_usable(run) == -1
    assert faults.newest_usable(place(faults, tmp_path, "none")) == 0


def test_tensors_that_differ_and_lines_that_are_wrong_are_counted(faults: ModuleType, tmp_path: Path) -> None:
    ours, theirs = (
        place(faults, tmp_path, str(i), torch.tensor([value])) for i, value in enumerate((1.0, 1.5))
    )
    assert (faults.differing(ours, ours), faults.differing(ours, theirs)) == (0, 1)
    metrics = ours.folder / "metrics.jsonl"
    assert ours.step == 0
    for steps, wrong in ([1, 2, 3], 0), ([1, 3], 2), ([1, 2, 2, 3], 2):
        metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
        assert faults.wrong_lines(ours, 3) == wrong
        assert ours.step == 3


def test_growth_is_seen(soak: ModuleType) -> None:
    def samples(more: int) -> list[Any]:
        return [
            soak.Sample(
                rss=1000 + more * step, ledger=10, open_files=5 + more * (step > 200), threads=1, processes=0
            )
            for step in range(soak.WARM_UP + 2 * soak.DRIFT)
        ]

    for more in (0, 1):
        first, last = soak.windows(samples(more), "rss")
        assert last - first == more * soak.DRIFT
        assert soak.windows(samples(more), "open_files") == (5.0, 5.0 + more)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of processes")
def test_a_killed_run_ends_at_the_same_weights() -> None:
    ran = benchmark.run("faults", "--kills", "2", "--ranks", "2", limit_s=280)
    found = ran.values
    assert found.pop("faults.kills") == 2
    assert set(found.values()) == {0}
    assert ran.code == 0, ran.said


@pytest.mark.long
@pytest.mark.timeout(300)
def test_memory_is_flat() -> None:
    ran = benchmark.run("soak", "--steps", "240", "--ranks", "1", limit_s=280)
    assert ran.values["soak.steps"] == 240
    assert len(ran.values) == 6
    assert ran.code == 0, ran.said
