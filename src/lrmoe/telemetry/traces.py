"""Traces: how many pairs every source rank routed to every expert, in every call of every layer, as a Parquet file.

One row per (call, source, expert), columns:

    step int64, micro_batch int32, layer int32, source int32, expert int32, count int64, system string

Zeros are written, so that sizes and empty calls are in the file; readers take a missing row as zero. The key "lrmoe" of
the file's metadata holds JSON: {"format": 1, "ranks": R, "experts": E, ...}. `system` names the system of a comparison
that made the calls; it is empty elsewhere.

Shape letters: C calls, R ranks, E experts, N rows of the table.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lrmoe.errors import ConfigError, require_extra
from lrmoe.planning.problem import IntArray
from lrmoe.telemetry._trace_rows import COLUMNS, FORMAT, NEEDED, about, assemble, integers, of_system

_WIDTHS = {"step": "int64", "count": "int64", "system": "string"}  # others int32
_GROUP_ROWS = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Counts of calls, ordered by (step, micro-batch, layer).

    Attributes:
        step_C, micro_batch_C, layer_C: int64 (C,), which call.
        counts_CRE: int64 (C, R, E), pairs from each source rank to each expert.
        system: whose calls, or empty.
        about: what the file's metadata says besides its sizes (for example top_k).
        sized: whether its sizes were given; otherwise they are the largest ids plus one.
    """

    step_C: IntArray
    micro_batch_C: IntArray
    layer_C: IntArray
    counts_CRE: IntArray
    system: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    sized: bool = True

    @property
    def ranks(self) -> int:
        """Source ranks."""
        return int(self.counts_CRE.shape[1])

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return int(self.counts_CRE.shape[2])

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have calls, ascending."""
        return tuple(int(layer) for layer in np.unique(self.layer_C))

    def of_layer(self, layer: int) -> IntArray:
        """The calls of one layer in order, int64 (S, R, E).

        Raises:
            ConfigError: no call of that layer.
        """
        chosen = self.layer_C == layer
        if not chosen.any():
            raise ConfigError(f"layer={layer}: the trace has layers {', '.join(map(str, self.layers))}")
        return self.counts_CRE[chosen]


class TraceWriter:
    """Writes a trace call by call; a context manager. The file appears under its name when the writer is closed.

    Args:
        path: of the Parquet file; an earlier one is replaced.
        about: JSON-able, kept in the metadata, for example {"top_k": 8}.
        keep_below: keep the calls of an earlier file with a smaller step (a resumed run).

    Attributes:
        sizes: ranks and experts of its calls; None before the first.

    Raises:
        ConfigError: the earlier file is no trace, or is cut off or corrupt.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self, path: Path, *, about: Mapping[str, Any] | None = None, keep_below: int | None = None
    ) -> None:
        self._arrow, self._parquet = _pyarrow(), _parquet()
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._about = dict(about or {})
        self._out: Any = None
        self.sizes: tuple[int, int] | None = None
        self._calls: list[tuple[int, int, int, str, IntArray]] = []
        self._rows = 0
        if keep_below is not None and path.exists():
            self._keep(keep_below)

    def add(
        self,
        *,
        step: int,
        layer: int,
        counts_RE: IntArray | Sequence[Sequence[int]],
        micro_batch: int = 0,
        system: str = "",
    ) -> None:
        """Add one call.

        Raises:
            ConfigError: its sizes differ from those of the calls before.
        """
        counts = np.asarray(counts_RE, dtype=np.int64)
        self.sizes = self.sizes or (int(counts.shape[0]), int(counts.shape[1]))
        if counts.shape != self.sizes:
            raise ConfigError(f"counts_RE has shape {counts.shape}: the trace holds {self.sizes}")
        self._calls.append((step, micro_batch, layer, system, counts))
        self._rows += counts.size
        if self._rows >= _GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is left and put the file in place; without any call there is no file."""
        self._flush()
        if self._out is not None:
            self._out.close()
            self._out = None
            self._part.replace(self._path)

    def discard(self) -> None:
        """Give up: remove what was written; an earlier file stays as it is."""
        out, self._out = self._out, None
        self._calls.clear()
        if out is not None:
            with contextlib.suppress(Exception):  # it may be what failed
                out.close()
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep(self, step: int) -> None:
        systems = _systems(self._path)
        for trace in [read_trace(self._path, system=system) for system in systems]:
            for i in np.flatnonzero(trace.step_C < step):
                self.add(
                    step=int(trace.step_C[i]),
                    micro_batch=int(trace.micro_batch_C[i]),
                    layer=int(trace.layer_C[i]),
                    system=trace.system,
                    counts_RE=trace.counts_CRE[i],
                )

    def _flush(self) -> None:
        if not self._calls or self.sizes is None:
            return
        if self._out is None:
            header = json.dumps(
                {**self._about, "format": FORMAT, "ranks": self.sizes[0], "experts": self.sizes[1]}
            )
            schema = self._schema().with_metadata({"lrmoe": header})
            self._out = self._parquet.ParquetWriter(self._part, schema, compression="zstd")
        self._out.write_table(self._table())
        self._calls.clear()
        self._rows = 0

    def _schema(self) -> Any:
        pa = self._arrow
        kinds = {"int64": pa.int64(), "int32": pa.int32(), "string": pa.string()}
        return pa.schema([(name, kinds[_WIDTHS.get(name, "int32")]) for name in (*COLUMNS, "system")])

    def _table(self) -> Any:
        assert self.sizes is not None
        ranks, experts = self.sizes
        cells = ranks * experts
        heads = np.array([call[:3] for call in self._calls], dtype=np.int64)
        repeated = {name: np.repeat(heads[:, i], cells) for i, name in enumerate(COLUMNS[:3])}
        arrays = {
            **repeated,
            "source": np.tile(np.repeat(np.arange(ranks), experts), len(self._calls)),
            "expert": np.tile(np.arange(experts), ranks * len(self._calls)),
            "count": np.concatenate([call[4].ravel() for call in self._calls]),
            "system": np.repeat(np.array([call[3] for call in self._calls], dtype=object), cells),
        }
        schema = self._schema()
        return self._arrow.table(
            [self._arrow.array(arrays[f.name], type=f.type) for f in schema], schema=schema
        )


def can_write() -> bool:
    """Whether pyarrow is installed."""
    return importlib.util.find_spec("pyarrow") is not None


def write_trace(path: Path, trace: Trace) -> Path:
    """Write a whole trace.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    with TraceWriter(path, about=trace.about) as writer:
        for i, counts_RE in enumerate(trace.counts_CRE):
            writer.add(
                step=int(trace.step_C[i]),
                micro_batch=int(trace.micro_batch_C[i]),
                layer=int(trace.layer_C[i]),
                system=trace.system,
                counts_RE=counts_RE,
            )
    return path


