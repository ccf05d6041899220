from __future__ import annotations

from pathlib import Path

import pytest

from lrmoe.errors import ConfigError
from lrmoe.training.config import TrainConfig


def test_defaults_are_the_tiny_preset() -> None:
    config = TrainConfig()
    assert config.model.preset == "qwen3-moe-tiny"
    assert config.folder == Path("runs/train")


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    config = TrainConfig.load(
        None, ["model.overrides.hidden_size=64", "lrmoe.max_drop=0.2", "data.path='a \"b\"'", "optim.lr=1"]
    )
    config.write(tmp_path / "config.toml")
    assert TrainConfig.load(tmp_path / "config.toml") == config


def test_overrides_win_over_the_file_and_later_ones_win(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 5\nseed = 3\n")
    config = TrainConfig.load(path, ["train.steps=7", "train.steps=9", "train.dtype=bfloat16"])
    assert (config.train.steps, config.train.seed, config.train.dtype) == (9, 3, "bfloat16")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stepz=1", "did you mean 'train.steps'"),
        ("trian.steps=1", "did you mean 'train'"),
        ("lrmoe.max_dorp=0.1", "did you mean 'lrmoe.max_drop'"),
        ("train.steps=0", "train.steps=0: must be at least 1"),
        ("train.steps=true", "train.steps=True: must be of type int"),
        ("train.steps=2.5", "train.steps=2.5"),
        ("train.dtype=float8", "must be one of 'float32', 'bfloat16'"),
        ("optim.lr=nan", "optim.lr=nan"),
        ("optim.beta1=1.0", "optim.beta1=1.0: must be at least 0 and below 1"),
        ("data.held_out=-0.1", "data.held_out"),
        ("data.seq_len=1", "data.seq_len=1: must be at least 2"),
        ("lrmoe.max_drop=2", "lrmoe.max_drop=2"),
        ("lrmoe.policy=eplb", "policy='eplb' drops nothing"),
        ("model.preset=qwen3", "did you mean 'qwen3-moe-tiny'"),
        ("model.overrides=3", "model.overrides=3: must be of type dict"),
        ("train.name=a/b", "train.name='a/b'"),
        ("train=3", "must look like table.key=value"),
        ("train.steps", "must look like table.key=value"),
    ],
)
def test_bad_values_are_named(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(None, [override])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"model": {"preset": "qwen3-moe-tiny", "config": "x"}}, "one of preset, config, checkpoint"),
        ({"train": {"router_aux_loss": 0.1, "activation_checkpointing": "reentrant"}}, "router_aux_loss"),
        ({"train": {"eval_every": 5}, "data": {"held_out": 0.0}}, "data.held_out"),
        ({"train": 3}, "train=3: must be a table"),
    ],
)
def test_bad_combinations_are_named(tables: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainConfig.from_dict(tables)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no-such.toml"
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(missing)
    assert str(caught.value) == f"--config {missing}: cannot be read: No such file or directory"
    bad = tmp_path / "bad.toml"
    bad.write_text("[train\n")
    with pytest.raises(ConfigError, match=r"bad.toml.*not valid TOML"):
        TrainConfig.load(bad)


def test_overriding_into_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"steps is not a table"):
        TrainConfig.load(None, ["train.steps=1", "train.steps.more=2"])


def test_a_cooldown_ends_with_the_run_whatever_its_length(tmp_path: Path) -> None:
    config = TrainConfig.load(None, ["lrmoe.cooldown_steps=3", "train.steps=50"])
    assert config.lrmoe.total_steps == 50
    config.write(tmp_path / "config.toml")
    assert TrainConfig.load(tmp_path / "config.toml") == config
    assert TrainConfig.load(tmp_path / "config.toml", ["train.steps=80"]).lrmoe.total_steps == 80
    assert TrainConfig.load(None, ["lrmoe.cooldown_steps=3", "lrmoe.total_steps=9"]).lrmoe.total_steps == 9
    with pytest.raises(ConfigError, match=r"cooldown_steps=60: must be at most total_steps=50"):
        TrainConfig.load(None, ["lrmoe.cooldown_steps=60", "train.steps=50"])
