"""Rows of a trace file to counts, with every check that outside data needs.

Shape letters: N rows of the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lrmoe.errors import ConfigError
from lrmoe.planning.problem import IntArray

FORMAT = 1
COLUMNS = ("step", "micro_batch", "layer", "source", "expert", "count")
NEEDED = ("step", "layer", "source", "expert", "count")
MAX_SIZE = 1 << 16  # most source ranks, most experts
MOST_CELLS = 1 << 30  # of counts held in memory at once: 8 GiB


def assemble(
    path: Path, columns: dict[str, IntArray], sizes: tuple[int | None, int | None]
) -> tuple[IntArray, IntArray]:
    """Rows to calls.

    Args:
        path: named in errors.
        columns: int64 (N,) each, by the names of COLUMNS; micro_batch may be missing.
        sizes: ranks and experts; None takes the largest id plus one.

    Returns:
        int64 (C, 3), step, micro-batch and layer of each call in that order; int64 (C, R, E), counts.
    """
    rows = columns["count"].size
    if not rows:
        raise ConfigError(f"trace={str(path)!r}: no rows")
    columns.setdefault("micro_batch", np.zeros(rows, dtype=np.int64))
    ranks = _size(path, "source", columns["source"], sizes[0])
    experts = _size(path, "expert", columns["expert"], sizes[1])
    _check_values(path, columns)
    heads = np.stack([columns[name] for name in COLUMNS[:3]], axis=1)
    calls, call_N = np.unique(heads, axis=0, return_inverse=True)
    cells = len(calls) * ranks * experts
    if cells > MOST_CELLS:
        last = [int(np.argmax(columns[name])) for name in ("source", "expert")]
        raise ConfigError(
            f"trace={str(path)!r}: {len(calls)} calls of {ranks} x {experts} counts are too many to hold at once, at "
            f"most {MOST_CELLS:,}; the largest source is in row {last[0]}, the largest expert in row {last[1]}"
        )
    place_N = (call_N.reshape(-1) * ranks + columns["source"]) * experts + columns["expert"]
    counts = np.zeros(cells, dtype=np.int64)
    counts[place_N] = columns["count"]
    if np.unique(place_N).size != rows:
        order = np.sort(place_N)
        twice = int(order[np.flatnonzero(np.diff(order) == 0)[0]])
        step, micro_batch, layer = calls[twice // (ranks * experts)]
        raise ConfigError(
            f"trace={str(path)!r}: step {step}, micro-batch {micro_batch}, layer {layer} has two rows for source "
            f"{twice // experts % ranks}, expert {twice % experts}"
        )
    return calls, counts.reshape(len(calls), ranks, experts)


def _size(path: Path, name: str, ids_N: IntArray, given: int | None) -> int:
    least = int(ids_N.max()) + 1
    if least > MAX_SIZE:
        row = int(np.argmax(ids_N))
        raise ConfigError(
            f"trace={str(path)!r}: column {name!r} holds {least - 1} in row {row}; valid: 0 to {MAX_SIZE - 1}"
        )
    if given is not None and given > MAX_SIZE:
        raise ConfigError(f"trace={str(path)!r}: {given} ids of column {name!r}: at most {MAX_SIZE}")
    if given is not None and given < least:
        raise ConfigError(f"trace={str(path)!r}: column {name!r} holds {least - 1}; valid: 0 to {given - 1}")
    return least if given is None else int(given)


def _check_values(path: Path, columns: Mapping[str, IntArray]) -> None:
    for name, values_N in columns.items():
        if (values_N < 0).any():
            row = int(np.flatnonzero(values_N < 0)[0])
            raise ConfigError(
                f"trace={str(path)!r}: column {name!r} holds {int(values_N[row])} in row {row}; must not be negative"
            )


def integers(path: Path, name: str, column: Any) -> IntArray:
    """An Arrow column as int64 (N,)."""
    if not str(column.type).lstrip("u").startswith("int"):
        raise ConfigError(
            f"trace={str(path)!r}: column {name!r} has type {column.type}: must be an integer type"
        )
    if column.null_count:
        raise ConfigError(f"trace={str(path)!r}: column {name!r} has {column.null_count} missing values")
    return np.asarray(column.to_numpy()).astype(np.int64)


def about(path: Path, metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """What the file's metadata says, sizes included; empty where another program wrote it."""
    text = (metadata or {}).get(b"lrmoe")
    if text is None:
        return {}
    try:
        found = json.loads(text)
        version = found.pop("format")
        sizes = [found[name] for name in ("ranks", "experts")]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"trace={str(path)!r}: its metadata cannot be read ({error!r})") from error
    if version != FORMAT or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ConfigError(
            f"trace={str(path)!r}: format {version!r} with sizes {sizes}; this version reads {FORMAT}"
        )
    return dict(found)


def of_system(path: Path, table: Any, system: str | None) -> tuple[Any, str]:
    """The rows of one system, and its name."""
    if "system" not in table.column_names or not table.num_rows:
        if system:
            raise ConfigError(f"trace={str(path)!r}: it names no systems, {system!r} was asked for")
        return table, ""
    column = table.column("system").to_numpy(zero_copy_only=False)
    names = list(dict.fromkeys(column))
    chosen = names[0] if system is None else system
    if chosen not in names:
        raise ConfigError(
            f"trace={str(path)!r}: no calls of system {chosen!r}; it has {', '.join(map(str, names))}"
        )
    return (
        (table, str(chosen))
        if len(names) == 1
        else (table.take(np.flatnonzero(column == chosen)), str(chosen))
    )
