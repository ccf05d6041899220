"""Files that are made from code or results: written, or held against what is there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path


def check_option(about: str) -> bool:
    """Whether a script with nothing but --check was given it."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 when a file is out of date"
    )
    found: bool = parser.parse_args().check
    return found


def bring_up_to_date(files: Mapping[Path, str], *, check: bool) -> int:
    """Write the files that differ from their text, or with `check` only say which do.

    Returns:
        The exit code: 1 where something that was to be checked is out of date.
    """
    stale = [
        path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in () if check else stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    said = "out of date: " if check else "written: "
    print(said + ", ".join(path.name for path in stale) if stale else "up to date")
    return int(check and bool(stale))
