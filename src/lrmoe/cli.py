"""The command line: options here, work in the modules below, imported only when a command runs.

Exit codes: 0 done, 1 failed, 2 bad usage, 3 infeasible (budget).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lrmoe
from lrmoe.errors import ConfigError, InfeasibleError, PlanError, UnsupportedError

if TYPE_CHECKING:
    from lrmoe.training.config import TrainConfig

app = typer.Typer(
    name="lrmoe",
    help="Train Mixture-of-Experts models with a pruned, compacted backward pass.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file with the run's tables.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="TABLE.KEY=VALUE", help="Change one key of the configuration; may be repeated."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Figures to stdout, one JSON object a line; all else to stderr.")
]
Ranks = Annotated[
    int | None,
    typer.Option("--ep", min=1, metavar="N", help="Ranks that share the experts, as local processes."),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace an earlier run of the same name and kind; never its checkpoints."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="On an error, print the traceback as well.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lrmoe {lrmoe.__version__}")
        raise typer.Exit


@app.callback(epilog="Example: lrmoe train --preset qwen3-moe-tiny --steps 50")
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train Mixture-of-Experts models with a pruned, compacted backward pass."""


@app.command(epilog="Example: lrmoe train --steps 50 --set lrmoe.max_drop=0.2")
def train(
    preset: Annotated[str | None, typer.Option(help="Model: qwen3-moe-tiny or glm4-moe-tiny.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    name: Annotated[str | None, typer.Option(help="The run's folder is runs/<name>.")] = None,
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


@app.command(epilog="Example: lrmoe compare --preset demo --name demo")
def compare(
    preset: Annotated[
        str, typer.Option(help="Comparison that ships with the package: demo, small or published.")
    ] = "demo",
    systems: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Systems, e.g. megatron,lrmoe; my_file.py:MyPolicy; or all of the package."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's folder is runs/<name>.")] = None,
    target_loss: Annotated[
        float | None, typer.Option(help="Smoothed training loss to reach, instead of a number of steps.")
    ] = None,
    targets: Annotated[
        str | None, typer.Option(metavar="X,Y", help="Several losses: runs to the lowest, timed to each.")
    ] = None,
    ep: Ranks = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data and selection.")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N", help="Several seeds, e.g. 0,1,2: a comparison for each.")
    ] = None,
    regime: Annotated[
        str | None,
        typer.Option(help="Start and text: scratch, continued or memorise; unset: as configured."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Models, a comparison for each: presets, Hub names, or directories of transformers.",
        ),
    ] = None,
    aux: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y", help="Auxiliary losses of the router, e.g. 0,0.001: a comparison for each."
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="NAME", help="System that ratios are taken to; unset: megatron.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run the same training under several systems, to the same loss or for as many steps, and say what each needed.

    Prints tables, and fills the folder runs/<name>/: config.toml, metrics.jsonl, trace.parquet (where pyarrow is
    installed), summary.json, and a self-contained report.html.

    Systems that prune backward are trained. Those with exact gradients share one training run: fixed ownership trains,
    the others execute every layer call of it, and their outputs and gradients must equal the trainer's.

    Several seeds, models or auxiliary losses are cells, run one after another, each a comparison of its own in
    runs/<name>/cells/, which lrmoe report shows. The whole has summary.json and rows.csv: a row for each cell, system
    and target, and ratios paired by seed with their standard errors. Run again after a stop, the command goes on:
    finished cells are kept. Other options than theirs are refused, but for more seeds, models or auxiliary losses.

    Systems:

    \b
    - megatron: fixed ownership, exact backward
    - fastermoe: hottest experts broadcast to all ranks, kept until backward
    - flexmoe: resident copies, changed when the balance is bad
    - smartmoe: experts change owners every 10 calls
    - symi: instances by the last call's load, rebuilt once a step
    - laer: every rank's experts gathered from shards at each call
    - ultraep: replicas by the call's own load, fetched again in backward
    - topoep: one matching of hot experts and free slots a call
    - eplb: resident copies by past load, packed anew every 3 calls
    - llep: spilled experts sent along above 1.3 mean loads
    - lrmoe: pruned, compacted backward as configured
    - lrmoe-sampled50: half of the pairs sampled for backward
    - lrmoe-topk20: the published setting: best 80 % by LRM

    Presets:

    \b
    - demo: megatron and lrmoe over 2 ranks to loss 2.3, at most 110 steps
    - small: all systems over 8 ranks, 60 steps
    - published: six systems over 8 ranks to loss 0.05, at most 300 steps;
      memorise, 3 seeds, 2 models, auxiliary loss 0 and 0.001 (hours)

    Regimes:

    \b
    - scratch: from new weights, 400 steps
    - continued: from a checkpoint of 800 steps, 200 more
    - memorise: from a checkpoint of 800 steps, 8 KB of text by heart

    The checkpoint is trained once and kept in runs/cache. A regime sets text, batch, learning rate and steps, and
    memorise the target; the file, --set and other options change that.

    A file given with --config, and --set, hold table [compare] beside those of lrmoe train. Its keys: systems,
    target_loss or targets, seeds, models, aux, regime, against, max_steps, ep, smoothing_steps (of the smoothed loss),
    link_bytes_per_s (of the critical path), or else link_skip_steps and link_steps (of fixed ownership, which it is
    taken from).
    """
    from lrmoe.experiments.compare.command import compare as run
    from lrmoe.experiments.lists import names, numbers
    from lrmoe.experiments.systems.registry import ALL, SYSTEMS
    from lrmoe.training.presets import PRESETS

    code = run(
        preset=preset,
        systems=None
        if systems is None
        else names("systems", systems, (*SYSTEMS, "my_file.py:MyPolicy", ALL)),
        name=name,
        target_loss=target_loss,
        targets=None if targets is None else numbers("targets", targets, float),
        ep=ep,
        seed=seed,
        seeds=None if seeds is None else numbers("seeds", seeds, int),
        regime=regime,
        models=None if models is None else names("models", models, (*PRESETS, "a Hub name", "a directory")),
        aux=None if aux is None else numbers("aux", aux, float),
        against=against,
        config=config,
        overrides=overrides or [],
        overwrite=overwrite,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command(epilog="Example: lrmoe ablate --scores lrm,alpha,random --estimators topk --seeds 3")
def ablate(
    preset: Annotated[
        str | None,
        typer.Option(
            help="Rules, regimes and seeds of the package: published (the published table, memorise) or full "
            "(all three regimes)."
        ),
    ] = None,
    regime: Annotated[
        str | None, typer.Option(metavar="A,B", help="scratch, continued, memorise (default).")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N|N,N", help="How many, or which (3; of a preset its own).")
    ] = None,
    scores: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="lrm (default), grad_norm, alpha_grad, abs_grad, alpha, alpha_phi, random."
        ),
    ] = None,
    estimators: Annotated[str | None, typer.Option(metavar="A,B", help="sampled (default), topk.")] = None,
    drops: Annotated[
        str | None, typer.Option(metavar="X,Y", help="Shares of pairs that backward leaves out (0.3).")
    ] = None,
    quota_rule: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="variance (default): quotas from past scores; count: equal shares."),
    ] = None,
    router_grad: Annotated[
        str | None, typer.Option(metavar="A,B", help="auto (default), full, retained.")
    ] = None,
    select_in: Annotated[str | None, typer.Option(metavar="A,B", help="backward (default), forward.")] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Preset, directory or Hub name.")
    ] = "qwen3-moe-micro",
    aux: Annotated[float, typer.Option(help="Coefficient of the load-balancing loss.")] = 0.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps, instead of the regime's.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes of one thread each; unset: one per core.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The run's folder is runs/<name>; unset: ablate, or ablate-<preset>.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train with rules for what backward keeps, each beside nothing dropped, and say what each costs in loss.

    Every combination of the lists is a rule. A rule's loss is paired with that of nothing dropped by seed: the same
    weights, batches and steps. Trains in one process each, with the quotas of 8 ranks.

    Regimes:

    \b
    - scratch: from new weights, 400 steps
    - continued: from a checkpoint of 800 steps, 200 more
    - memorise: from the same checkpoint, 8 KB of text by heart, 340 steps

    The start checkpoint is made once and kept in runs/cache. A run that was stopped goes on with the same command;
    finished training runs are not repeated, and more rules or seeds may be asked for.
    """
    from lrmoe.experiments.ablate.command import ablate as run

    grid = {
        "scores": scores,
        "estimators": estimators,
        "drops": drops,
        "quota_rule": quota_rule,
        "router_grad": router_grad,
        "select_in": select_in,
    }
    code = run(
        preset=preset,
        regime=regime,
        seeds=seeds,
        grid=grid,
        model=model,
        aux=aux,
        steps=steps,
        workers=workers,
        name=name,
        overwrite=overwrite,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command(epilog="Example: lrmoe simulate --systems megatron,ultraep,lrmoe --ranks 8,64")
def simulate(
    preset: Annotated[
        str | None,
        typer.Option(help="published: the published comparison; only --systems and --slots may vary."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Trace: a run folder, its trace.parquet, or a CSV file."),
    ] = None,
    trace_system: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose calls of a comparison's trace; unset: the first."),
    ] = None,
    generator: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Load pattern: lognormal (default), zipf, balanced, hot_set, ..."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the load pattern, e.g. sigma=2; may be repeated."),
    ] = None,
    systems: Annotated[
        str | None, typer.Option(metavar="A,B", help="Systems, or my_file.py:MyPolicy; unset: all eleven.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(metavar="N,N", help="Cluster sizes, 8 to 1024.")] = None,
    experts: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Experts, one number or one per cluster; unset: by size."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts per token; unset: the model's.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank and call (32768).")] = None,
    steps: Annotated[int | None, typer.Option(help="Measured calls (4; of a trace: all).")] = None,
    skip: Annotated[
        int | None, typer.Option(help="Calls before them that only make history (12; of a trace: 0).")
    ] = None,
    slots: Annotated[int, typer.Option(help="Weight slots per rank beyond the home experts.")] = 2,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes per rank for one layer call, e.g. 6GiB.")
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Share of pairs lrmoe's backward leaves out (0.2).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the load pattern.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Whose expert sizes; unset: the trace's, or Qwen3-30B-A3B.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="Device of the predicted times (h100).")] = None,
    name: Annotated[
        str | None, typer.Option(help="The run's folder is runs/<name>; unset: simulate, or the preset's.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Plan recorded or generated calls under several systems: peaks, bytes, traffic, time, throughput.

    Nothing is trained. Writes runs/<name>/summary.json and a self-contained report.html.
    """
    from lrmoe.experiments.simulation import simulate as run

    code = run(
        preset=preset,
        trace=trace,
        trace_system=trace_system,
        generator=generator,
        options=option or [],
        systems=_policies(systems),
        ranks=ranks,
        experts=experts,
        top_k=top_k,
        tokens=tokens,
        steps=steps,
        skip=skip,
        slots=slots,
        budget=budget,
        max_drop=max_drop,
        seed=seed,
        model=model,
        hardware=hardware,
        name=name,
        overwrite=overwrite,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command(epilog="Example: lrmoe replay --systems megatron,ultraep,lrmoe --tokens 4096")
def replay(
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Trace: a run folder, its trace.parquet, or a CSV file."),
    ] = None,
    trace_system: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose calls of a comparison's trace; unset: the first."),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of the trace; unset: the first.")] = None,
    call: Annotated[
        int | None,
        typer.Option(help="Call of that layer, from 0; earlier ones are history; unset: the last."),
    ] = None,
    generator: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Load pattern; unset: the published comparison's lognormal."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the load pattern, e.g. sigma=2; may be repeated."),
    ] = None,
    systems: Annotated[
        str | None, typer.Option(metavar="A,B", help="Systems, megatron among them; unset: all eleven.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks that share the experts (8; of a trace: its own).")
    ] = None,
    experts: Annotated[int | None, typer.Option(help="Experts (128).")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts per token; unset: the model's.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank (32768).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the load pattern, the data and the selection.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Weight slots per rank beyond the home experts.")] = 2,
    max_drop: Annotated[float, typer.Option(help="Share of pairs lrmoe's backward leaves out.")] = 0.2,
    estimator: Annotated[str, typer.Option(help="Of lrmoe: sampled or topk.")] = "sampled",
    model: Annotated[
        str | None, typer.Option(help="Whose expert sizes; unset: the trace's, or Qwen3-30B-A3B.")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Width of rows; unset: the model's, on a CPU an eighth of it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of rows and weights: bf16, fp32 or fp64.")] = "bf16",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; unset: CUDA where it is.")] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help="Link of each rank: third (a balanced layer's exchange takes a third of its time), a device of the "
            "hardware table, or bytes per second; unset: third on a CPU, h100 on CUDA.",
        ),
    ] = None,
    activations: Annotated[
        str,
        typer.Option(help="recompute (backward sends inputs again) or stash (rows stay), of every system."),
    ] = "recompute",
    repeats: Annotated[int, typer.Option(help="Runs of megatron and lrmoe; the others run once.")] = 1,
    workers: Annotated[
        int, typer.Option(help="Ranks that run at the same time on a CPU, one thread and memory for each.")
    ] = 1,
    name: Annotated[str | None, typer.Option(help="The run's folder is runs/<name>; unset: replay.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run every rank's real work of one MoE layer call under several systems, on this device.

    Packing, experts, unpacking, scores and selection of both passes are measured in time and bytes; the exchange
    between ranks is modelled over a stated link. Writes runs/<name>/summary.json and a self-contained report.html.
    """
    from lrmoe.experiments.replay_command import run_replay as run

    code = run(
        trace=trace,
        trace_system=trace_system,
        layer=layer,
        call=call,
        generator=generator,
        pattern=tuple(option or ()),
        systems=_policies(systems),
        ranks=ranks,
        experts=experts,
        top_k=top_k,
        tokens=tokens,
        seed=seed,
        slots=slots,
        max_drop=max_drop,
        estimator=estimator,
        model=model,
        hidden=hidden,
        dtype=dtype,
        device=device,
        link=link,
        activations=activations,
        repeats=repeats,
        workers=workers,
        name=name,
        overwrite=overwrite,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command(epilog="Example: lrmoe report runs/demo --json")
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="One or two run folders, or files of `lrmoe plan` (its .csv, its --json in a .jsonl).",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The page; unset: report.html in the first folder, or beside the first file."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The headline figures to stdout, one JSON object a line.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the HTML page of one run, or of two side by side.

    Shows runs of train, compare, ablate, replay, simulate, plan and `make headline`. Two runs must both have been
    trained (train, compare), or be of the same kind.
    """
    from lrmoe.report.commands import report as run

    raise typer.Exit(run(runs=runs, out=out, as_json=as_json))


@app.command(epilog="Example: lrmoe plan --model GLM-4.5-Air --gpus 64 --hardware h200")
def plan(
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="Published model, or a transformers config.json; several: A,B."),
    ] = "Qwen3-30B-A3B",
    hardware: Annotated[
        str,
        typer.Option(metavar="NAME", help="h100 h200 h20 a100-40 a100-80 l40s rtx4090 b200; several: A,B."),
    ] = "h100",
    gpus: Annotated[int, typer.Option(help="GPUs of the whole job.")] = 8,
    ep: Annotated[int | None, typer.Option(help="Ranks that share the experts; unset: all GPUs.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes; unset: 8 GPUs each.")] = None,
    micro_batch: Annotated[int, typer.Option(help="Sequences per GPU and micro-batch.")] = 1,
    seq: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    policy: Annotated[str, typer.Option(help="Planning system, or my_file.py:MyPolicy.")] = "lrmoe",
    slots: Annotated[int, typer.Option(help="Foreign experts a rank may hold.")] = 2,
    max_drop: Annotated[float, typer.Option(help="Cap on the pairs that backward leaves out.")] = 0.3,
    drop: Annotated[
        str, typer.Option(help="always: the whole cap; overload: what peak or budget ask.")
    ] = "always",
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Per rank for the MoE part of the model: 60GiB or 60%.")
    ] = None,
    layer_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Per rank for one MoE layer call.")
    ] = None,
    reserved: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Per rank for all that is not MoE; unset: an estimate.")
    ] = None,
    headroom: Annotated[float, typer.Option(help="Share of the device left free.")] = 0.1,
    activations: Annotated[str, typer.Option(help="stash, recompute or auto (what fits first).")] = "auto",
    checkpointing: Annotated[
        str, typer.Option(help="none, layer (each layer's forward runs again in backward) or auto.")
    ] = "auto",
    grads: Annotated[str, typer.Option(help="Gradient buffers: fp32 or bf16.")] = "fp32",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw-bf16-moments, adamw-8bit, adamw-no-master, muon, sgd or none.")
    ] = "adamw",
    skew: Annotated[str, typer.Option(help="Load pattern, as in lrmoe simulate.")] = "lognormal",
    peak: Annotated[
        float | None,
        typer.Option(help="Fixed ownership's peak over the mean that the skew is calibrated to."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the skew.")] = 0,
    network_gbps: Annotated[
        float | None, typer.Option(help="Network per GPU and direction, Gb/s; unset: 400.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured constants of the time model (JSON).")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION=A,B", help="One table over values of an option; may be repeated."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The sweep's table; unset: runs/plan/capacity.csv.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a table that is there.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what a model needs on some GPUs: memory by part, the plan of a layer call, time per phase, what fits.

    Nothing runs and no GPU is needed. Every figure is marked modelled or calibrated. Exit code 3: nothing fits.
    """
    from lrmoe.experiments.capacity.command import plan as run

    code = run(
        model=model,
        hardware=hardware,
        sweep=sweep or [],
        csv=csv,
        overwrite=overwrite,
        as_json=as_json,
        gpus=gpus,
        ep=ep,
        nodes=nodes,
        micro_batch=micro_batch,
        seq=seq,
        policy=policy,
        slots=slots,
        max_drop=max_drop,
        drop=drop,
        budget=budget,
        layer_budget=layer_budget,
        reserved=reserved,
        headroom=headroom,
        activations=activations,
        checkpointing=checkpointing,
        grads=grads,
        optimizer=optimizer,
        skew=skew,
        peak=peak,
        seed=seed,
        network_gbps=network_gbps,
        calibration=calibration,
    )
    raise typer.Exit(code)


@app.command(epilog="Example: lrmoe export runs/train out/my-model")
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


@app.command("import", epilog="Example: lrmoe import models/Qwen3-30B-A3B runs/tuned --set data.path=text/")
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


@app.command(epilog="Example: lrmoe doctor --model qwen3-moe-tiny")
def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Say whether lrmoe runs its experts, and why not: a preset, a folder or file with a transformers "
            "configuration, or a model in the local Hub cache. Downloads nothing.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what is installed here, which fast paths are usable and why not, and whether a layer computes right.

    Looks at versions, extras, devices, threads and backends, tries fast paths, times an all-to-all between two local
    processes, and holds one layer's output and gradients on them to a plain loop: about ten seconds. Exit code 1: lrmoe
    is not usable here, or does not run the model's experts.
    """
    from lrmoe.doctor import doctor as run

    raise typer.Exit(run(model=model, as_json=as_json))


def _policies(text: str | None) -> list[str] | None:
    """Of --systems where a system is a policy; None where the option is not given."""
    from lrmoe.config import POLICIES
    from lrmoe.experiments.lists import names

    return None if text is None else names("systems", text, (*POLICIES, "my_file.py:MyPolicy"))


def exit_code(error: BaseException) -> int:
    """1 failed, 2 bad usage, 3 infeasible."""
    if isinstance(error, InfeasibleError):
        return 3
    return 2 if isinstance(error, ConfigError | UnsupportedError) else 1


def main() -> None:
    """Entry point: run a command, turn errors into one line on stderr and an exit code."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exception(error)
        own = isinstance(error, lrmoe.LRMoEError)
        hint = "" if own or "--debug" in sys.argv else " (--debug shows where)"
        print(f"error: {'' if own else type(error).__name__ + ': '}{error}{hint}", file=sys.stderr)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
