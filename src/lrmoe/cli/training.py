"""Commands about one training run and its weights: train, export, import."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lrmoe.cli.options import AsJson, ConfigFile, Debug, Overrides, Overwrite, Ranks, RunName
from lrmoe.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from lrmoe.training.config import TrainConfig


def train(
    preset: Annotated[
        str | None, typer.Option(help="Model: qwen3-moe-tiny or -micro, glm4-moe-tiny or -micro.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    name: RunName = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    ep: Ranks = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest usable checkpoint of the run, with its own config.toml; options given here "
            "change that.",
        ),
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="--resume where the run has a checkpoint, else start, over what an earlier try left: the same command "
            "may be run again and again, as torchrun --max-restarts and schedulers do. Needs train.checkpoint_every.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    checked: Annotated[
        bool,
        typer.Option(
            "--checked",
            help="Check every layer call, on every rank: plans, rows, unwritten memory, the first number that is not "
            "finite. Slower; the same losses.",
        ),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a model from transformers, alone or expert-parallel, on text.

    Under torchrun the ranks it started share the experts; otherwise --ep N starts N local CPU processes. The text is
    data.path: a file, or a directory of which every file that is neither binary nor hidden is read, whatever its name;
    unset, the source of Python's standard library.

    A run is the folder runs/<name>/:

    \b
    - config.toml: the resolved configuration
    - metrics.jsonl: one line a step
    - trace.parquet: counts of every layer call, where pyarrow is installed
    - summary.json: figures of the whole run, over all resumes
    - checkpoints/: with train.checkpoint_every
    - tensorboard/: where tensorboard is installed
    - report.html: after lrmoe report runs/<name>
    - .lock: empty; keeps a second run out while one is at work

    With train.checkpoint_every, SIGTERM to any rank, or to the command itself, ends the run on all ranks after the step
    that they are in, with a checkpoint and exit code 0; a second one, two seconds later or more, ends it at once.

    With lrmoe.observe=true the run is exact and ends with a table of what pruning would have saved.
    """
    options = {"model.preset": preset, "train.steps": steps, "train.name": name}
    given = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    given = [*(overrides or []), *given]
    if auto_resume:
        resume, overwrite = _auto(config, given, resume, overwrite)
    settings = _settings(config, given, resume, overwrite)
    _check_policy(settings.lrmoe.policy)
    rank = "lrmoe.debug:checked_rank" if checked else "lrmoe.training.run:run_rank"
    summary = _train(rank, settings, ep, resume, overwrite)
    if summary is None:
        return
    if as_json:
        from lrmoe.training.figures import figures

        for line in figures(summary):
            typer.echo(json.dumps(line))
    else:
        typer.echo(_describe(summary), err=True)
    if "observed" in summary:
        from lrmoe.training.observed import observed_table

        typer.echo(observed_table(summary["observed"]), err=True)


def _settings(config: Path | None, overrides: list[str], resume: bool, overwrite: bool) -> TrainConfig:
    if resume and overwrite:
        raise ConfigError("--overwrite with --resume: a run is replaced or gone on with; valid: one of them")
    if resume:
        from lrmoe.training.resume import resumed_config

        return resumed_config(config, overrides)
    from lrmoe.training.config import TrainConfig

    return TrainConfig.load(config, overrides)


def _auto(config: Path | None, overrides: list[str], resume: bool, overwrite: bool) -> tuple[bool, bool]:
    """Whether to resume and whether to overwrite, for --auto-resume."""
    for option, given in (("--resume", resume), ("--overwrite", overwrite)):
        if given:
            raise ConfigError(f"--auto-resume with {option}: it decides that itself; valid: one of them")
    from lrmoe.training.resume import resume_or_start

    return resume_or_start(config, overrides)


def _check_policy(name: str) -> None:
    """A policy's file that cannot be loaded is bad usage, said before any process starts."""
    from lrmoe.planning.policies import get_policy

    try:
        get_policy(name)
    except PlanError as error:
        raise ConfigError(f"lrmoe.{error}") from error


