"""Saving and going on: bitwise at the same number of ranks, in float64 to rounding at another."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.checkpoint import find_steps
from lrmoe.checkpoint.manifest import describe
from lrmoe.errors import CheckpointError, ConfigError
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from lrmoe.training.model import build_model
from lrmoe.training.resume import ranks_saved
from lrmoe.training.state import checkpoint_root
from tests.distributed.pool import Pool
from tests.training.tiny import CPU, float64_model, local_state, tiny_config, whole_state


def interrupted(config: TrainConfig, group: Any) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """States after 4 steps without and with a stop after 2, and the losses after the stop in both."""
    through = Trainer(config, group)
    losses = [through.step().loss for _ in range(4)]
    before = Trainer(config, group)
    for _ in range(2):
        before.step()
    before.save()
    after = Trainer(config, group)
    assert after.resume() == 2
    again = [after.step().loss for _ in range(2)]
    assert through.handle.state_dict() == after.handle.state_dict()
    assert through.optimizer.updates == after.optimizer.updates
    return local_state(through), local_state(after), [*losses[2:], *again]


def moments(trainer: Trainer) -> list[torch.Tensor]:
    return [tensor.clone() for _, _, tensor in trainer.optimizer.moments()]


def interrupted_ranks(config: TrainConfig) -> bool:
    through, after, losses = interrupted(config, dist.group.WORLD)
    return same_bits(through, after) and losses[:2] == losses[2:]


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name][0], b[name][0]) for name in a)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_alone_is_bitwise(tmp_path: Path, dtype: str) -> None:
    through, after, losses = interrupted(tiny_config(tmp_path, train={"dtype": dtype}), None)
    assert same_bits(through, after)
    assert losses[:2] == losses[2:]


def partly_frozen(config: TrainConfig, group: Any, factor: float) -> Trainer:
    """A trainer whose embedding and first projections of experts are not trained, and are multiplied by a factor."""
    model = build_model(config.model, seed=config.train.seed, device=CPU, group=group)
    for name, parameter in model.named_parameters():
        if "gate_up_proj" in name or "embed" in name:
            parameter.requires_grad_(False).mul_(factor)
    return Trainer(config, group, model=model)


def frozen_differences(config: TrainConfig, group: Any) -> list[str]:
    """Parameters that a run which goes on from other frozen weights does not get back; why it would be wrong."""
    through = partly_frozen(config, group, 2.0)
    through.step()
    through.save()
    after = partly_frozen(config, group, 0.0)
    after.resume()
    losses = [trainer.step().loss for trainer in (through, after)]
    pairs = zip(through.model.named_parameters(), after.model.parameters(), strict=True)
    unlike = [name for (name, one), other in pairs if not torch.equal(one, other)]
    return unlike + ([] if losses[0] == losses[1] else [f"losses {losses}"])


def frozen_on_ranks(config: TrainConfig) -> list[str]:
    return frozen_differences(config, dist.group.WORLD)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_come_back_too(tmp_path: Path, dtype: str) -> None:
    assert frozen_differences(tiny_config(tmp_path, train={"dtype": dtype}), None) == []


@pytest.mark.distributed
def test_frozen_weights_come_back_on_two_ranks(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(frozen_on_ranks, tiny_config(tmp_path)) == [[], []]


@pytest.mark.distributed
def test_resuming_on_two_ranks_is_bitwise(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(interrupted_ranks, tiny_config(tmp_path)) == [True, True]


def train_and_save(config: TrainConfig) -> dict[str, Any]:
    trainer = Trainer(config, dist.group.WORLD, model=float64_model(config, dist.group.WORLD))
    for _ in range(2):
        trainer.step()
    trainer.save()
    trainer.step()
    return local_state(trainer)


def resume_and_train(config: TrainConfig, group: Any) -> dict[str, Any]:
    trainer = Trainer(config, group, model=float64_model(config, group))
    assert trainer.resume() == 2
    trainer.step()
    return local_state(trainer)


def resume_ranks(config: TrainConfig) -> dict[str, Any]:
    return resume_and_train(config, dist.group.WORLD)


@pytest.mark.distributed
def test_two_ranks_then_one_then_two(pool2: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    two = tiny_config(tmp_path, lrmoe={"max_drop": 0.0})
    one = two.replace(train={"batch_size": 2 * two.train.batch_size})
    through = whole_state(pool2.run(train_and_save, two))
    assert ranks_saved(two) == 2
    assert ranks_saved(two.replace(train={"device": "auto"})) is None, "torchrun starts those"
    with caplog.at_level(logging.INFO):
        alone = whole_state([resume_and_train(one, None)])
    assert "resumed from step 2, saved by 2 ranks, now 1" in caplog.messages
    again = whole_state(pool2.run(resume_ranks, two))
    for name in through:
        torch.testing.assert_close(alone[name], through[name], rtol=1e-10, atol=1e-13)
        assert torch.equal(again[name], through[name])


def test_a_corrupt_checkpoint_is_passed_over(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    trainer = Trainer(config)
    for _ in range(2):
        trainer.step()
        trainer.save()
    shard = tmp_path / "run" / "checkpoints" / "step-00000002" / "dense.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert Trainer(config).resume() == 1


def test_the_checkpoint_resumed_from_stays(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"keep_last": 1})
    trainer = Trainer(config)
    trainer.step()
    trainer.save()
    again = Trainer(config)
    again.resume()
    for _ in range(2):
        again.step()
        again.save()
    assert find_steps(checkpoint_root(again)) == [1, 3]


def test_another_corpus_or_model_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    trainer = Trainer(config)
    trainer.step()
    trainer.save()
    (tmp_path / "other.txt").write_text("other text " * 300)
    with pytest.raises(ConfigError, match=r"data\.path=.*other\.txt.* has .*corpus\.txt"):
        Trainer(config.replace(data={"path": str(tmp_path / "other.txt")})).resume()
    corpus = tmp_path / "corpus.txt"
    text = corpus.read_text()
    corpus.write_text(text + "edited")
    with pytest.raises(CheckpointError, match="another corpus"):
        Trainer(config).resume()
    corpus.write_text(text)


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "routing": (
        {"num_experts_per_tok": 3},
        r"model\.num_experts_per_tok is 2 in the checkpoint and 3 in this run",
    ),
    "weights of a pair": ({"norm_topk_prob": False}, r"model\.norm_topk_prob is True .* and False"),
    "width": ({"moe_intermediate_size": 24}, r"model\.moe_intermediate_size is 16 .* and 24"),
    "depth": ({"num_hidden_layers": 3}, r"model\.num_hidden_layers is 2 .* and 3"),
    "experts": ({"num_experts": 8}, r"model\.num_local_experts is 4 .* and 8"),
}


@pytest.mark.parametrize("name", MODELS)
def test_another_model_is_refused(tmp_path: Path, name: str) -> None:
    config = tiny_config(tmp_path)
    trainer = Trainer(config)
    trainer.step()
    trainer.save()
    changes, said = MODELS[name]
    with pytest.raises(CheckpointError, match=f"step-00000001: {said}"):
        Trainer(config.replace(model={"overrides": {**config.model.overrides, **changes}})).resume()


def test_another_seed_is_refused_and_other_settings_are_not(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    trainer = Trainer(config)
    trainer.step()
    trainer.save()
    with pytest.raises(CheckpointError, match=r"train\.seed is 0 in the checkpoint and 1 in this run"):
        Trainer(config.replace(train={"seed": 1})).resume()
    changed = config.replace(train={"batch_size": 1, "dtype": "bfloat16"}, optim={"lr": 1e-4})
    assert Trainer(changed).resume() == 1


def rewrite_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change state.json, and the manifest with it."""
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    files = [entry for entry in manifest["files"] if entry["name"] != "state.json"]
    manifest["files"] = [*files, dataclasses.asdict(describe(folder / "state.json", ()))]
    (folder / "manifest.json").write_text(json.dumps(manifest))


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "empty": (lambda s: s.clear(), "steps_done=None: must be of type int"),
    "no totals": (lambda s: s.pop("totals"), "totals=None: must be of type dict"),
    "other totals": (lambda s: s["totals"].update(x=1), "totals: .*unexpected keyword argument 'x'"),
    "updates in words": (lambda s: s.update(updates="2"), "updates='2': must be of type int"),
    "too many updates": (lambda s: s.update(updates=3), "updates=3: must be 0 to 2"),
    "another step": (lambda s: s.update(steps_done=1), "steps_done=1: the manifest says 2"),
    "no corpus": (lambda s: s["corpus"].pop("sha256"), r"corpus\.sha256=None"),
    "more ranks": (
        lambda s: s["layers_by_rank"].append({}),
        "layers_by_rank of 2 ranks: the manifest says 1",
    ),
}


def two_saved(config: TrainConfig) -> Path:
    trainer = Trainer(config)
    for _ in range(2):
        trainer.step()
        trainer.save()
    return config.folder / "checkpoints" / "step-00000002"


def test_a_state_that_says_too_little_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path)
    folder = two_saved(config)
    whole = (folder / "state.json").read_text()
    trainer = Trainer(config)
    for change, said in STATES.values():
        (folder / "state.json").write_text(whole)
        rewrite_state(folder, change)
        caplog.clear()
        assert trainer.resume() == 1, said
        assert re.search(f"step-00000002 is not usable: .*state.json: {said}", caplog.text), caplog.text


def test_a_checkpoint_without_its_experts_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path)
    folder = two_saved(config)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = [entry for entry in manifest["files"] if not entry["name"].startswith("experts")]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "experts-00000-of-00001.safetensors").unlink()
    assert Trainer(config).resume() == 1
    assert "manifest.json: incomplete: lists no tensor 'model/model.layers.0.mlp.experts" in caplog.text


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        Trainer(tiny_config(tmp_path)).resume()
