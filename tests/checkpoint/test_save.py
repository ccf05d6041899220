from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from lrmoe.checkpoint import Manifest, find_steps, open_checkpoint, open_latest, save
from lrmoe.errors import CheckpointError
from tests.checkpoint.common import content, truncate
from tests.distributed.pool import Pool


def test_layout_and_manifest(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, content())
    assert folder == tmp_path / "step-00000007"
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        "state.json",
        "dense.safetensors",
        "experts-00000-of-00001.safetensors",
    }
    manifest = Manifest.read(folder)
    assert (manifest.step, manifest.world_size) == (7, 1)
    assert set(manifest.file_of()) == {
        "model/a",
        "model/b",
        *(f"model/up/expert/{e}" for e in range(4)),
    }
    assert json.loads((folder / "state.json").read_text()) == {"step": 0, "list": [1, 2]}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step, content(step), keep_last=2)
    assert find_steps(tmp_path) == [3, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_bad_folders_neither_count_nor_cost_the_good_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path, step, content(step))
    truncate(save(tmp_path, 9, content(9), keep_last=3) / "dense.safetensors")
    (tmp_path / "step-00000010").mkdir()
    with caplog.at_level(logging.WARNING):
        save(tmp_path, 3, content(3), keep_last=2)
    assert find_steps(tmp_path) == [2, 3, 9, 10]
    assert "step-00000009 is not usable and left as it is" in caplog.text
    assert open_latest(tmp_path).state["step"] == 3


def test_the_one_just_written_and_protected_ones_stay(tmp_path: Path) -> None:
    for step in (1, 8, 9):
        save(tmp_path, step, content(step), keep_last=3)
    save(tmp_path, 2, content(2), keep_last=1, protect=(1,))
    assert find_steps(tmp_path) == [1, 2, 9]


def test_the_same_step_may_be_written_again(tmp_path: Path) -> None:
    save(tmp_path, 1, content(1))
    save(tmp_path, 1, content(5))
    assert open_checkpoint(tmp_path / "step-00000001").state["step"] == 5
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_run_left_is_not_seen_and_is_replaced(tmp_path: Path) -> None:
    for name in (".partial-step-00000001", ".partial-step-00000007", ".removed-step-00000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dense.safetensors").write_bytes(b"half")
    assert find_steps(tmp_path) == []
    save(tmp_path, 1, content(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be created"):
        save(tmp_path / "file", 1, content())


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    import resource

    save(tmp_path, 1, content(1))
    large = dataclasses.replace(content(2), dense={"model/a": torch.zeros(1 << 22)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            save(tmp_path, 2, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert open_latest(tmp_path).state["step"] == 1


def test_a_rename_that_fails_puts_the_replaced_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, content(1))
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith(".partial"):
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="cannot be written: no"):
        save(tmp_path, 1, content(5))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert open_latest(tmp_path).state["step"] == 1


@pytest.mark.parametrize("saving", [False, True])
def test_a_run_killed_between_two_renames_loses_nothing(tmp_path: Path, saving: bool) -> None:
    save(tmp_path, 1, content(1)).rename(tmp_path / ".replaced-step-00000001")
    assert find_steps(tmp_path) == [1], "who asks whether there is something to resume must see it"
    if saving:
        save(tmp_path, 2, content(2))
        assert find_steps(tmp_path) == [1, 2]
    else:
        assert open_latest(tmp_path).state["step"] == 1
    assert open_checkpoint(tmp_path / "step-00000001").state["step"] == 1


def save_on_each(root: str) -> list[str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder = save(Path(root), 3, content(3, rank, world_size), group=dist.group.WORLD)
    with safe_open(folder / f"experts-{rank:05d}-of-{world_size:05d}.safetensors", framework="pt") as file:
        return sorted(file.keys())


def break_one_rank(root: str) -> str:
    part = content(3, dist.get_rank(), 2)
    if dist.get_rank() == 1:
        broken: dict[str, Any] = {"model/up": None}
        part = dataclasses.replace(part, experts=broken)
    try:
        save(Path(root), 4, part, group=dist.group.WORLD)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.distributed
def test_each_rank_writes_its_experts(pool2: Pool, tmp_path: Path) -> None:
    keys = pool2.run(save_on_each, str(tmp_path))
    assert keys == [[f"model/up/expert/{e}" for e in experts] for experts in ((0, 1), (2, 3))]
    assert Manifest.read(tmp_path / "step-00000003").world_size == 2


@pytest.mark.distributed
def test_a_rank_that_fails_fails_all_and_publishes_nothing(pool2: Pool, tmp_path: Path) -> None:
    said = pool2.run(break_one_rank, str(tmp_path))
    assert said[0] == said[1]
    assert said[0].startswith("RankError: rank 1: AttributeError")
    assert list(tmp_path.iterdir()) == []


def test_values_survive(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, content(1))
    with open_checkpoint(folder).reader() as reader:
        assert torch.equal(reader.dense("model/b"), torch.tensor(1.5, dtype=torch.bfloat16))
        assert torch.equal(reader.experts("model/up", 1, 2), content(1).experts["model/up"].values[1:3])
