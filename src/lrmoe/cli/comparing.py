"""Commands that train again and again and compare: compare (systems), ablate (rules of pruning)."""

from __future__ import annotations

from typing import Annotated

import typer

from lrmoe.cli.options import AsJson, ConfigFile, Debug, Overrides, Overwrite, Ranks, RunName


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
    name: RunName = None,
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
