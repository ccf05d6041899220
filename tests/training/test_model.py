from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from lrmoe.errors import ConfigError
from lrmoe.training.config import ModelConfig
from lrmoe.training.model import build_model, read_config
from lrmoe.training.presets import PRESETS
from tests.distributed.pool import Pool
from tests.training.tiny import CPU, GLM_SHAPE, SHAPE

SHAPES = {name: GLM_SHAPE if name.startswith("glm4") else SHAPE for name in PRESETS}


def build(config: ModelConfig, seed: int = 0, group: Any = None) -> Any:
    return build_model(config, seed=seed, device=CPU, group=group)


def saved(folder: Path, preset: str = "qwen3-moe-tiny") -> Any:
    """A model with its weights in `folder`, as transformers writes them."""
    model = build(ModelConfig(preset=preset, overrides=SHAPES[preset]))
    model.save_pretrained(folder)
    return model


def fuse(folder: Path) -> None:
    """Rewrite the checkpoint under the names of the modules: experts as three-dimensional tensors."""
    tensors = load_file(folder / "model.safetensors")
    stems = {name.split(".experts.")[0] + ".experts" for name in tensors if ".mlp.experts." in name}
    for stem in stems:
        parts = {
            p: [tensors.pop(f"{stem}.{e}.{p}_proj.weight") for e in range(4)] for p in ("gate", "up", "down")
        }
        pairs = zip(parts["gate"], parts["up"], strict=True)
        tensors[f"{stem}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{stem}.down_proj"] = torch.stack(parts["down"])
    save_file(tensors, folder / "model.safetensors")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model.eval()(torch.arange(12).view(1, 12)).logits
    return output


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_what_they_say(preset: str) -> None:
    config = read_config(ModelConfig(preset=preset))
    assert config.model_type == PRESETS[preset].model_type
    experts = 32 if preset.endswith("micro") else 16
    assert (config.num_local_experts, config.num_experts_per_tok, config.vocab_size) == (experts, 4, 258)
    assert f"{experts} experts, top-4, " in PRESETS[preset].about


def test_the_seed_fixes_the_weights() -> None:
    config = ModelConfig(overrides=SHAPE)
    first, again, other = (build(config, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_local_checkpoint_is_what_transformers_reads(tmp_path: Path, preset: str, fused: bool) -> None:
    model = saved(tmp_path, preset)
    if fused:
        fuse(tmp_path)
    found = build(ModelConfig(checkpoint=str(tmp_path)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(found), logits(theirs))
    assert torch.equal(logits(found), logits(model))
    assert not any(p.is_meta for p in [*found.parameters(), *found.buffers()])


def test_tied_embeddings(tmp_path: Path) -> None:
    config = ModelConfig(overrides={**SHAPE, "tie_word_embeddings": True})
    model = build(config)
    model.save_pretrained(tmp_path)
    found = build(ModelConfig(checkpoint=str(tmp_path)))
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert torch.equal(logits(found), logits(model))


def test_several_files_with_an_index(tmp_path: Path) -> None:
    model = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(build(ModelConfig(checkpoint=str(tmp_path)))), logits(model))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"hiden_size": 3}, "model.overrides.hiden_size: no such field of Qwen3MoeConfig"),
        ({"hidden_size": "wide"}, "model.overrides"),
    ],
)
def test_bad_overrides(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config(ModelConfig(overrides=overrides))


def test_bad_checkpoints_name_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*no directory with a config.json"):
        build(ModelConfig(checkpoint=str(tmp_path / "nowhere")))
    saved(tmp_path)
    whole = tmp_path / "model.safetensors"
    good = shutil.copy(whole, tmp_path / "good")

    whole.write_bytes(Path(good).read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be read"):
        build(ModelConfig(checkpoint=str(tmp_path)))
    tensors = load_file(good)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, whole)
    with pytest.raises(ConfigError, match=f"holds no tensor '{name}'"):
        build(ModelConfig(checkpoint=str(tmp_path)))
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, whole)
    with pytest.raises(ConfigError, match=r"holds no tensor 'model.norm.weight'"):
        build(ModelConfig(checkpoint=str(tmp_path)))
    shutil.copy(good, whole)
    with pytest.raises(ConfigError, match="has shape"):
        build(ModelConfig(checkpoint=str(tmp_path), overrides={"vocab_size": 300}))
    whole.unlink()
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor"):
        build(ModelConfig(checkpoint=str(tmp_path)))


def test_no_such_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.config=.*no transformers configuration"):
        build(ModelConfig(config=str(tmp_path)))


def slices(config: ModelConfig) -> dict[str, Any]:
    model = build(config, group=dist.group.WORLD)
    return {name: (p.detach(), getattr(p, "lrmoe_expert", None)) for name, p in model.named_parameters()}


@pytest.mark.distributed
@pytest.mark.parametrize("source", ["preset", "checkpoint", "fused"])
def test_each_rank_holds_its_slice(pool2: Pool, tmp_path: Path, source: str) -> None:
    whole = dict(saved(tmp_path).named_parameters())
    if source == "fused":
        fuse(tmp_path)
    config = ModelConfig(overrides=SHAPE) if source == "preset" else ModelConfig(checkpoint=str(tmp_path))
    ranks = pool2.run(slices, config)
    for name, parameter in whole.items():
        parts = [rank[name][0] for rank in ranks]
        if ".mlp.experts." in name:
            assert [rank[name][1] for rank in ranks] == [(0, 4), (2, 4)]
            assert torch.equal(torch.cat(parts), parameter)
        else:
            assert all(torch.equal(part, parameter) for part in parts)
