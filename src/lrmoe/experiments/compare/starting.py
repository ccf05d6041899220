"""Regimes in a comparison: the tables that one sets, and the model that its training starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lrmoe.experiments.compare.config import CompareConfig, Experiment
from lrmoe.experiments.trajectories.regimes import Regime, get_regime, start_model
from lrmoe.training.config import TrainConfig

_SAY_STEPS = 100


def regime_tables(name: str, values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What a regime sets of a comparison; its batch is shared out over the ranks.

    Args:
        values: the tables of the comparison without it: who says how many ranks there are.

    Raises:
        ConfigError: no such regime.
    """
    regime = get_regime(name)
    tables = {table: dict(fields) for table, fields in regime.tables.items()}
    ranks = values.get("compare", {}).get("ep", CompareConfig().ep)
    if isinstance(ranks, int) and ranks > 0:
        tables["train"]["batch_size"] = max(1, round(tables["train"]["batch_size"] / ranks))
    tables["compare"] = {"max_steps": tables["train"]["steps"], "target_loss": regime.target_loss}
    return tables


def started(experiment: Experiment, cache: Path, say: Callable[[str], None]) -> Experiment:
    """The experiment with the model that its regime starts from; a checkpoint is trained if there is none yet.

    Args:
        cache: folder of start checkpoints.
        say: told of the steps of one in the making.
    """
    name = experiment.compare.regime
    if name is None or not get_regime(name).continues:
        return experiment

    def progress(step: int, steps: int) -> None:
        if step == 1 or step % _SAY_STEPS == 0:
            say(f"start checkpoint, trained once and kept in {cache}: step {step} of {steps}")

    base = _without(get_regime(name), experiment.train)
    return dataclasses.replace(experiment, start=start_model(base, cache, progress))


def _without(regime: Regime, train: TrainConfig) -> TrainConfig:
    """The run with defaults where the regime has set something: all regimes start from the same checkpoint."""
    default = TrainConfig()
    return train.replace(
        **{
            table: {name: getattr(getattr(default, table), name) for name in fields}
            for table, fields in regime.tables.items()
        }
    )
