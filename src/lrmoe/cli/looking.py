"""Commands that look at what is there: report (runs), doctor (this machine)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lrmoe.cli.options import AsJson, Debug


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
