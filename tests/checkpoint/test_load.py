from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lrmoe.checkpoint import open_checkpoint, open_latest, save
from lrmoe.errors import CheckpointError
from tests.checkpoint.common import DAMAGE, content, experts_of
from tests.distributed.pool import Pool

FILES = ("manifest.json", "state.json", "dense.safetensors", "experts-00000-of-00001.safetensors")


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_file_named(tmp_path: Path, name: str, damage: str) -> None:
    folder = save(tmp_path, 1, content(1))
    DAMAGE[damage](folder / name)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_previous_good_one_is_used(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save(tmp_path, step, content(step))
    DAMAGE[damage](tmp_path / "step-00000002" / "dense.safetensors")
    with caplog.at_level(logging.WARNING):
        assert open_latest(tmp_path).state["step"] == 1
    assert "step-00000002 is not usable" in caplog.text


def test_nothing_usable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        open_latest(tmp_path)
    folder = save(tmp_path, 1, content(1))
    (folder / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no usable checkpoint.*state.json: missing"):
        open_latest(tmp_path)


def test_other_tensors_than_the_manifest_says(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, content(1))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0]["keys"].append("model/c")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="model/c"):
        open_checkpoint(folder)


def test_another_format(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, content(1))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        open_checkpoint(folder)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with open_checkpoint(save(tmp_path, 1, content(1))).reader() as reader:
        with pytest.raises(CheckpointError, match="'model/z'"):
            reader.dense("model/z")
        with pytest.raises(CheckpointError, match="'model/up/expert/4'"):
            reader.experts("model/up", 3, 2)


def read_part(root: str) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoint = open_latest(Path(root), group=dist.group.WORLD)
    with checkpoint.reader() as reader:
        return reader.experts("model/up", rank * 4 // world_size, 4 // world_size)


def try_to_open(root: str) -> str:
    try:
        open_latest(Path(root), group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return "nothing"


@pytest.mark.distributed
def test_more_ranks_than_wrote_it(pool2: Pool, tmp_path: Path) -> None:
    save(tmp_path, 5, content(5))
    parts = pool2.run(read_part, str(tmp_path))
    assert torch.equal(torch.cat(parts), experts_of(0, 1) + 5)


@pytest.mark.distributed
@pytest.mark.parametrize("name", FILES)
def test_every_rank_says_the_same(pool2: Pool, tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1, content(1))
    DAMAGE["truncate"](folder / name)
    said = pool2.run(try_to_open, str(tmp_path))
    assert said[0] == said[1]
    assert name in said[0]
