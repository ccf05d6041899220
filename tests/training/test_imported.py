"""Runs made of Transformers folders, and checkpoints of this package as models: how training goes on from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from lrmoe.checkpoint import export_checkpoint
from lrmoe.errors import CheckpointError, ConfigError, UnsupportedError
from lrmoe.training.config import TrainConfig
from lrmoe.training.imported import import_run
from lrmoe.training.loop import Trainer
from lrmoe.training.resume import resumed_config
from tests.checkpoint.common import DAMAGE
from tests.checkpoint.runs import (
    config_of,
    copied,
    index_of,
    logits,
    pretrained,
    same_tensors,
    tensors_in,
    trained,
)
from tests.distributed.pool import Pool

NAME = "model.layers.1.mlp.experts.3.up_proj.weight"
LIMIT_S = 120.0  # the first case imports transformers in every process


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformers folder in bfloat16 that a GLM was exported to."""
    folder = tmp_path_factory.mktemp("glm")
    config = config_of(folder, "glm", dtype="bfloat16")
    trained(config)
    export_checkpoint(config.folder, folder / "out")
    return folder / "out"


def places(tmp_path: Path) -> list[str]:
    """Overrides for a small run."""
    corpus = config_of(tmp_path, "glm").data.path
    return [f"data.path={json.dumps(corpus)}", "data.seq_len=16", "train.batch_size=2", "train.device=cpu"]


def resumed(run: Path, *overrides: str) -> TrainConfig:
    return resumed_config(
        None, [f"train.runs={json.dumps(str(run.parent))}", f"train.name={run.name}", *overrides]
    )


def test_an_imported_run_goes_on(exported: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "new"
    made = import_run(exported, run, overrides=[*places(tmp_path), "train.steps=3"])
    assert made == run / "checkpoints" / "step-00000000"
    settings = resumed(run)
    assert (settings.train.dtype, settings.train.steps) == ("bfloat16", 3)
    kept = json.loads((run / "model" / "config.json").read_text())
    assert kept["dtype"] == "bfloat16", "as the folder says"
    trainer = Trainer(settings)
    assert trainer.resume() == 0
    same_tensors(trainer.model.state_dict(), pretrained(exported).state_dict())
    assert {e.master.dtype for e in trainer.parameters.entries} == {torch.float32}
    export_checkpoint(run, tmp_path / "out")
    same_tensors(tensors_in(tmp_path / "out"), tensors_in(exported))
    trainer.step()
    trainer.save()
    assert export_checkpoint(run, tmp_path / "later").step == 1


def test_a_tokenizer_in_the_folder_is_the_run_s(exported: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = copied(exported, tmp_path / "folder")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "line": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    import_run(folder, tmp_path / "before", overrides=places(tmp_path))
    given = resumed(tmp_path / "before").data.tokenizer
    assert given == str(tmp_path / "before" / "model" / "tokenizer.json")
    (tmp_path / "before").rename(tmp_path / "run")
    settings = resumed(tmp_path / "run")
    assert settings.model.config == str(tmp_path / "run" / "model"), "a run may be moved"
    assert settings.data.tokenizer == str(tmp_path / "run" / "model" / "tokenizer.json")
    trainer = Trainer(settings)
    assert trainer.resume() == 0
    trainer.save()
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_an_imported_run_of_sharded_storage(exported: Path, tmp_path: Path) -> None:
    import_run(exported, tmp_path / "run", overrides=[*places(tmp_path), 'lrmoe.storage="sharded"'])
    trainer = Trainer(resumed(tmp_path / "run"))
    assert trainer.resume() == 0
    trainer.save()
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    same_tensors(tensors_in(tmp_path / "out"), tensors_in(exported))


def weights_of(config: TrainConfig) -> dict[str, Any]:
    trainer = Trainer(config, dist.group.WORLD)
    assert trainer.resume() == 0
    return {entry.name: (entry.master, entry.span) for entry in trainer.parameters.experts}


@pytest.mark.distributed
def test_an_imported_run_is_spread_over_ranks(pool2: Pool, exported: Path, tmp_path: Path) -> None:
    import_run(exported, tmp_path / "run", overrides=places(tmp_path))
    whole = dict(pretrained(exported).named_parameters())
    ranks = pool2.run(weights_of, resumed(tmp_path / "run"), limit_s=LIMIT_S)
    for name in ranks[0]:
        assert torch.equal(torch.cat([rank[name][0] for rank in ranks]), whole[name].float())


def without_a_tensor(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(NAME)
    save_file(tensors, folder / "model.safetensors")
    index = index_of(folder)
    index["weight_map"].pop(NAME)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_run_that_cannot_be_made_leaves_nothing(exported: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "new"
    for overrides, said in (
        (["model.preset=glm4-moe-tiny"], r"model\.preset: the model is that of .*; leave \[model\] out"),
        (["data.path=nowhere"], r"data\.path='nowhere'"),
        (["train.stepz=3"], r"train\.stepz: no such key"),
    ):
        with pytest.raises(ConfigError, match=said):
            import_run(exported, run, overrides=overrides)
    broken = without_a_tensor(copied(exported, tmp_path / "broken"))
    with pytest.raises(CheckpointError, match=NAME):
        import_run(broken, run, overrides=places(tmp_path))
    assert not list((tmp_path / "runs").iterdir())
    run.mkdir()
    with pytest.raises(ConfigError, match=r"new: exists; name another run"):
        import_run(exported, run)


def started_from(config: TrainConfig, path: Path) -> TrainConfig:
    return config.replace(model={"preset": None, "overrides": {}, "checkpoint": str(path)})


@pytest.mark.parametrize("kind", ["step", "run"])
def test_a_checkpoint_of_ours_is_taken_as_a_model(tmp_path: Path, kind: str) -> None:
    config = config_of(tmp_path, "glm")
    trainer = trained(config)
    path = config.folder if kind == "run" else config.folder / "checkpoints" / "step-00000001"
    started = Trainer(started_from(config, path))
    same_tensors(started.model.state_dict(), trainer.model.state_dict())
    assert started.steps_done == 0
    assert torch.equal(logits(started.model), logits(trainer.model))


def test_a_damaged_checkpoint_is_no_model(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen")
    trained(config)
    folder = config.folder / "checkpoints" / "step-00000001"
    DAMAGE["flip"](folder / "dense.safetensors")
    with pytest.raises(ConfigError, match=r"model\.checkpoint=.*dense\.safetensors: its SHA-256 differs"):
        Trainer(started_from(config, config.folder))
    DAMAGE["remove"](folder / "dense.safetensors")
    with pytest.raises(ConfigError, match=r"model\.checkpoint=.*dense\.safetensors: missing"):
        Trainer(started_from(config, config.folder))


def test_quantised_weights_are_no_model(exported: Path, tmp_path: Path) -> None:
    folder = copied(exported, tmp_path / "folder")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**fields, "quantization_config": {"quant_method": "fp8"}})
    )
    config = started_from(config_of(tmp_path, "qwen"), folder)
    with pytest.raises(
        UnsupportedError, match=r"quantization_config \(fp8\): quantised weights are not read"
    ):
        Trainer(config)
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = tensors_in(folder)
    save_file({**tensors, NAME: tensors[NAME].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedError, match=f"{NAME} is stored as F8_E4M3; quantised weights are not read"
    ):
        Trainer(config)
