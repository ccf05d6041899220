"""The command that says what fits on which GPUs: plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lrmoe.cli.options import AsJson, Debug


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
        typer.Option(
            metavar="OPTION=A,B",
            help="One table over values of gpus, ep, nodes, micro-batch, seq, slots, max-drop, peak, policy, model or "
            "hardware; may be repeated.",
        ),
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
