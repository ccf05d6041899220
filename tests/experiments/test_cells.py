"""What a comparison of several cells is made of: options, layers of tables, regimes, models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lrmoe.errors import ConfigError
from lrmoe.experiments.compare import starting
from lrmoe.experiments.compare.cells import Cell, cells_of, named_model
from lrmoe.experiments.compare.command import compare, tables_of
from lrmoe.experiments.compare.config import Experiment
from lrmoe.experiments.compare.presets import PRESETS
from lrmoe.experiments.compare.starting import started
from lrmoe.experiments.lists import numbers
from lrmoe.experiments.systems.registry import get_system
from lrmoe.experiments.trajectories.regimes import REGIMES
from lrmoe.training.config import ModelConfig, TrainConfig


def experiment(preset: str = "demo", *overrides: str, config: Path | None = None, **given: Any) -> Experiment:
    return Experiment.from_dict(preset, tables_of(preset, config, overrides, given))


def cells(*overrides: str, **given: Any) -> list[Cell]:
    return cells_of(experiment("demo", *overrides, **given))


def test_one_cell_is_the_run_itself() -> None:
    for given in ({}, {"seeds": [7]}, {"models": ["glm4-moe-tiny"], "aux": [0.001]}, {"targets": [3.0, 2.5]}):
        [cell] = cells(**given)
        assert cell.experiment.folder == Path("runs/train")
        assert (cell.experiment.compare.seeds, cell.experiment.compare.models) == ((), ())
    [cell] = cells(models=["glm4-moe-tiny"], aux=[0.001], seeds=[7])
    train = cell.experiment.train
    assert (train.model.preset, train.train.router_aux_loss) == ("glm4-moe-tiny", 0.001)
    assert train.train.seed == train.lrmoe.seed == 7
    assert train.model.overrides == {"moe_intermediate_size": 512}, "the configuration's, for every model"


def test_cells_are_every_model_and_auxiliary_loss_with_all_seeds_each_in_its_folder() -> None:
    found = cells(models=["qwen3-moe-tiny", "glm4-moe-tiny"], aux=[0, 0.001], seeds=[2, 0])
    assert [cell.name for cell in found] == [
        f"{model}-configured-aux{aux}-seed{seed}"
        for model in ("qwen3-moe-tiny", "glm4-moe-tiny")
        for aux in ("0", "0.001")
        for seed in (2, 0)
    ]
    for cell in found:
        assert cell.experiment.folder == Path("runs/train/cells") / cell.name
        again = Experiment.from_dict("demo", cell.experiment.to_dict())
        assert again.train == cell.experiment.train, "its config.toml is the whole of it"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("glm4-moe-tiny", {"preset": "glm4-moe-tiny"}),
        ("Qwen/Qwen3-30B-A3B", {"config": "Qwen/Qwen3-30B-A3B"}),
        ("weights", {"checkpoint": "weights"}),
        ("shape", {"config": "shape"}),
    ],
)
def test_a_model_is_a_preset_a_directory_or_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in (("weights", "model.safetensors"), ("shape", "config.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
    base = ModelConfig(overrides={"hidden_size": 64})
    assert named_model(name, base) == ModelConfig(**expected, overrides={"hidden_size": 64})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"models": ["qwen3-moe-tin"]},
            r"did you mean 'qwen3-moe-tiny'.*valid: qwen3-moe-tiny, glm4-moe-tiny",
        ),
        ({"models": ["a/same", "b/same"]}, "each model, and each last part of a name, once"),
        ({"seeds": [1, 1]}, r"compare\.seeds=\[1, 1\]: each once"),
        ({"seeds": [-1]}, r"compare\.seeds=\[-1\]: must be a list of integers >= 0"),
        ({"targets": [0.0]}, r"compare\.targets=\[0\.0\]: must be a list of finite numbers > 0"),
        ({"aux": [-0.1]}, r"compare\.aux=\[-0\.1\]: must be a list of finite numbers >= 0"),
        ({"regime": "memorize"}, r"regime='memorize': no such regime \(did you mean 'memorise'\?\)"),
        ({"against": "symi"}, r"compare\.against='symi': must be one of the systems: megatron, lrmoe"),
        ({"targets": [2.0], "target_loss": 2.0}, "--target-loss and --targets given"),
        ({"seeds": [2], "seed": 2}, "--seed and --seeds given"),
        ({"overrides": ["compare.seeds=3"]}, r"compare\.seeds=3: must be a list"),
        (
            {"overrides": ["lrmoe.policy=symi"]},
            r"lrmoe\.policy='symi': every system of a comparison has its own",
        ),
        ({"overrides": ["lrmoe.storage=sharded"]}, r"lrmoe\.storage='sharded': every system"),
        (
            {"overrides": ["comapre.ep=2"]},
            r"comapre: no such table \(did you mean 'compare'\?\); valid: compare, model",
        ),
    ],
)
def test_bad_usage_is_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(**options)


def test_numbers_of_an_option() -> None:
    assert numbers("seeds", " 0, 2,", int) == [0, 2]
    with pytest.raises(ConfigError, match=r"--seeds '0,x': must be integers, separated by commas"):
        numbers("seeds", "0,x", int)
    with pytest.raises(ConfigError, match=r"--targets ',': must be numbers, separated by commas"):
        numbers("targets", ",", float)


def test_a_later_target_replaces_an_earlier_one_of_the_other_key(tmp_path: Path) -> None:
    assert experiment().compare.aims == (2.3,)
    assert experiment(targets=[2.5, 3.0]).compare.aims == (3.0, 2.5)
    file = tmp_path / "run.toml"
    file.write_text("[compare]\ntargets = [4.0, 3.5]\n")
    assert experiment(config=file).compare.aims == (4.0, 3.5)
    assert experiment("demo", "compare.target_loss=3", config=file).compare.aims == (3.0,)
    assert experiment("demo", "compare.targets=[1.5]").compare.aims == (1.5,)
    file.write_text("[compare]\ntargets = [4.0]\ntarget_loss = 4.0\n")
    with pytest.raises(ConfigError, match=r"compare\.target_loss and compare\.targets given"):
        experiment(config=file)


def test_a_regime_lies_between_the_preset_and_what_a_user_says() -> None:
    found = experiment("demo", regime="memorise")
    tables = REGIMES["memorise"].tables
    assert found.compare.aims == (0.05,)
    assert found.compare.max_steps == found.train.train.steps == tables["train"]["steps"]
    assert found.train.train.batch_size == 4, "8 sequences over 2 ranks"
    assert (found.train.data.limit, found.train.optim.lr) == (8192, tables["optim"]["lr"])
    assert found.train.lrmoe.warmup_steps == 0
    assert found.train.model.overrides == {"moe_intermediate_size": 512}, "the preset's, which no regime sets"
    own = experiment("demo", "optim.lr=0.5", regime="memorise", target_loss=0.1, ep=8)
    assert (own.compare.aims, own.train.optim.lr, own.train.train.batch_size) == ((0.1,), 0.5, 1)
    assert experiment("demo", regime="continued").compare.aims == (), (
        "the preset's target is not the regime's"
    )


def test_a_resolved_file_says_the_same_again(tmp_path: Path) -> None:
    first = experiment("demo", "optim.lr=0.5", regime="memorise", seeds=[0, 1], targets=[0.1, 0.05])
    first.write(tmp_path / "config.toml")
    assert experiment(config=tmp_path / "config.toml") == first


@pytest.mark.parametrize("regime", ["continued", "memorise"])
def test_a_regime_starts_from_the_checkpoint_that_all_regimes_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, regime: str
) -> None:
    asked: list[tuple[TrainConfig, Path]] = []
    start = ModelConfig(checkpoint="somewhere")

    def start_model(base: TrainConfig, cache: Path, progress: Any) -> ModelConfig:
        asked.append((base, cache))
        for step in range(1, 251):
            progress(step, 800)
        return start

    monkeypatch.setattr(starting, "start_model", start_model)
    said: list[str] = []
    found = started(experiment("small", regime=regime, aux=[0.001]), tmp_path, said.append)
    assert [line.rpartition(": ")[2] for line in said] == [f"step {step} of 800" for step in (1, 100, 200)]
    [(base, cache)] = asked
    assert cache == tmp_path
    assert (base.data.limit, base.train.skip_positions) == (None, 0), "not of the regime's small text"
    assert base.optim.beta2 == 0.95
    assert base.model.overrides == PRESETS["small"]["model"]["overrides"]
    assert found.train_config(get_system("lrmoe")).model == start
    assert found.to_dict()["model"]["preset"] == "qwen3-moe-tiny", "the file names the model, not the cache"


def test_without_a_regime_or_from_scratch_nothing_is_trained_before(tmp_path: Path) -> None:
    for found in (experiment("demo"), experiment("demo", regime="scratch")):
        assert started(found, tmp_path, print).start is None
    assert not list(tmp_path.iterdir())


def test_the_published_preset_is_twelve_cells_of_the_published_systems() -> None:
    found = cells_of(experiment("published"))
    assert len(found) == 12
    assert {cell.regime for cell in found} == {"memorise"}
    assert {cell.experiment.compare.base for cell in found} == {"symi"}
    assert all(cell.experiment.train.train.batch_size == 1 for cell in found)