def _train(
    rank: str, settings: TrainConfig, ep: int | None, resume: bool, overwrite: bool
) -> Mapping[str, Any] | None:
    """Train where torchrun put this process, alone, or in new processes; None on ranks that have nothing to say.

    Args:
        rank: import path of what a rank runs.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if ep is not None and str(ep) != os.environ["WORLD_SIZE"]:
            raise ConfigError(
                f"--ep {ep}: torchrun started {os.environ['WORLD_SIZE']} ranks, which share the experts"
            )
        summary = _here(rank, settings.to_dict(), resume, True, overwrite)
        return summary if os.environ["RANK"] == "0" else None
    if resume and ep is None:
        from lrmoe.training.resume import ranks_saved

        ep = ranks_saved(settings)
    if ep is None or ep == 1:
        return _here(rank, settings.to_dict(), resume, True, overwrite)
    return _train_locally(rank, settings, ep, resume, overwrite)


def _here(rank: str, *arguments: Any) -> Mapping[str, Any]:
    module, _, name = rank.partition(":")
    summary: Mapping[str, Any] = getattr(importlib.import_module(module), name)(*arguments)
    return summary


def _train_locally(
    rank: str, settings: TrainConfig, ep: int, resume: bool, overwrite: bool
) -> Mapping[str, Any]:
    from lrmoe.training.launch import run_workers

    if settings.train.device == "cuda":
        raise ConfigError(
            f"--ep {ep} with train.device='cuda': start the ranks with torchrun --nproc-per-node {ep}"
        )
    tables = settings.replace(train={"device": "cpu"}).to_dict()
    results: list[Mapping[str, Any]] = run_workers(
        rank,
        ep,
        (tables, resume, True, overwrite),
        timeout_s=settings.train.timeout_s,
        pass_sigterm=settings.train.checkpoint_every > 0,
    )
    return results[0]


def _describe(summary: Mapping[str, Any]) -> str:
    loss = "" if summary["final_loss"] is None else f", loss {summary['final_loss']:.4f}"
    held_out = "" if summary["eval_loss"] is None else f", eval loss {summary['eval_loss']:.4f}"
    return f"{summary['folder']}: {summary['steps']} steps{loss}{held_out}, {summary['train_time_s']:.0f} s"


def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Run, or one checkpoint of it: runs/<name>/checkpoints/step-..."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Checkpoint of this step; unset: the newest usable one.")
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="per-expert: names as the model's family is published; fused: transformers' own tensors of all "
            "experts. Written into the index."
        ),
    ] = "per-expert",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; unset: that of the run.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Most of one file of weights.")] = "5GB",
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace OUT where it is a folder of files with a config.json."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's weights as a folder that from_pretrained reads: config.json, safetensors, tokenizer.

    The checkpoint may be of any number of ranks and either storage. Buffers, and what the model keeps in float32
    whatever its dtype, keep theirs. OUT appears when it is complete.
    """
    from lrmoe.checkpoint import export_checkpoint

    done = export_checkpoint(
        source,
        out,
        step=step,
        layout=layout,
        dtype=dtype,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    files = f"{done.files} file{'s' if done.files > 1 else ''}, {done.nbytes / 1e6:.1f} MB"
    typer.echo(f"{done.folder}: step {done.step}, {files}, {done.layout}, {done.dtype}", err=True)


def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Local folder with config.json and safetensors.")
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run to make: runs/<name>.")],
    layout: Annotated[
        str | None,
        typer.Option(
            help="per-expert or fused; unset: what an export of lrmoe states, else per-expert, as models are published."
        ),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Make a run of a folder in the Transformers layout: its weights, bit for bit, as the checkpoint of step 0.

    lrmoe train --resume goes on from there, with any number of ranks and either storage. The configuration is that of
    lrmoe train, without [model]; a tokenizer in FOLDER and its bfloat16 are taken over unless others are given.
    """
    from lrmoe.training.imported import import_run

    made = import_run(folder, run, config=config, overrides=overrides or [], layout=layout)
    place = "" if run.parent == Path("runs") else f" --set train.runs={run.parent}"
    typer.echo(f"{made}: go on with lrmoe train --resume --name {run.name}{place}", err=True)
