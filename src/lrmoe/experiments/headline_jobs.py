"""What workers do for the headline: start checkpoints, and trajectories from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from lrmoe.config import LRMoEConfig
from lrmoe.experiments.regimes import CACHE, get_regime, regime_config, start_is_made, start_model
from lrmoe.experiments.stage_lanes import SETTING, system_config
from lrmoe.experiments.stage_lines import STASH
from lrmoe.experiments.systems import get_system
from lrmoe.experiments.trajectory import TrajectoryJob, run_trajectory
from lrmoe.experiments.virtual import ExecutionSize
from lrmoe.training.config import TrainConfig

EXACT = "exact"  # the trajectory that exact systems share


def base_config(model: str, aux: float, system: str, seed: int) -> TrainConfig:
    """Model, auxiliary loss and what a system's backward leaves out; the rest is the regime's.

    One process has room for a stash, whatever the stage does: quotas and gradients do not depend on it.
    """
    if system == EXACT:
        config = LRMoEConfig(**SETTING, activations=STASH, seed=seed, max_drop=0.0)
    else:
        config = system_config(get_system(system), seed, STASH)
    tables = {"model": {"preset": model}, "train": {"router_aux_loss": aux}}
    return dataclasses.replace(TrainConfig.from_dict(tables), lrmoe=config)


def start(model: str, aux: float, report: Callable[[int], None], cache: Path = CACHE) -> None:
    """Train and keep the start checkpoint, unless it is there."""
    start_model(base_config(model, aux, EXACT, 0), cache, lambda step, _: report(step))


def trajectory_job(
    model: str,
    aux: float,
    system: str,
    seed: int,
    regime: str,
    folder: Path,
    steps: int | None,
    size: ExecutionSize,
) -> TrajectoryJob:
    """A trajectory of a system, or of EXACT; its start checkpoint is made if it is not there.

    Args:
        folder: where it goes. steps: instead of the regime's. size: of the layers in execution.
    """
    config = regime_config(base_config(model, aux, system, seed), regime, seed)
    if steps is not None:
        config = config.replace(train={"steps": steps})
    return TrajectoryJob(config=config, folder=folder, size=size)


def is_finished(
    model: str,
    aux: float,
    system: str,
    seed: int,
    regime: str,
    folder: Path,
    steps: int | None,
    size: ExecutionSize,
) -> bool:
    """Whether this very trajectory is there, complete; trains nothing."""
    base = base_config(model, aux, EXACT, 0)
    if not folder.exists() or (get_regime(regime).continues and not start_is_made(base, CACHE)):
        return False
    return trajectory_job(model, aux, system, seed, regime, folder, steps, size).finished


def train(
    model: str,
    aux: float,
    system: str,
    seed: int,
    regime: str,
    folder: Path,
    steps: int | None,
    size: ExecutionSize,
    report: Callable[[int], None],
) -> None:
    """Run one trajectory."""
    run_trajectory(trajectory_job(model, aux, system, seed, regime, folder, steps, size), report)
