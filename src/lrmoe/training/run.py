"""A whole training run in its folder: what `lrmoe train` does on each rank."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lrmoe.checkpoint import gathered
from lrmoe.errors import require_extra
from lrmoe.telemetry.figures import environment
from lrmoe.telemetry.layers import layer_histograms
from lrmoe.telemetry.live import Reporter, TensorBoard, WandB
from lrmoe.training.config import TrainConfig
from lrmoe.training.folder import SUMMARY, check_free, claim
from lrmoe.training.loop import Trainer
from lrmoe.training.metrics import MetricsWriter, Progress
from lrmoe.training.process import Process, joined
from lrmoe.training.state import checkpoint_root
from lrmoe.training.traces import TraceLog, about_model, wanted

log = logging.getLogger(__name__)


def run_rank(
    config: dict[str, Any], resume: bool, show_progress: bool, overwrite: bool = False
) -> dict[str, Any]:
    """Train on this rank, in whatever group torchrun or the launcher has put it; returns the summary.

    Args:
        config: nested tables of TrainConfig.
        resume: go on from the newest usable checkpoint of the run's folder.
        show_progress: a bar or log lines on rank 0.
        overwrite: replace an earlier run of the same name.
    """
    settings = TrainConfig.from_dict(config)
    with joined(settings.train.device) as process:
        if process.is_main and show_progress:
            logging.basicConfig(level=logging.INFO, format="%(message)s")
        return train(settings, process, resume=resume, show_progress=show_progress, overwrite=overwrite)


def train(
    config: TrainConfig,
    process: Process,
    *,
    resume: bool = False,
    show_progress: bool = True,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Train to `config.train.steps`; writes config.toml, metrics.jsonl, trace.parquet, summary.json and checkpoints.

    Nothing is written before model, text and, when resuming, the checkpoint have been loaded.

    Raises:
        ConfigError: something does not fit, or the folder holds an earlier run and neither `resume` nor `overwrite` is
            set; checkpoints are never overwritten.
        CheckpointError: nothing usable to resume from.
        MissingExtraError: train.wandb is set and wandb is not installed.
    """
    if config.train.wandb is not None:
        _on_main(process, lambda: require_extra("wandb", "wandb"))
    if not resume:
        _on_main(process, lambda: check_free(config, overwrite=overwrite))
    trainer = Trainer(config, process.group, device=process.device)
    start = trainer.resume() if resume else 0
    _on_main(process, lambda: claim(config, config.write, fresh=not resume))
    reporters: list[Reporter] = []
    _on_main(process, lambda: reporters.extend(_reporters(config, start if resume else None)))
    with trainer.saving():
        if process.is_main:
            with (
                MetricsWriter(config.folder, start if resume else None, reporters) as writer,
                Progress(
                    config.train.steps, start=start, every=config.train.log_every, enabled=show_progress
                ) as progress,
                _trace(trainer, start if resume else None) as trace,
            ):
                _loop(trainer, writer, progress, trace)
        else:
            _loop(trainer, None, None, None)
    summary = _summary(trainer)
    if process.is_main:
        (config.folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _on_main(process: Process, action: Callable[[], object]) -> None:
    """Do something on rank 0; its error is everybody's."""

    def act() -> None:
        if process.is_main:
            action()

    gathered(process.group, act)


def _reporters(config: TrainConfig, resume_step: int | None) -> list[Reporter]:
    """TensorBoard where it is installed, Weights & Biases where a project is named."""
    found: list[Reporter] = []
    if importlib.util.find_spec("tensorboard") is not None:
        found.append(TensorBoard(config.folder / "tensorboard", resume_step))
    if config.train.wandb is not None:
        found.append(
            WandB(
                config.train.wandb,
                name=config.train.name,
                config=config.to_dict(),
                folder=config.folder,
                resume=resume_step is not None,
            )
        )
    return found


def _trace(trainer: Trainer, resume_step: int | None) -> AbstractContextManager[TraceLog | None]:
    if not wanted(trainer.config.train.trace):
        return nullcontext()
    about = about_model(trainer.model.config)
    return TraceLog(trainer.config.folder, about=about, resume_step=resume_step)


def _loop(
    trainer: Trainer,
    writer: MetricsWriter | None,
    progress: Progress | None,
    trace: TraceLog | None,
) -> None:
    train = trainer.config.train
    while trainer.steps_done < train.steps:
        metrics = trainer.step()
        line = metrics.as_dict() if writer is not None else {}
        done = trainer.steps_done
        evaluated = train.eval_every and (done % train.eval_every == 0 or done == train.steps)
        if evaluated:
            line["eval_loss"] = trainer.evaluate()
            trainer.totals.evaluated(done, line["eval_loss"])
        if writer is not None:
            drawn = done % train.log_every == 0 or done in (1, train.steps)
            writer.write(done, line, layer_histograms(metrics.records_by_rank) if drawn else {})
        if progress is not None:
            progress.update(metrics)
            if evaluated:
                progress.evaluated(done, line["eval_loss"])
        if trace is not None:
            trace.add(metrics.records)
        if train.checkpoint_every and (done % train.checkpoint_every == 0 or done == train.steps):
            trainer.save()


def _summary(trainer: Trainer) -> dict[str, Any]:
    config = trainer.config
    return {
        "name": config.train.name,
        "folder": str(config.folder),
        "world_size": trainer.world_size,
        "steps": trainer.steps_done,
        "steps_skipped": trainer.steps_skipped,
        **trainer.totals.summary(),
        "checkpoints": [str(path) for path in sorted(checkpoint_root(trainer).glob("step-*"))],
        "context": environment(),
    }
