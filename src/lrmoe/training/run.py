"""A whole training run in its folder: what `lrmoe train` does on each rank."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from lrmoe.checkpoint import find_steps, gathered
from lrmoe.errors import ConfigError
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from lrmoe.training.metrics import MetricsWriter, Progress, StepMetrics
from lrmoe.training.process import Process, joined
from lrmoe.training.state import checkpoint_root

log = logging.getLogger(__name__)


def run_rank(config: dict[str, Any], resume: bool, show_progress: bool) -> dict[str, Any]:
    """Train on this rank, in whatever group torchrun or the launcher has put it; returns the summary.

    Args:
        config: nested tables of TrainConfig.
        resume: go on from the newest usable checkpoint of the run's folder.
        show_progress: a bar or log lines on rank 0.
    """
    settings = TrainConfig.from_dict(config)
    with joined(settings.train.device) as process:
        if process.is_main and show_progress:
            logging.basicConfig(level=logging.INFO, format="%(message)s")
        return train(settings, process, resume=resume, show_progress=show_progress)


def train(
    config: TrainConfig, process: Process, *, resume: bool = False, show_progress: bool = True
) -> dict[str, Any]:
    """Train to `config.train.steps` and leave config.toml, metrics.jsonl, summary.json and checkpoints behind.

    Raises:
        ConfigError: something does not fit, or the folder holds checkpoints and `resume` is not set.
        CheckpointError: nothing usable to resume from.
    """
    gathered(process.group, lambda: _claim(config, resume) if process.is_main else None)
    trainer = Trainer(config, process.group, device=process.device)
    start = trainer.resume() if resume else 0
    begin = time.perf_counter()
    if process.is_main:
        with (
            MetricsWriter(config.folder, start if resume else None) as writer,
            Progress(
                config.train.steps, start=start, every=config.train.log_every, enabled=show_progress
            ) as progress,
        ):
            last = _loop(trainer, writer, progress)
    else:
        last = _loop(trainer, None, None)
    summary = _summary(trainer, last, time.perf_counter() - begin)
    if process.is_main:
        (config.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _claim(config: TrainConfig, resume: bool) -> None:
    folder: Path = config.folder
    if not resume and find_steps(folder / "checkpoints"):
        raise ConfigError(
            f"train.name={config.train.name!r}: {folder} holds checkpoints of an earlier run; pass --resume, choose "
            "another --name, or remove it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.write(folder / "config.toml")
    except OSError as error:
        raise ConfigError(f"train.runs={config.train.runs!r}: cannot write to {folder}: {error}") from error


def _loop(trainer: Trainer, writer: MetricsWriter | None, progress: Progress | None) -> StepMetrics | None:
    train = trainer.config.train
    metrics = None
    while trainer.steps_done < train.steps:
        metrics = trainer.step()
        line = metrics.as_dict() if writer is not None else {}
        done = trainer.steps_done
        if train.eval_every and (done % train.eval_every == 0 or done == train.steps):
            line["eval_loss"] = trainer.evaluate()
        if writer is not None:
            writer.write(done, line)
        if progress is not None:
            progress.update(metrics)
        if train.checkpoint_every and (done % train.checkpoint_every == 0 or done == train.steps):
            trainer.save()
    return metrics


def _summary(trainer: Trainer, last: StepMetrics | None, seconds: float) -> dict[str, Any]:
    config = trainer.config
    return {
        "name": config.train.name,
        "folder": str(config.folder),
        "world_size": trainer.world_size,
        "steps": trainer.steps_done,
        "steps_skipped": trainer.steps_skipped,
        "final_loss": None if last is None else last.loss,
        "kept_share": None if last is None else last.kept_share,
        "seconds": round(seconds, 3),
        "checkpoints": [str(path) for path in sorted(checkpoint_root(trainer).glob("step-*"))],
    }
