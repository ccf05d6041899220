"""Imports: a Transformers folder as a checkpoint, bit for bit and back; everything else refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lrmoe.checkpoint import export_checkpoint, import_checkpoint, open_checkpoint
from lrmoe.errors import CheckpointError, ConfigError, LRMoEError, UnsupportedError
from tests.checkpoint.runs import (
    INDEX,
    config_of,
    copied,
    index_of,
    same_tensors,
    tensors_in,
    trained,
)

FILES = ("config.json", INDEX)
NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders in the Transformers layout, by family and dtype, and one with fused experts."""
    found = {}
    for family in ("qwen", "glm"):
        for dtype in ("float32", "bfloat16"):
            folder = tmp_path_factory.mktemp(f"{family}-{dtype}")
            config = config_of(folder, family, dtype=dtype)
            trained(config)
            found[f"{family}-{dtype}"] = folder / "out"
            export_checkpoint(config.folder, folder / "out", max_shard_size="60kB")
            if (family, dtype) == ("qwen", "float32"):
                export_checkpoint(config.folder, folder / "fused", layout="fused")
                found["fused"] = folder / "fused"
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen", "glm"])
def test_there_and_back_is_bitwise(
    exported: dict[str, Path], tmp_path: Path, family: str, dtype: str
) -> None:
    folder = exported[f"{family}-{dtype}"]
    made = import_checkpoint(folder, tmp_path / "run")
    assert made == tmp_path / "run" / "step-00000000"
    assert open_checkpoint(made).manifest.step == 0
    export_checkpoint(made, tmp_path / "again", max_shard_size="60kB")
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    assert sorted(path.name for path in (tmp_path / "again").glob("*.safetensors")) == weights
    same_tensors(tensors_in(tmp_path / "again"), tensors_in(folder))
    for name in FILES:
        once, twice = (json.loads((place / name).read_text()) for place in (folder, tmp_path / "again"))
        if name == INDEX:
            once["metadata"].pop("step"), twice["metadata"].pop("step")
        assert once == twice


def test_the_layout_is_stated(exported: dict[str, Path], tmp_path: Path) -> None:
    for number, layout in enumerate((None, "fused")):
        made = import_checkpoint(exported["fused"], tmp_path / str(number), layout=layout)
        export_checkpoint(made, tmp_path / f"out{number}")
        same_tensors(tensors_in(tmp_path / f"out{number}"), tensors_in(exported["qwen-float32"]))
    with pytest.raises(ConfigError, match=r"layout='per-expert': .*fused states 'fused'"):
        import_checkpoint(exported["fused"], tmp_path / "no", layout="per-expert")
    with pytest.raises(ConfigError, match=r"layout='flat': must be one of"):
        import_checkpoint(exported["fused"], tmp_path / "no", layout="flat")


def test_a_folder_that_states_no_layout_is_taken_as_published(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    folder = copied(exported["fused"], tmp_path / "fused")
    unstate(folder)
    said = r"holds model\.layers\.0\.mlp\.experts\.gate_up_proj, so its layout is 'fused'; say so with --layout fused"
    with pytest.raises(CheckpointError, match=said):
        import_checkpoint(folder, tmp_path / "run")
    import_checkpoint(folder, tmp_path / "run", layout="fused")
    single = copied(exported["qwen-float32"], tmp_path / "single")
    unstate(single)
    import_checkpoint(single, tmp_path / "other")
    with pytest.raises(
        CheckpointError, match=r"holds no tensor 'model.*gate_up_proj', as layout 'fused' has it"
    ):
        import_checkpoint(single, tmp_path / "third", layout="fused")


def unstate(folder: Path) -> None:
    (folder / INDEX).unlink()


def changed(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        index = index_of(folder)
        index["weight_map"] = dict.fromkeys(tensors, "model.safetensors")
        (folder / INDEX).write_text(json.dumps(index))

    return apply


def without(name: str) -> Callable[[Path], None]:
    return changed(lambda tensors: tensors.pop(name))


def fields(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**found, **changes}))

    return apply


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def wrong_index(folder: Path) -> None:
    index = index_of(folder)
    index["weight_map"]["model.more.weight"] = "model.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


