"""A whole training run in its folder: what `lrmoe train` does on each rank."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from lrmoe.checkpoint import gathered
from lrmoe.distributed.peers import telling
from lrmoe.errors import ConfigError, require_extra
from lrmoe.telemetry.figures import environment
from lrmoe.telemetry.layers import layer_histograms
from lrmoe.telemetry.live import Reporter, TensorBoard, WandB
from lrmoe.training.config import TrainConfig
from lrmoe.training.folder import SUMMARY, check_free, claim, hold
from lrmoe.training.loop import Trainer
from lrmoe.training.metrics import MetricsWriter, Progress
from lrmoe.training.process import Process, joined
from lrmoe.training.state import checkpoint_root
from lrmoe.training.stop import StopRequest, stop_on_sigterm
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
    settings, request = TrainConfig.from_dict(config), StopRequest()
    with (
        stop_on_sigterm(request, settings.train.checkpoint_every > 0),
        joined(settings.train.device, timeout_s=settings.train.timeout_s) as process,
        telling(),
    ):
        if process.is_main and show_progress:
            logging.basicConfig(level=logging.INFO, format="%(message)s")
        return train(
            settings,
            process,
            resume=resume,
            show_progress=show_progress,
            overwrite=overwrite,
            stop_asked=lambda: request.asked,
        )


def train(
    config: TrainConfig,
    process: Process,
    *,
    resume: bool = False,
    show_progress: bool = True,
    overwrite: bool = False,
    stop_asked: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train to `config.train.steps`; writes config.toml, metrics.jsonl, trace.parquet, summary.json and checkpoints.

    Nothing is written before model, text and, when resuming, the checkpoint have been loaded.

    Args:
        stop_asked: asked once a step; when true on any rank, all save after that step and return.

    Raises:
        ConfigError: something does not fit, another process trains in the folder, or it holds an earlier run and
            neither `resume` nor `overwrite` is set; checkpoints are never overwritten.
        CheckpointError: nothing usable to resume from.
        RankError: some rank was lost, failed, or did not come in time. Nothing is saved then.
        MissingExtraError: train.wandb is set and wandb is not installed.
    """
    if config.train.wandb is not None:
        _on_main(process, lambda: require_extra("wandb", "wandb"))
    _agree_to_resume(config, process, resume)
    with ExitStack() as held:
        if resume:  # before the newest checkpoint is looked for: another run may be about to write it
            _on_main(process, lambda: hold(config, held))
        else:
            _on_main(process, lambda: check_free(config, overwrite=overwrite))
        trainer = Trainer(config, process.group, device=process.device)
        trainer.stop_asked = stop_asked
        start = trainer.resume() if resume else None
        _check_steps(config, start)
        if not resume:
            _on_main(process, lambda: hold(config, held))
        _on_main(process, lambda: claim(config, config.write, fresh=not resume))
        return _run(trainer, process, start, show_progress)


def _run(trainer: Trainer, process: Process, start: int | None, show_progress: bool) -> dict[str, Any]:
    """Train in a folder that is this run's; `start` is the step that it was resumed from."""
    config = trainer.config
    reporters: list[Reporter] = []
    _on_main(process, lambda: reporters.extend(_reporters(config, start)))
    with trainer.saving():
        if process.is_main:
            with (
                MetricsWriter(config.folder, start, reporters) as writer,
                Progress(
                    config.train.steps, start=start or 0, every=config.train.log_every, enabled=show_progress
                ) as progress,
                _trace(trainer, start) as trace,
            ):
                _loop(trainer, writer, progress, trace)
        else:
            _loop(trainer, None, None, None)
    summary = _summary(trainer)
    if process.is_main:
        if not summary["finished"]:
            log.info("stopped at step %d of %d; --resume goes on", trainer.steps_done, config.train.steps)
        if trainer.steps_skipped:
            log.warning(
                "%d of %d steps were skipped: a gradient was not finite on some rank; lrmoe train --checked names the "
                "first such number",
                trainer.steps_skipped,
                trainer.steps_done,
            )
        (config.folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _check_steps(config: TrainConfig, start: int | None) -> None:
    if start is not None and start > config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps}: the run's checkpoint has done {start}; must be at least that to go on"
        )


def _agree_to_resume(config: TrainConfig, process: Process, resume: bool) -> None:
    """Each rank may have looked for itself whether there is something to resume."""
    found = gathered(process.group, lambda: resume)
    if len(set(found)) > 1:
        seeing = ", ".join(str(rank) for rank, one in enumerate(found) if one)
        raise ConfigError(
            f"train.runs={config.train.runs!r}: only rank {seeing} of {len(found)} ranks sees checkpoints in "
            f"{config.folder}; all ranks must share the file system"
        )


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
    while trainer.steps_done < train.steps and not trainer.stopping:
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
        last = done == train.steps or trainer.stopping
        if train.checkpoint_every and (done % train.checkpoint_every == 0 or last):
            trainer.save()


def _summary(trainer: Trainer) -> dict[str, Any]:
    config = trainer.config
    return {
        "name": config.train.name,
        "folder": str(config.folder),
        "world_size": trainer.world_size,
        "steps": trainer.steps_done,
        "finished": trainer.steps_done >= config.train.steps,
        "steps_skipped": trainer.steps_skipped,
        **trainer.totals.summary(),
        "checkpoints": [str(path) for path in sorted(checkpoint_root(trainer).glob("step-*"))],
        "context": environment(),
    }
