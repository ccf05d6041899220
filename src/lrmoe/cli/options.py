"""Options that several commands have, each with one name and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
RunName = Annotated[str | None, typer.Option(help="The run's folder is runs/<name>.")]

# Of simulate and replay.
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Trace: a run folder, its trace.parquet, or a CSV file."),
]
TraceSystem = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Whose calls of a comparison's trace; unset: the first."),
]
PatternOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Option of the load pattern, e.g. sigma=2; may be repeated."),
]
TopK = Annotated[int | None, typer.Option(help="Experts per token; unset: the model's.")]
Slots = Annotated[int, typer.Option(help="Weight slots per rank beyond the home experts.")]
ModelSizes = Annotated[
    str | None, typer.Option(help="Whose expert sizes; unset: the trace's, or Qwen3-30B-A3B.")
]
