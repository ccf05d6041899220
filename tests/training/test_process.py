from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from lrmoe.errors import ConfigError, RankError
from lrmoe.training.process import _attempt, joined, pick_device
from tests.training.tiny import tiny_config


def test_alone_there_is_no_group() -> None:
    with joined("cpu") as process:
        assert (process.rank, process.world_size, process.group) == (0, 1, None)
        assert process.is_main
        assert process.device == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"train.device='cuda': PyTorch sees 0 CUDA devices"):
        pick_device("cuda")
    assert pick_device("auto") == torch.device("cpu")


TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "x", "RANK='x': must be an integer of at least 0 and below 1"),
        ("RANK", "1", "RANK='1': must be an integer of at least 0 and below 1"),
        ("RANK", "-1", "RANK='-1': must be"),
        ("RANK", "", "RANK='': must be"),
        ("WORLD_SIZE", "two", "WORLD_SIZE='two': must be an integer of at least 1"),
        ("WORLD_SIZE", "0", "WORLD_SIZE='0': must be an integer of at least 1"),
        ("MASTER_ADDR", None, "MASTER_ADDR is not set: must name the host of rank 0"),
        ("MASTER_ADDR", "", "MASTER_ADDR='': must name the host of rank 0"),
        ("MASTER_PORT", None, "MASTER_PORT is not set: must be an integer of at least 0 and below 65536"),
        ("MASTER_PORT", "65536", "MASTER_PORT='65536': must be"),
    ],
)
def test_a_variable_of_torchruns_that_is_wrong_is_named(
    name: str, value: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, text in {**TORCHRUN, name: value}.items():
        if text is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, text)
    with pytest.raises(ConfigError, match=f"environment variable {said}"), joined("cpu"):
        pass


def test_a_local_rank_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ConfigError, match="LOCAL_RANK='first': must be an integer of at least 0"):
        pick_device("cuda")


@pytest.mark.distributed
def test_torchruns_variables_give_a_group() -> None:
    code = (
        "from lrmoe.training.process import joined\n"
        "import torch.distributed as dist\n"
        "with joined('cpu') as process:\n"
        "    print(process.rank, process.world_size, process.group is not None)\n"
        "    print(process.group._get_backend(process.device).options._timeout)\n"
        "print(dist.is_initialized())\n"
    ).replace("joined('cpu')", "joined('cpu', timeout_s=7)")
    assert alone_under_torchrun(code).split() == ["0", "1", "True", "0:00:07", "False"]


def test_a_restart_is_not_taken_for_an_earlier_one(tmp_path: Path) -> None:
    """torchrun's store outlives the ranks: rank 1 finds the words of a rank 0 that is gone, and the other way round."""
    store = FileStore(str(tmp_path / "store"), 1)

    def start(world_size: int) -> list[str]:
        with ThreadPoolExecutor(world_size) as threads:
            found = [threads.submit(_attempt, store, rank, world_size, 20.0) for rank in range(world_size)]
            return [one.result(30) for one in found]

    attempts = [start(3) for _ in range(3)]
    assert all(len(set(names)) == 1 for names in attempts)
    assert len({names[0] for names in attempts}) == 3
    with pytest.raises(RankError, match=r"ranks \[1, 2\] did not come within 0.1 s"):
        _attempt(store, 0, 3, 0.1)


@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
def test_a_run_leaves_no_thread_of_gloo(tmp_path: Path) -> None:
    """One that frees a tensor while the interpreter ends would abort it, after all went well."""
    tables = tiny_config(tmp_path, train={"steps": 1, "trace": False}).to_dict()
    code = (
        "import pathlib\n"
        "from lrmoe.training.run import run_rank\n"
        f"run_rank({tables!r}, False, False)\n"
        "for thread in pathlib.Path('/proc/self/task').iterdir():\n"
        "    print((thread / 'comm').read_text().strip())\n"
    )
    threads = alone_under_torchrun(code).split("\n")
    assert not [name for name in threads if "gloo" in name], threads


def alone_under_torchrun(code: str) -> str:
    """What a program prints as the only rank that torchrun started."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **TORCHRUN},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout
