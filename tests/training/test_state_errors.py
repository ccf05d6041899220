"""Checkpoints that cannot be written or read: the error says where, and the trainer is as it was."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from lrmoe.checkpoint.manifest import describe
from lrmoe.errors import CheckpointError
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from tests.checkpoint.common import flip_a_byte, truncate
from tests.distributed.pool import Pool
from tests.training.test_async import everything, same
from tests.training.tiny import tiny_config

SAVING: Any = importlib.import_module("lrmoe.checkpoint.save")  # the package has a function of that name
Act = Callable[..., Any]


def no_room(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def broken_disk(*_: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


def read_only(path: Path, *_: Any, **__: Any) -> Any:
    raise OSError(errno.EROFS, "Read-only file system", str(path))


# Where writing fails: what is replaced by what, and what is said.
WRITES: dict[str, tuple[object, str, Act, str]] = {
    "the folder": (Path, "mkdir", read_only, "cannot be created: .*Read-only file system"),
    "a file of tensors": (SAVING, "save_file", no_room, "cannot be written: .*No space left"),
    "the state": (SAVING, "write_json", no_room, "cannot be written: .*No space left"),
    "a flush to the disk": (SAVING, "sync", broken_disk, "cannot be written: .*Input/output error"),
    "the manifest": (SAVING.Manifest, "write", no_room, "cannot be written: .*No space left"),
    "the rename": (Path, "rename", read_only, "cannot be written: .*Read-only file system"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """After two steps, with a checkpoint of the first."""
    trainer = Trainer(tiny_config(tmp_path_factory.mktemp("writes")))
    trainer.step()
    trainer.save()
    trainer.step()
    return trainer


@pytest.mark.parametrize("thread", [False, True], ids=["at once", "by a thread"])
@pytest.mark.parametrize("where", WRITES)
def test_what_cannot_be_written(
    trained: Trainer, monkeypatch: pytest.MonkeyPatch, where: str, thread: bool
) -> None:
    trained.config = trained.config.replace(train={"checkpoint_async": thread})
    owner, name, act, said = WRITES[where]
    before = everything(trained)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, act)
        with pytest.raises(CheckpointError, match=said):
            save_now(trained)
    assert same(everything(trained), before)
    folder = trained.config.folder / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    save_now(trained)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
    shutil.rmtree(folder / "step-00000002")


def save_now(trainer: Trainer) -> None:
    trainer.save()
    trainer.finish_saving()


def test_a_disk_that_is_really_full(trained: Trainer) -> None:
    """A file may not grow past a limit that the tensors exceed."""
    resource = pytest.importorskip("resource")
    before, limits = everything(trained), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        for thread in (False, True):
            trained.config = trained.config.replace(train={"checkpoint_async": thread})
            with pytest.raises(CheckpointError, match="cannot be written"):
                save_now(trained)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(everything(trained), before)
    assert [path.name for path in (trained.config.folder / "checkpoints").iterdir()] == ["step-00000001"]


def one_rank_fails(config: TrainConfig) -> list[str]:
    """The second rank has no room; what each rank is told, and whether its trainer is as it was."""
    said = []
    trainer = Trainer(config, dist.group.WORLD)
    trainer.step()
    before = everything(trainer)
    original = SAVING.save_file
    if trainer.rank == 1:
        SAVING.save_file = no_room
    try:
        save_now(trainer)
    except CheckpointError as error:
        said.append(str(error))
    finally:
        SAVING.save_file = original
    said.append("unharmed" if same(everything(trainer), before) else "harmed")
    trainer.step()
    save_now(trainer)
    said.append(str(sorted(path.name for path in (config.folder / "checkpoints").iterdir())))
    return said


@pytest.mark.distributed
@pytest.mark.parametrize("thread", [False, True], ids=["at once", "by a thread"])
def test_one_rank_without_room(pool2: Pool, tmp_path: Path, thread: bool) -> None:
    first, second = pool2.run(one_rank_fails, tiny_config(tmp_path, train={"checkpoint_async": thread}))
    assert first == second
    assert "No space left" in first[0]
    assert first[1:] == ["unharmed", "['step-00000002']"]


def rewritten(folder: Path, name: str) -> None:
    """Let the manifest agree with what a file is now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == name:
            told = describe(folder / name, ())
            entry.update(size=told.size, sha256=told.sha256)
            if name.endswith(".safetensors"):
                entry["keys"] = list(load_file(folder / name))
    (folder / "manifest.json").write_text(json.dumps(manifest))


def with_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return act


def with_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        change(state)
        (folder / "state.json").write_text(json.dumps(state))
        rewritten(folder, "state.json")

    return act


def with_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)
        rewritten(folder, name)

    return act


DENSE, EXPERTS = "dense.safetensors", "experts-00001-of-00002.safetensors"
GATE = "model/model.layers.0.mlp.experts.gate_up_proj/expert/3"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a truncated file": (lambda f: truncate(f / DENSE), rf"{DENSE}: \d+ bytes, the manifest says \d+"),
    "a flipped byte": (lambda f: flip_a_byte(f / EXPERTS), rf"{EXPERTS}: its SHA-256 differs"),
    "a rank's file missing": (lambda f: (f / EXPERTS).unlink(), rf"{EXPERTS}: missing"),
    "a file of another run": (
        lambda f: shutil.copy(f / EXPERTS, f / "experts-00001-of-00004.safetensors"),
        "experts-00001-of-00004.safetensors: not in the manifest",
    ),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json: missing"),
    "half a manifest": (lambda f: truncate(f / "manifest.json"), "manifest.json: cannot be read"),
    "a key that the manifest lacks": (
        with_manifest(lambda m: m["files"][-1]["keys"].remove(GATE)),
        rf"{EXPERTS}: its tensors differ from the manifest's, first: {GATE}",
    ),
    "a tensor that nobody has": (
        with_tensors(EXPERTS, lambda t: t.pop(GATE)),
        f"manifest.json: incomplete: lists no tensor '{GATE}'",
    ),
    "a moment that nobody has": (
        with_tensors(DENSE, lambda t: t.pop("optim/lm_head.weight/exp_avg_sq")),
        "lists no tensor 'optim/lm_head.weight/exp_avg_sq'",
    ),
    "a tensor of another shape": (
        with_tensors(EXPERTS, lambda t: t.update({GATE: t[GATE][:, :-1].contiguous()})),
        rf"{GATE} has shape \(32, 31\), the model's is \(32, 32\)",
    ),
    "another number of ranks": (
        with_manifest(lambda m: m.update(world_size=3)),
        "state.json: layers_by_rank of 2 ranks: the manifest says 3",
    ),
    "layers of another kind": (
        with_state(lambda s: s["layers_by_rank"][0].update(layers=5)),
        "state.json: layers_by_rank: ",
    ),
    "a layer that the model lacks": (
        with_state(lambda s: [one["layers"].update(other={}) for one in s["layers_by_rank"]]),
        r"state.json: layers_by_rank: handle state is of another model: .*'other'",
    ),
    "a layer's counter in words": (
        with_state(
            lambda s: [
                layer.update(calls="2") for one in s["layers_by_rank"] for layer in one["layers"].values()
            ]
        ),
        r"state.json: layers_by_rank: handle state does not fit: state of layer 0: calls='2'",
    ),
}


def save_two(config: TrainConfig) -> None:
    trainer = Trainer(config, dist.group.WORLD)
    for _ in range(2):
        trainer.step()
        trainer.save()


@pytest.fixture(scope="module")
def saved(pool2: Pool, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of two ranks with two checkpoints."""
    config = tiny_config(tmp_path_factory.mktemp("saved"))
    pool2.run(save_two, config)
    return config


@pytest.fixture(scope="module")
def reader(saved: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A trainer with weights, moments and states of its own."""
    trainer = Trainer(saved.replace(train={"runs": str(tmp_path_factory.mktemp("reads"))}))
    for _ in range(3):
        trainer.step()
    return trainer


@pytest.fixture
def copied(saved: TrainConfig, reader: Trainer) -> Iterator[Path]:
    """The checkpoints, where `reader` looks for them."""
    folder = reader.config.folder / "checkpoints"
    shutil.copytree(saved.folder / "checkpoints", folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.distributed
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_read_is_named_and_changes_nothing(reader: Trainer, copied: Path, damage: str) -> None:
    act, said = DAMAGE[damage]
    shutil.rmtree(copied / "step-00000001")
    act(copied / "step-00000002")
    before = everything(reader)
    with pytest.raises(CheckpointError, match=rf"no usable checkpoint; the newest: .*step-00000002.*{said}"):
        reader.resume()
    assert same(everything(reader), before)
    reader.step()


@pytest.mark.distributed
@pytest.mark.parametrize("damage", DAMAGE)
def test_the_one_before_is_used(
    reader: Trainer, copied: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    act, said = DAMAGE[damage]
    act(copied / "step-00000002")
    assert reader.resume() == 1
    warned = [message for message in caplog.messages if "step-00000002 is not usable" in message]
    assert len(warned) == 1
    assert re.search(said, warned[0])


def resume_all(config: TrainConfig) -> tuple[str, bool, int]:
    """What a rank is told of a bad checkpoint alone, whether it was unharmed, and where it goes on with another."""
    trainer = Trainer(config, dist.group.WORLD)
    trainer.step()
    before, hidden = everything(trainer), config.folder / "hidden"
    folder = config.folder / "checkpoints" / "step-00000001"
    dist.barrier()
    if trainer.rank == 0:
        folder.rename(hidden)
    dist.barrier()
    try:
        trainer.resume()
        said = "nothing"
    except CheckpointError as error:
        said = str(error)
    unharmed = same(everything(trainer), before)
    dist.barrier()
    if trainer.rank == 0:
        hidden.rename(folder)
    dist.barrier()
    return said, unharmed, trainer.resume()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "damage", ["a rank's file missing", "a tensor of another shape", "a layer's counter in words"]
)
def test_all_ranks_are_told_the_same(pool2: Pool, saved: TrainConfig, tmp_path: Path, damage: str) -> None:
    act, said = DAMAGE[damage]
    config = saved.replace(train={"runs": str(tmp_path)})
    shutil.copytree(saved.folder / "checkpoints", config.folder / "checkpoints")
    act(config.folder / "checkpoints" / "step-00000002")
    first, second = pool2.run(resume_all, config)
    assert first == second
    assert re.search(said, first[0])
    assert first[1:] == (True, 1)


def test_a_folder_that_nobody_may_write(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("the superuser may write everywhere")
    trainer = Trainer(tiny_config(tmp_path))
    trainer.config.folder.mkdir()
    trainer.config.folder.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=r"cannot be created: .*Permission denied"):
            trainer.save()
    finally:
        trainer.config.folder.chmod(0o700)
