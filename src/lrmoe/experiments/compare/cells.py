"""The cells of a comparison of several seeds, models or auxiliary losses: each an ordinary comparison.

runs/<name>/            of the whole, with rows.csv
    cells/<model>-<regime>-aux<a>-seed<s>/     of one cell
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError
from lrmoe.experiments.compare.config import Experiment
from lrmoe.training.config import ModelConfig, TrainConfig
from lrmoe.training.presets import PRESETS, get_preset

CELLS, ROWS = "cells", "rows.csv"
CONFIGURED = "configured"  # the regime of a comparison that names none


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison of several.

    Attributes:
        model: a preset's name, or the last part of a Hub name or directory. regime: its name, or CONFIGURED.
        aux: coefficient of the router's auxiliary loss. seed: of weights, data and selection.
        experiment: what runs, in a folder of its own.
    """

    model: str
    regime: str
    aux: float
    seed: int
    experiment: Experiment

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"{_file_name(self.model)}-{self.regime}-aux{self.aux:g}-seed{self.seed}"

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from the others, as in rows of summary.json."""
        return {"model": self.model, "regime": self.regime, "aux": self.aux, "seed": self.seed}


def cells_of(experiment: Experiment) -> list[Cell]:
    """The cells of a comparison: for each model and auxiliary loss every seed. One cell keeps the run's own folder.

    Raises:
        ConfigError: a model that cannot be one, or two of the same name.
    """
    found = list(_cells(experiment))
    if len(found) == 1:
        return found
    names = [cell.name for cell in found]
    if len(set(names)) != len(names):
        raise ConfigError(
            f"compare.models={list(experiment.compare.models)!r}: each model, and each last part of a name, once"
        )
    folder = experiment.folder / CELLS
    return [_placed(cell, folder) for cell in found]


def _cells(experiment: Experiment) -> Iterator[Cell]:
    c, train = experiment.compare, experiment.train
    for model in [named_model(name, train.model) for name in c.models] or [train.model]:
        for aux in c.aux or (float(train.train.router_aux_loss),):
            for seed in c.seeds or (None,):
                own = _train(train, model, aux, seed)
                compare = dataclasses.replace(c, seeds=(), models=(), aux=())
                yield Cell(
                    model=label(model),
                    regime=c.regime or CONFIGURED,
                    aux=aux,
                    seed=own.train.seed,
                    experiment=dataclasses.replace(experiment, compare=compare, train=own),
                )


def _train(train: TrainConfig, model: ModelConfig, aux: float, seed: int | None) -> TrainConfig:
    changed = train.replace(train={"router_aux_loss": aux})
    if seed is not None:
        changed = changed.replace(train={"seed": seed}, lrmoe={"seed": seed})
    return dataclasses.replace(changed, model=model)


def _placed(cell: Cell, folder: Path) -> Cell:
    train = cell.experiment.train.replace(train={"runs": str(folder), "name": cell.name})
    return dataclasses.replace(cell, experiment=dataclasses.replace(cell.experiment, train=train))


def named_model(name: str, base: ModelConfig) -> ModelConfig:
    """The model of a name: a preset, a directory with weights or with a configuration, or a Hub name "owner/model".

    Args:
        base: whose overrides it takes.

    Raises:
        ConfigError: none of these; names the presets.
    """
    if name in PRESETS:
        return ModelConfig(preset=name, overrides=base.overrides)
    folder = Path(name)
    if folder.is_dir():
        weights = any(folder.glob("*.safetensors"))
        return ModelConfig(**{"checkpoint" if weights else "config": name}, overrides=base.overrides)
    if "/" not in name:
        get_preset(name)  # says what is valid
    return ModelConfig(config=name, overrides=base.overrides)


def label(model: ModelConfig) -> str:
    """What a model is called in tables."""
    return model.preset or Path(str(model.config or model.checkpoint)).name


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)
