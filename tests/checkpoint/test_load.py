from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.checkpoint import Checkpoint, find_steps, open_checkpoint, open_latest, save
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


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _entry(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["files"][0].update(changes)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no files": (lambda m: m.update(files=[]), r"manifest.json: incomplete: does not list state.json"),
    "no dense": (lambda m: m["files"].pop(0), r"does not list dense.safetensors"),
    "no state": (lambda m: m["files"].pop(1), r"does not list state.json"),
    "no experts": (lambda m: m["files"].pop(2), r"experts-00000-of-00001.safetensors: not in the manifest"),
    "files of another type": (lambda m: m.update(files=3), "incomplete"),
    "an entry of another type": (lambda m: m.update(files=["dense.safetensors"]), "incomplete"),
    "a name above": (
        _entry(name="../dense.safetensors"),
        r"file name '\.\./dense.safetensors': must be a plain",
    ),
    "an absolute name": (_entry(name="/dev/zero"), "must be a plain name"),
    "a name that is a parent": (_entry(name=".."), "must be a plain name"),
    "a name with a drive": (_entry(name="c:dense"), "must be a plain name"),
    "a name with a zero": (_entry(name="a\0b"), "must be a plain name"),
    "no name": (_entry(name=""), "must be a plain name"),
    "a number as name": (_entry(name=5), "file name 5: must be a plain name"),
    "itself": (_entry(name="manifest.json"), "must be a plain name"),
    "a name too long": (_entry(name="a" * 4000), "does not list dense"),
    "another file too long": (
        lambda m: m["files"].append({**m["files"][0], "name": "a" * 400, "keys": []}),
        "read",
    ),
    "a size in words": (_entry(size="many"), "size 'many'"),
    "a hash of another type": (_entry(sha256=7), "SHA-256 7"),
    "keys of another type": (_entry(keys="model"), "keys of dense.safetensors"),
    "keys in numbers": (_entry(keys=[1]), "keys of dense.safetensors"),
    "a file twice": (lambda m: m["files"].append(m["files"][1]), "lists the file 'state.json' twice"),
    "a tensor twice": (lambda m: m["files"][1]["keys"].append("model/a"), "lists the tensor 'model/a' twice"),
    "a step in words": (lambda m: m.update(step="two"), "step='two'"),
    "another step": (lambda m: m.update(step=7), "is of step 7; the folder was renamed"),
    "no ranks": (lambda m: m.update(world_size=0), "world_size=0"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_says_too_little_or_nonsense(tmp_path: Path, name: str) -> None:
    change, said = MANIFESTS[name]
    for step in (1, 2):
        save(tmp_path, step, content(step))
    _rewrite(tmp_path / "step-00000002", change)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path / "step-00000002")
    assert open_latest(tmp_path).state["step"] == 1


@pytest.mark.parametrize("text", ["[]", "3", "null", "[" * 100_000, '"text"', "\xff"])
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_json_of_another_kind(tmp_path: Path, name: str, text: str) -> None:
    for step in (1, 2):
        folder = save(tmp_path, step, content(step))
    (folder / name).write_bytes(text.encode("latin-1"))
    if name == "state.json":  # and the manifest agrees with it
        size, digest = len(text), hashlib.sha256(text.encode("latin-1")).hexdigest()
        _rewrite(folder, lambda manifest: manifest["files"][1].update(size=size, sha256=digest))
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(folder)
    assert open_latest(tmp_path).state["step"] == 1


def test_a_folder_renamed_to_another_step(tmp_path: Path) -> None:
    save(tmp_path, 1, content(1))
    save(tmp_path, 2, content(2)).rename(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match=r"step-00000009.manifest.json: is of step 2"):
        open_checkpoint(tmp_path / "step-00000009")
    assert open_latest(tmp_path).state["step"] == 1


def test_only_names_that_saving_gives_are_steps(tmp_path: Path) -> None:
    for name in (
        "step-00000003",
        "step-000000004",
        "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0665",
        "step-6",
    ):
        (tmp_path / name).mkdir()
    assert find_steps(tmp_path) == [3]


def test_what_the_caller_finds_wrong_is_passed_over_too(tmp_path: Path) -> None:
    def check(checkpoint: Checkpoint) -> None:
        if checkpoint.state["step"] == 2:
            raise CheckpointError("not this one")

    for step in (1, 2):
        save(tmp_path, step, content(step))
    assert open_latest(tmp_path, check=check).state["step"] == 1


def test_a_file_that_goes_while_it_is_read(tmp_path: Path) -> None:
    with open_checkpoint(save(tmp_path, 1, content(1))).reader() as reader:
        (tmp_path / "step-00000001" / "dense.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"dense.safetensors: cannot be read"):
            reader.dense("model/a")


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