def read_trace(path: Path, *, system: str | None = None) -> Trace:
    """Read a Parquet trace, of this package or any with these columns (micro_batch and system may be missing).

    Args:
        path: of the file.
        system: whose calls; None takes the system of the first row.

    Raises:
        ConfigError: no such file, not Parquet or cut off, a missing column, values out of range, a call's entry given
            twice, no such system.
        MissingExtraError: pyarrow is not installed.
    """
    table = _table(path)
    missing = [name for name in NEEDED if name not in table.column_names]
    if missing:
        raise ConfigError(
            f"trace={str(path)!r}: no column {missing[0]!r}; it has {', '.join(table.column_names)}; "
            f"needed: {', '.join(NEEDED)}"
        )
    said = about(path, table.schema.metadata)
    table, chosen = of_system(path, table, system)
    columns = {
        name: integers(path, name, table.column(name)) for name in COLUMNS if name in table.column_names
    }
    sizes = said.pop("ranks", None), said.pop("experts", None)
    calls, counts = assemble(path, columns, sizes)
    return _trace(calls, counts, system=chosen, about=said, sized=None not in sizes)


def read_csv(path: Path, *, ranks: int | None = None, experts: int | None = None) -> Trace:
    """Read a CSV file with a header line and the integer columns step, layer, source, expert, count.

    micro_batch may be there too; other columns are ignored. Rows that are not there count zero.

    Args:
        path: of the file.
        ranks, experts: sizes; None takes the largest id plus one.

    Raises:
        ConfigError: no such file, no header, a missing column, a cell that is not an integer, values out of range.
    """
    try:
        with path.open(encoding="utf-8") as file:
            names = [name.strip().strip('"') for name in file.readline().rstrip("\n").split(",")]
            missing = [name for name in NEEDED if name not in names]
            if missing:
                raise ConfigError(
                    f"trace={str(path)!r}: its first line has no column {missing[0]!r}; needed: {', '.join(NEEDED)}"
                )
            used = [name for name in COLUMNS if name in names]
            where = [names.index(name) for name in used]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about files without rows: an error below
                rows = np.loadtxt(file, dtype=np.int64, delimiter=",", usecols=where, ndmin=2)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace={str(path)!r}: cannot be read ({error})") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"trace={str(path)!r}: not a table of integers ({_first_line(error)})") from error
    columns = {name: np.ascontiguousarray(rows[:, i]) for i, name in enumerate(used)}
    return _trace(*assemble(path, columns, (ranks, experts)), sized=None not in (ranks, experts))


def load(path: Path, *, system: str | None = None) -> Trace:
    """Read a trace by its suffix: .csv as CSV, all else as Parquet; a run folder means its trace.parquet."""
    if path.is_dir():
        path = path / "trace.parquet"
    return read_csv(path) if path.suffix.lower() == ".csv" else read_trace(path, system=system)


def _trace(calls: IntArray, counts: IntArray, **fields: Any) -> Trace:
    step_C, micro_batch_C, layer_C = (calls[:, i].copy() for i in range(3))
    return Trace(step_C=step_C, micro_batch_C=micro_batch_C, layer_C=layer_C, counts_CRE=counts, **fields)


def _systems(path: Path) -> list[str]:
    """Names of the systems in a file, in order of appearance."""
    return list(dict.fromkeys(_table(path, columns=["system"]).column("system").to_pylist()))


def _table(path: Path, columns: Sequence[str] | None = None) -> Any:
    pa, pq = _pyarrow(), _parquet()
    if not path.is_file():
        raise ConfigError(f"trace={str(path)!r}: no such file")
    try:
        return pq.read_table(path, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"trace={str(path)!r}: not a readable Parquet file ({_first_line(error)})"
        ) from error


def _pyarrow() -> Any:
    return require_extra("pyarrow", "traces")


def _parquet() -> Any:
    return require_extra("pyarrow.parquet", "traces")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
