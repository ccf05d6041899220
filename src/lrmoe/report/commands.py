"""The `report` command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def report(*, runs: Sequence[Path], out: Path | None = None, as_json: bool = False) -> int:
    """Write the page of one run, or of two side by side.

    Args:
        runs: folders that a command wrote, or a file of `lrmoe plan`.
        out: the page; None writes report.html into the first folder, or beside the first file under its name.
        as_json: the figures of the headline table to stdout, one JSON object a line, instead of the page's path.

    Returns:
        0.

    Raises:
        ConfigError: not one or two runs, one that cannot be read, two that cannot stand side by side, or `out` that
            cannot be written.
        MissingExtraError: the extra `report` is not installed.
    """
    from rich.console import Console

    from lrmoe.errors import ConfigError
    from lrmoe.report import html
    from lrmoe.report.figures import of_runs
    from lrmoe.report.load import load_run

    if not 1 <= len(runs) <= 2:
        raise ConfigError(f"runs: {len(runs)} given; a report shows one or two")
    first = Path(runs[0])
    path = out or (first.with_suffix(".html") if first.is_file() else first / "report.html")
    loaded = [load_run(Path(run)) for run in runs]
    try:
        html.write(loaded, path)
    except OSError as error:
        raise ConfigError(f"out={str(path)!r}: cannot be written: {error}") from error
    if as_json:
        for found in of_runs(loaded):
            print(json.dumps(found, allow_nan=False))
    console = Console(stderr=as_json)
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 0
