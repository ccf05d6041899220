"""Files of a run: whole or not at all, so that one that is there may be trusted after a stop."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write a text file, by one rename when all of it is there."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def json_text(value: Any) -> str:
    """A JSON file's text.

    Raises:
        ValueError: a number in it is not finite.
    """
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV with a header; None is empty.

    Raises:
        ValueError: a row has a key that is no column.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