FAULTS: dict[str, tuple[Callable[[Path], object], type[LRMoEError], str]] = {
    "no folder": (
        lambda f: remove(*f.iterdir()),
        ConfigError,
        "no directory with a config.json",
    ),
    "no weights": (
        lambda f: remove(f / "model.safetensors", f / INDEX),
        CheckpointError,
        r"neither model\.safetensors nor model\.safetensors\.index\.json there",
    ),
    "a missing file": (
        lambda f: (f / "model.safetensors").unlink(),
        CheckpointError,
        r"model\.safetensors: missing",
    ),
    "a file cut short": (cut_short, CheckpointError, r"model\.safetensors: cannot be read"),
    "no index": (
        lambda f: (f / INDEX).write_text("[]"),
        CheckpointError,
        r"index\.json: holds a list: must be an object",
    ),
    "an index of other tensors": (
        wrong_index,
        CheckpointError,
        r"model\.safetensors: holds no tensor 'model\.more\.weight', which .*index",
    ),
    "a missing expert": (without(NAME), CheckpointError, re.escape(f"holds no tensor '{NAME}'")),
    "a missing norm": (without("model.norm.weight"), CheckpointError, "holds no tensor 'model.norm.weight'"),
    "a strange tensor": (
        changed(lambda t: t.update({"model.extra": torch.ones(2)})),
        CheckpointError,
        r"holds model\.extra, which Qwen3MoeForCausalLM has no place for",
    ),
    "another shape": (
        changed(lambda t: t.update({NAME: torch.ones(3, 32)})),
        CheckpointError,
        re.escape(f"{NAME} has shape (3, 32), the configuration asks for (16, 32)"),
    ),
    "two dtypes": (
        changed(lambda t: t.update({NAME: t[NAME].half()})),
        CheckpointError,
        r"gate_up_proj of expert 3 has several dtypes: \['F16', 'F32'\]",
    ),
    "quantised weights": (
        changed(lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)})),
        UnsupportedError,
        re.escape(f"{NAME} is stored as F8_E4M3; quantised weights are not read, valid: F64, F32, F16, BF16"),
    ),
    "a quantised configuration": (
        fields(quantization_config={"quant_method": "fp8"}),
        UnsupportedError,
        r"quantization_config \(fp8\): quantised weights are not read",
    ),
    "another family": (
        fields(model_type="dbrx"),
        UnsupportedError,
        r"model_type='dbrx': the names of its published checkpoints",
    ),
    "no family": (fields(model_type="nothing"), ConfigError, r"config\.json: transformers cannot read it"),
    "no experts": (
        fields(mlp_only_layers=[0, 1]),
        UnsupportedError,
        "Qwen3MoeForCausalLM with these settings has no layer with",
    ),
    "another layout": (
        lambda f: (f / INDEX).write_text(
            json.dumps({"metadata": {"layout": "flat"}, "weight_map": index_of(f)["weight_map"]})
        ),
        CheckpointError,
        r"index\.json: layout 'flat': valid: per-expert, fused",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named_and_nothing_is_left(
    exported: dict[str, Path], tmp_path: Path, fault: str
) -> None:
    damage, kind, said = FAULTS[fault]
    folder = copied(exported["qwen-float32"], tmp_path / "folder")
    damage(folder)
    with pytest.raises(kind, match=said):
        import_checkpoint(folder, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_import_replaces_nothing(exported: dict[str, Path], tmp_path: Path) -> None:
    made = import_checkpoint(exported["qwen-float32"], tmp_path / "run")
    before = (made / "manifest.json").read_bytes()
    with pytest.raises(ConfigError, match=r"step-00000000: exists; import into another folder"):
        import_checkpoint(exported["qwen-float32"], tmp_path / "run")
    assert (made / "manifest.json").read_bytes() == before


def test_parts_that_the_class_leaves_out_are_passed_over(exported: dict[str, Path], tmp_path: Path) -> None:
    """GLM-4.5's folders hold one more layer, for prediction of several tokens, which transformers does not read."""
    folder = copied(exported["glm-float32"], tmp_path / "folder")
    changed(lambda tensors: tensors.update({"model.layers.46.eh_proj.weight": torch.ones(2, 2)}))(folder)
    made = import_checkpoint(folder, tmp_path / "run")
    export_checkpoint(made, tmp_path / "out")
    same_tensors(tensors_in(tmp_path / "out"), tensors_in(exported["glm-float32"]))


def test_a_state_that_says_no_dtype(exported: dict[str, Path], tmp_path: Path) -> None:
    """The weights say it, where they are of one."""
    folder = copied(exported["glm-bfloat16"], tmp_path / "folder")
    fields = json.loads((folder / "config.json").read_text())
    made = import_checkpoint(folder, tmp_path / "run", state={"model": fields})
    assert export_checkpoint(made, tmp_path / "out").dtype == "bfloat16"
    same_tensors(tensors_in(tmp_path / "out"), tensors_in(folder))
    changed(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].float()}))(folder)
    mixed = import_checkpoint(folder, tmp_path / "mixed", state={"model": fields})
    with pytest.raises(ConfigError, match=r"dtype=None: .*does not say .* the weights are BF16, F32; valid"):
        export_checkpoint(mixed, tmp_path / "no")
    assert export_checkpoint(mixed, tmp_path / "asked", dtype="float32").dtype == "float32"
