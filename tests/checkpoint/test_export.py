"""Exports: what transformers reads from one, names as published, one rename, nothing left behind."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from lrmoe.checkpoint import Checkpoint, export_checkpoint, import_checkpoint, open_checkpoint
from lrmoe.checkpoint.hf import export as export_module
from lrmoe.checkpoint.hf import tensors as module
from lrmoe.checkpoint.hf.names import FAMILIES
from lrmoe.checkpoint.manifest import describe
from lrmoe.errors import CheckpointError, ConfigError, UnsupportedError
from lrmoe.training.loop import Trainer
from tests.checkpoint.common import DAMAGE
from tests.checkpoint.runs import config_of, index_of, logits, pretrained, same_tensors, tensors_in, trained
from tests.distributed.pool import Pool
from tests.integrations.models import config_of as hf_config

EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny Qwen3-MoE with checkpoints of steps 1 and 2."""
    config = config_of(tmp_path_factory.mktemp("qwen"), "qwen")
    trainer = trained(config)
    trainer.step()
    trainer.save()
    return config.folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen", "glm"])
def test_transformers_reads_what_was_trained(tmp_path: Path, family: str, dtype: str) -> None:
    trainer = trained(config_of(tmp_path, family, dtype=dtype))
    trainer.handle.disable()
    trainer.model.set_experts_implementation("eager")
    done = export_checkpoint(trainer.config.folder, tmp_path / "out")
    assert (done.step, done.layout, done.dtype) == (1, "per-expert", dtype)
    model = pretrained(tmp_path / "out")
    theirs, ours = model.state_dict(), trainer.model.state_dict()
    same_tensors(theirs, ours)
    assert model.dtype == getattr(torch, dtype)
    assert torch.equal(logits(model), logits(trainer.model))
    if family == "glm":
        bias = tensors_in(tmp_path / "out")["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert bias.dtype == torch.float32
        assert not torch.equal(bias, bias.bfloat16().float()), "it keeps what bfloat16 cannot hold"


@pytest.mark.parametrize("verified", [False, True])
def test_a_run_that_goes_on_may_remove_what_is_read(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    root = tmp_path / "run" / "checkpoints"
    shutil.copytree(run / "checkpoints", root)
    (root / "step-00000001").rename(tmp_path / "older")
    real, opened = open_checkpoint, list[str]()

    def removed_meanwhile(folder: Path) -> Checkpoint:
        opened.append(folder.name)
        if len(opened) > 1:
            return real(folder)
        found = real(folder) if verified else None
        shutil.rmtree(folder)
        (tmp_path / "older").rename(root / "step-00000001")
        return found or real(folder)

    monkeypatch.setattr(export_module, "open_checkpoint", removed_meanwhile)
    assert export_checkpoint(tmp_path / "run", tmp_path / "out").step == 1
    assert opened == ["step-00000002", "step-00000001"]


def test_a_step_that_is_removed_while_it_is_read_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")

    def removed(folder: Path) -> Checkpoint:
        shutil.rmtree(folder)
        return open_checkpoint(folder)

    monkeypatch.setattr(export_module, "open_checkpoint", removed)
    with pytest.raises(CheckpointError, match="step-00000001: was removed while it was read"):
        export_checkpoint(tmp_path, tmp_path / "out", step=1)
    assert not (tmp_path / "out").exists()


def test_names_files_and_metadata(run: Path, tmp_path: Path) -> None:
    done = export_checkpoint(run, tmp_path / "out", step=1, max_shard_size="40kB")
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    weights = [f"model-{n:05d}-of-{done.files:05d}.safetensors" for n in range(1, done.files + 1)]
    assert files == sorted(["config.json", "model.safetensors.index.json", *weights])
    index = index_of(tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    assert index["metadata"] == {"total_size": done.nbytes, "layout": "per-expert", "step": "1"}
    assert done.nbytes == sum(tensor.nbytes for tensor in found.values())
    assert index["weight_map"].keys() == found.keys()
    assert {EXPERT.format(e, p) for e in range(4) for p in ("gate", "up", "down")} <= found.keys()
    sizes = dict.fromkeys(weights, 0)
    for name, tensor in found.items():
        sizes[index["weight_map"][name]] += tensor.nbytes
    assert all(size <= 40_000 for size in sizes.values())
    assert len(weights) > 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen3MoeForCausalLM"], "float32")


def test_a_tensor_larger_than_a_file_may_be_has_one_to_itself(run: Path, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "out", max_shard_size=1)
    index = index_of(tmp_path / "out")
    assert len(set(index["weight_map"].values())) == len(index["weight_map"])
    pretrained(tmp_path / "out")


def test_blocks_do_not_show(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_checkpoint(run, tmp_path / "whole")
    monkeypatch.setattr(module, "BLOCK", 24)
    export_checkpoint(run, tmp_path / "pieces")
    same_tensors(tensors_in(tmp_path / "pieces"), tensors_in(tmp_path / "whole"))


def test_fused(run: Path, tmp_path: Path) -> None:
    done = export_checkpoint(run, tmp_path / "fused", layout="fused")
    export_checkpoint(run, tmp_path / "single")
    assert index_of(tmp_path / "fused")["metadata"]["layout"] == done.layout == "fused"
    found, single = tensors_in(tmp_path / "fused"), tensors_in(tmp_path / "single")
    for expert in range(4):
        parts = [single[EXPERT.format(expert, name)] for name in ("gate", "up")]
        assert torch.equal(found["model.layers.1.mlp.experts.gate_up_proj"][expert], torch.cat(parts))
    assert torch.equal(logits(pretrained(tmp_path / "fused")), logits(pretrained(tmp_path / "single")))


def test_another_dtype(run: Path, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "single")
    export_checkpoint(run, tmp_path / "half", dtype="float16")
    wanted = {name: tensor.half() for name, tensor in tensors_in(tmp_path / "single").items()}
    same_tensors(tensors_in(tmp_path / "half"), wanted)
    assert pretrained(tmp_path / "half").dtype == torch.float16


def a_model(family: str) -> Any:
    """A tiny model of a family with weights that tell every tensor from the others."""
    ours = {"qwen3_moe": "qwen3", "glm4_moe": "glm4", "mixtral": "mixtral", "deepseek_v3": "deepseek3"}
    if family in ours:
        config: Any = hf_config(ours[family])
    else:
        fields = {**hf_config("qwen3").to_dict(), "model_type": family, "shared_expert_intermediate_size": 24}
        config = type(transformers.AutoConfig.for_model(family)).from_dict(fields)
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_names_are_those_that_transformers_publishes(tmp_path: Path, family: str) -> None:
    a_model(family).save_pretrained(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "ours")
    same_tensors(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    same_tensors(pretrained(tmp_path / "ours").state_dict(), pretrained(tmp_path / "theirs").state_dict())


def save_ranks(config: Any) -> None:
    trained(config, dist.group.WORLD)


@pytest.mark.distributed
@pytest.mark.parametrize("storage", ["owned", "sharded"])
def test_two_ranks_of_either_storage(pool2: Pool, tmp_path: Path, storage: str) -> None:
    """The export holds what a trainer resumed on one rank holds."""
    config = config_of(tmp_path, "glm").replace(lrmoe={"storage": storage})
    pool2.run(save_ranks, config)
    export_checkpoint(config.folder, tmp_path / "out")
    alone = Trainer(config.replace(lrmoe={"storage": "owned"}))
    alone.resume()
    alone.handle.disable()
    alone.model.set_experts_implementation("eager")
    model = pretrained(tmp_path / "out")
    same_tensors(model.state_dict(), alone.model.state_dict())
    assert torch.equal(logits(model), logits(alone.model))


def test_the_tokenizer_goes_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {
        word: number for number, word in enumerate(["[UNK]", "line", "squared", "left", "over", ":", ","])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    config = config_of(tmp_path, "qwen").replace(data={"tokenizer": str(tmp_path / "words.json")})
    trained(config)
    export_checkpoint(config.folder, tmp_path / "out")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found("line left over")["input_ids"] == [1, 3, 4]
    (tmp_path / "words.json").unlink()
    with caplog.at_level(logging.WARNING):
        export_checkpoint(config.folder, tmp_path / "without")
    assert "words.json': not there any more; the export has no tokenizer" in caplog.text
    assert not (tmp_path / "without" / "tokenizer.json").exists()


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, "qwen")
    trainer = trained(config)
    trainer.step()
    newest = trainer.save()
    DAMAGE["flip"](newest / "dense.safetensors")
    with caplog.at_level(logging.WARNING):
        assert export_checkpoint(config.folder, tmp_path / "out").step == 1
    assert "step-00000002 is not usable: " in caplog.text
    caplog.clear()
    with pytest.raises(CheckpointError, match=r"dense.safetensors: its SHA-256 differs"):
        export_checkpoint(config.folder, tmp_path / "asked", step=2)
    with pytest.raises(CheckpointError, match=r"dense.safetensors: its SHA-256 differs"):
        export_checkpoint(newest, tmp_path / "asked")
    assert caplog.messages == [], "what is raised is not logged as well"
    assert not (tmp_path / "asked").exists()


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "step": ({"step": 7}, ConfigError, r"step=7: .*/run has no such checkpoint; valid: 1, 2"),
    "layout": ({"layout": "flat"}, ConfigError, r"layout='flat': must be one of 'per-expert', 'fused'"),
    "dtype": ({"dtype": "int8"}, ConfigError, r"dtype='int8': must be one of 'float32'"),
    "size": ({"max_shard_size": "big"}, ConfigError, r"max_shard_size='big': must be a positive size"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_bad_arguments(run: Path, tmp_path: Path, case: str) -> None:
    arguments, kind, said = ARGUMENTS[case]
    with pytest.raises(kind, match=said):
        export_checkpoint(run, tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: neither a checkpoint nor a run with checkpoints"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "out")


def test_nothing_is_replaced_unasked(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_checkpoint(run, out, step=1)
    with pytest.raises(ConfigError, match=r"out: exists; pass --overwrite"):
        export_checkpoint(run, out)
    assert index_of(out)["metadata"]["step"] == "1"
    export_checkpoint(run, out, overwrite=True)
    assert index_of(out)["metadata"]["step"] == "2"
    (out / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"out: is not a folder of files with a config.json"):
        export_checkpoint(run, out, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing hidden is left"


def no_space(*_: Any) -> bytes:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(*_: Any) -> bytes:
    raise KeyboardInterrupt("stopped")


@pytest.mark.parametrize(("fault", "kind"), [(no_space, CheckpointError), (interrupted, KeyboardInterrupt)])
def test_a_failed_write_leaves_what_was_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., bytes], kind: type
) -> None:
    out = tmp_path / "out"
    export_checkpoint(run, out, step=1)
    monkeypatch.setattr(module, "_header", fault)
    with pytest.raises(kind, match=r"No space left|stopped"):
        export_checkpoint(run, out, overwrite=True)
    assert index_of(out)["metadata"]["step"] == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def rewrite_state(folder: Path, change: Callable[[Any], object]) -> None:
    """Change state.json and keep the manifest in step with it."""
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    entry = describe(folder / "state.json", ())
    manifest = json.loads((folder / "manifest.json").read_text())
    for given in manifest["files"]:
        if given["name"] == "state.json":
            given.update(size=entry.size, sha256=entry.sha256)
    (folder / "manifest.json").write_text(json.dumps(manifest))


STATES: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "no model": (lambda s: s.pop("model"), CheckpointError, r"state.json: says nothing of the model"),
    "unknown family": (
        lambda s: s["model"].update(model_type="dbrx"),
        UnsupportedError,
        r"model_type='dbrx': the names of its published checkpoints are not known; valid: deepseek_v3, glm4_moe",
    ),
    "no such model": (
        lambda s: s["model"].update(model_type="nothing"),
        CheckpointError,
        r"state.json: transformers cannot use the model's fields",
    ),
    "another shape": (
        lambda s: s["model"].update(vocab_size=300),
        CheckpointError,
        r"dense.safetensors: model/.* has shape \(258, 32\), the configuration asks for \(300, 32\)",
    ),
    "more layers": (
        lambda s: s["model"].update(num_hidden_layers=3),
        CheckpointError,
        r"holds no tensor 'model/model\.layers\.2\.",
    ),
    "more experts": (
        lambda s: s["model"].update(num_experts=6, num_local_experts=6),
        CheckpointError,
        r"(holds no tensor 'model/.*/expert/4'|has shape \(4, 32\), the configuration asks for \(6, 32\))",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_checkpoint_that_is_of_another_model(tmp_path: Path, case: str) -> None:
    change, kind, said = STATES[case]
    config = config_of(tmp_path, "qwen")
    trainer = trained(config, steps=0)
    rewrite_state(trainer.config.folder / "checkpoints" / "step-00000000", change)
    with pytest.raises(kind, match=said):
        export_checkpoint(config.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))
