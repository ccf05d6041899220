"""The `report` command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def report(*, runs: Sequence[Path], out: Path | None = None) -> int:
    """Write the page of one or two run folders.

    Args:
        runs: folders that `train` or `compare` wrote.
        out: the page; None writes report.html into the first folder.

    Returns:
        0.

    Raises:
        ConfigError: not one or two run folders, one that cannot be read, or `out` that cannot be written.
        MissingExtraError: the extra `report` is not installed.
    """
    from rich.console import Console

    from lrmoe.errors import ConfigError
    from lrmoe.report import html
    from lrmoe.report.load import load_run

    if not 1 <= len(runs) <= 2:
        raise ConfigError(f"runs: {len(runs)} given; a report shows one or two")
    path = out or Path(runs[0]) / "report.html"
    try:
        html.write([load_run(Path(run)) for run in runs], path)
    except OSError as error:
        raise ConfigError(f"out={str(path)!r}: cannot be written: {error}") from error
    Console().print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 0
