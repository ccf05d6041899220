"""What workers do for the headline: start checkpoints, and trajectories from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lrmoe.config import LRMoEConfig
from lrmoe.experiments.stage.lanes import SETTING, system_config
from lrmoe.experiments.stage.lines import STASH
from lrmoe.experiments.systems.registry import get_system
from lrmoe.experiments.trajectories.regimes import (
    CACHE,
    get_regime,
    regime_config,
    start_is_made,
    start_model,
)
from lrmoe.experiments.trajectories.trajectory import TrajectoryJob, run_trajectory
from lrmoe.experiments.trajectories.virtual import ExecutionSize
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


@dataclass(frozen=True, kw_only=True)
class Task:
    """One trajectory of the headline.

    Attributes:
        model, aux, seed: of training. system: whose rule it follows, or EXACT. regime: how it is trained.
        folder: where it goes. steps: instead of the regime's. size: of the layers in execution.
    """

    model: str
    aux: float
    seed: int
    system: str
    regime: str
    folder: Path
    steps: int | None
    size: ExecutionSize

    def job(self) -> TrajectoryJob:
        """What trains it; its start checkpoint is made if it is not there."""
        base = base_config(self.model, self.aux, self.system, self.seed)
        config = regime_config(base, self.regime, self.seed)
        if self.steps is not None:
            config = config.replace(train={"steps": self.steps})
        return TrajectoryJob(config=config, folder=self.folder, size=self.size)

    @property
    def finished(self) -> bool:
        """Whether this very trajectory is there, complete; trains nothing."""
        base = base_config(self.model, self.aux, EXACT, 0)
        if not self.folder.exists() or (get_regime(self.regime).continues and not start_is_made(base, CACHE)):
            return False
        return self.job().finished


def train(task: Task, report: Callable[[int], None]) -> None:
    """Run one trajectory."""
    run_trajectory(task.job(), report)
