"""Commands about single calls of a layer under several systems: simulate (planned), replay (run)."""

from __future__ import annotations

from typing import Annotated

import typer

from lrmoe.cli.options import (
    AsJson,
    Debug,
    ModelSizes,
    Overwrite,
    PatternOptions,
    Slots,
    TopK,
    Trace,
    TraceSystem,
)


def simulate(
    preset: Annotated[
        str | None,
        typer.Option(help="published: the published comparison; only --systems and --slots may vary."),
    ] = None,
    trace: Trace = None,
    trace_system: TraceSystem = None,
    generator: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Load pattern: lognormal (default), zipf, balanced, hot_set, ..."),
    ] = None,
    option: PatternOptions = None,
    systems: Annotated[
        str | None, typer.Option(metavar="A,B", help="Systems, or my_file.py:MyPolicy; unset: all eleven.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(metavar="N,N", help="Cluster sizes, 8 to 1024.")] = None,
    experts: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Experts, one number or one per cluster; unset: by size."),
    ] = None,
    top_k: TopK = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank and call (32768).")] = None,
    steps: Annotated[int | None, typer.Option(help="Measured calls (4; of a trace: all).")] = None,
    skip: Annotated[
        int | None, typer.Option(help="Calls before them that only make history (12; of a trace: 0).")
    ] = None,
    slots: Slots = 2,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes per rank for one layer call, e.g. 6GiB.")
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Share of pairs lrmoe's backward leaves out (0.2).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the load pattern.")] = None,
    model: ModelSizes = None,
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


def replay(
    trace: Trace = None,
    trace_system: TraceSystem = None,
    layer: Annotated[int | None, typer.Option(help="Layer of the trace; unset: the first.")] = None,
    call: Annotated[
        int | None,
        typer.Option(help="Call of that layer, from 0; earlier ones are history; unset: the last."),
    ] = None,
    generator: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Load pattern; unset: the published comparison's lognormal."),
    ] = None,
    option: PatternOptions = None,
    systems: Annotated[
        str | None, typer.Option(metavar="A,B", help="Systems, megatron among them; unset: all eleven.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks that share the experts (8; of a trace: its own).")
    ] = None,
    experts: Annotated[int | None, typer.Option(help="Experts (128).")] = None,
    top_k: TopK = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank (32768).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the load pattern, the data and the selection.")
    ] = None,
    slots: Slots = 2,
    max_drop: Annotated[float, typer.Option(help="Share of pairs lrmoe's backward leaves out.")] = 0.2,
    estimator: Annotated[str, typer.Option(help="Of lrmoe: sampled or topk.")] = "sampled",
    model: ModelSizes = None,
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


def _policies(text: str | None) -> list[str] | None:
    """Of --systems where a system is a policy; None where the option is not given."""
    from lrmoe.config import POLICIES
    from lrmoe.experiments.lists import names

    return None if text is None else names("systems", text, (*POLICIES, "my_file.py:MyPolicy"))
