"""Trace files: round trips, files of others, and everything that can be wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrmoe.errors import ConfigError, MissingExtraError
from lrmoe.telemetry import traces
from lrmoe.telemetry.traces import Trace, TraceWriter, load, read_csv, read_trace, write_trace


def _counts(calls: int, ranks: int = 2, experts: int = 4) -> np.ndarray:
    counts = np.random.default_rng(0).integers(0, 50, (calls, ranks, experts))
    counts[:, :, -1] = 0
    return counts


def _trace(**changes: Any) -> Trace:
    """Two steps of two layers, two micro-batches in the second; the last call is empty."""
    counts = _counts(6)
    counts[-1] = 0
    values: dict[str, Any] = {
        "step_C": np.array([0, 0, 1, 1, 1, 1]),
        "micro_batch_C": np.array([0, 0, 0, 0, 1, 1]),
        "layer_C": np.array([0, 3, 0, 3, 0, 3]),
        "counts_CRE": counts,
        "about": {"top_k": 8},
    }
    return Trace(**{**values, **changes})


def _write(path: Path, rows: dict[str, list[Any]], metadata: dict[str, str] | None = None) -> Path:
    pq.write_table(pa.table(rows).replace_schema_metadata(metadata), path)
    return path


ROWS: dict[str, list[Any]] = {
    "step": [0, 0, 1],
    "layer": [0, 0, 0],
    "source": [0, 1, 0],
    "expert": [1, 3, 0],
    "count": [5, 6, 7],
}


def test_round_trip(tmp_path: Path) -> None:
    trace = _trace()
    read = read_trace(write_trace(tmp_path / "t.parquet", trace))
    for name in ("step_C", "micro_batch_C", "layer_C", "counts_CRE"):
        assert np.array_equal(getattr(read, name), getattr(trace, name)), name
        assert getattr(read, name).dtype == np.int64
    assert (read.ranks, read.experts, read.layers) == (2, 4, (0, 3))
    assert read.about == {"top_k": 8}
    assert np.array_equal(read.of_layer(3), trace.counts_CRE[1::2])
    with pytest.raises(ConfigError, match="layer=2: the trace has layers 0, 3"):
        read.of_layer(2)


def test_schema_is_the_documented_one(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.parquet", _trace())
    schema = pq.read_schema(path)
    kinds = {name: str(schema.field(name).type) for name in schema.names}
    assert kinds == {
        "step": "int64",
        "micro_batch": "int32",
        "layer": "int32",
        "source": "int32",
        "expert": "int32",
        "count": "int64",
        "system": "string",
    }
    assert json.loads(schema.metadata[b"lrmoe"]) == {"format": 1, "ranks": 2, "experts": 4, "top_k": 8}
    assert pq.read_metadata(path).num_rows == 6 * 2 * 4


def test_calls_come_in_order_however_the_rows_lie(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.parquet", _trace())
    table = pq.read_table(path)
    order = np.random.default_rng(1).permutation(table.num_rows)
    pq.write_table(table.take(order), path)
    assert np.array_equal(read_trace(path).counts_CRE, _trace().counts_CRE)


def test_large_counts_and_many_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_GROUP_ROWS", 16)
    trace = _trace(counts_CRE=_counts(6) + 2**40)
    path = write_trace(tmp_path / "t.parquet", trace)
    assert pq.read_metadata(path).num_row_groups == 3
    assert np.array_equal(read_trace(path).counts_CRE, trace.counts_CRE)


def test_files_of_others_need_only_five_columns(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path / "t.parquet", ROWS))
    assert trace.counts_CRE.tolist() == [[[0, 5, 0, 0], [0, 0, 0, 6]], [[7, 0, 0, 0], [0, 0, 0, 0]]]
    assert trace.micro_batch_C.tolist() == [0, 0]
    assert trace.about == {}


def test_systems_are_told_apart(tmp_path: Path) -> None:
    path, counts = tmp_path / "t.parquet", _counts(2)
    with TraceWriter(path) as writer:
        for i, system in enumerate(("megatron", "lrmoe")):
            writer.add(step=0, layer=0, counts_RE=counts[i], system=system)
    assert read_trace(path).system == "megatron"
    assert np.array_equal(read_trace(path).counts_CRE, counts[:1])
    assert np.array_equal(read_trace(path, system="lrmoe").counts_CRE, counts[1:])
    with pytest.raises(ConfigError, match="no calls of system 'symi'; it has megatron, lrmoe"):
        read_trace(path, system="symi")


def test_a_resumed_run_keeps_the_steps_before(tmp_path: Path) -> None:
    path, counts = tmp_path / "t.parquet", _counts(4)
    with TraceWriter(path, about={"top_k": 2}) as writer:
        for step in range(3):
            writer.add(step=step, layer=0, counts_RE=counts[step], system="a")
    with TraceWriter(path, keep_below=2) as writer:
        writer.add(step=2, layer=0, counts_RE=counts[3], system="a")
    assert read_trace(path).step_C.tolist() == [0, 1, 2]
    assert np.array_equal(read_trace(path).counts_CRE, counts[[0, 1, 3]])


def test_the_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(RuntimeError, match="stop"), TraceWriter(path) as writer:  # noqa: PT012
        writer.add(step=0, layer=0, counts_RE=[[1, 2]])
        assert not path.exists()
        raise RuntimeError("stop")
    assert read_trace(path).counts_CRE.tolist() == [[[1, 2]]]
    with TraceWriter(tmp_path / "none.parquet"):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["t.parquet"]


def test_calls_of_different_sizes_are_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.parquet") as writer:
        writer.add(step=0, layer=0, counts_RE=[[1, 2]])
        with pytest.raises(ConfigError, match=r"shape \(1, 3\): the trace holds \(1, 2\)"):
            writer.add(step=1, layer=0, counts_RE=[[1, 2, 3]])


@pytest.mark.parametrize("column", ["step", "layer", "source", "expert", "count"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    rows = {name: values for name, values in ROWS.items() if name != column}
    with pytest.raises(ConfigError, match=f"t.parquet.*no column '{column}'; it has"):
        read_trace(_write(tmp_path / "t.parquet", rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": [5, -6, 7]}, "column 'count' holds -6 in row 1; must not be negative"),
        ({"expert": [-1, 3, 0]}, "column 'expert' holds -1 in row 0"),
        ({"count": [5.0, 6.0, 7.0]}, "column 'count' has type double: must be an integer type"),
        ({"source": ["0", "1", "0"]}, "column 'source' has type string"),
        ({"count": [5, None, 7]}, "column 'count' has 1 missing values"),
        ({"step": [0, 0, 0], "source": [1, 1, 1], "expert": [2, 3, 2]}, "two rows for source 1, expert 2"),
        ({name: [] for name in ROWS}, "no rows|must be an integer type"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, change: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(_write(tmp_path / "t.parquet", {**ROWS, **change}))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"format": 1, "ranks": 2, "experts": 3}, "column 'expert' holds 3; valid: 0 to 2"),
        ({"format": 1, "ranks": 1, "experts": 4}, "column 'source' holds 1; valid: 0 to 0"),
        ({"format": 2, "ranks": 2, "experts": 4}, "format 2 with sizes"),
        ({"format": 1, "ranks": 0, "experts": 4}, r"sizes \[0, 4\]"),
        ({"format": 1}, "metadata cannot be read"),
        ([1], "metadata cannot be read"),
    ],
)
def test_metadata_is_checked(tmp_path: Path, said: object, message: str) -> None:
    path = _write(tmp_path / "t.parquet", ROWS, {"lrmoe": json.dumps(said)})
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_metadata_gives_sizes_that_rows_do_not_reach(tmp_path: Path) -> None:
    said = json.dumps({"format": 1, "ranks": 4, "experts": 8})
    assert read_trace(_write(tmp_path / "t.parquet", ROWS, {"lrmoe": said})).counts_CRE.shape == (2, 4, 8)


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_trace(tmp_path / "none.parquet")
    whole = write_trace(tmp_path / "t.parquet", _trace()).read_bytes()
    for name, content in {"cut": whole[:-20], "empty": b"", "text": b"step,layer\n1,2\n"}.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}.*not a readable Parquet file"):
            read_trace(path)
    broken = bytearray(whole)
    broken[20:200] = bytes(180)
    (tmp_path / "broken").write_bytes(bytes(broken))
    with pytest.raises(ConfigError, match="not a readable Parquet file"):
        read_trace(tmp_path / "broken")


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("note,expert,step,layer,source,count\nx,1,0,0,0,5\ny,3,0,0,1,6\nz,0,1,0,0,7\n")
    assert np.array_equal(
        read_csv(path).counts_CRE, read_trace(_write(tmp_path / "t.parquet", ROWS)).counts_CRE
    )
    assert read_csv(path, ranks=4, experts=8).counts_CRE.shape == (2, 4, 8)
    assert load(path).counts_CRE.shape == (2, 2, 4)
    path.write_text("step,micro_batch,layer,source,expert,count\n0,1,0,0,0,5\n0,0,0,0,0,6\n")
    assert read_csv(path).counts_CRE.tolist() == [[[6]], [[5]]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,layer,source,count\n0,0,0,5\n", "no column 'expert'"),
        ("0,0,0,0,5\n", "no column 'step'"),
        ("", "no column 'step'"),
        ("step,layer,source,expert,count\n", "no rows"),
        ("step,layer,source,expert,count\n0,0,0,0,many\n", "not a table of integers"),
        ("step,layer,source,expert,count\n0,0,0,0,1.5\n", "not a table of integers"),
        ("step,layer,source,expert,count\n0,0,0\n", "not a table of integers"),
        ("step,layer,source,expert,count\n0,0,0,0,-5\n", "must not be negative"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_csv(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,0,0,2000000000,1", "column 'expert' holds 2000000000 in row 1; valid: 0 to 65535"),
        ("0,0,9223372036854775807,0,1", "column 'source' holds 9223372036854775807 in row 1"),
        ("0,0,65535,65535,1", "1 calls of 65536 x 65536 counts are too many .* source is in row 1"),
    ],
)
def test_a_stray_id_is_named_before_room_is_made_for_it(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"step,layer,source,expert,count\n0,0,0,0,1\n{row}\n")
    with pytest.raises(ConfigError, match=message):
        read_csv(path)


def test_sizes_are_stated_or_found(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("step,layer,source,expert,count\n0,0,0,0,1\n")
    assert not read_csv(path).sized
    assert not read_csv(path, ranks=2).sized
    assert read_csv(path, ranks=2, experts=4).sized
    with pytest.raises(ConfigError, match="65537 ids of column 'expert': at most 65536"):
        read_csv(path, experts=65537)


def test_a_run_folder_stands_for_its_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.parquet", _trace())
    assert load(tmp_path).counts_CRE.shape == (6, 2, 4)
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "elsewhere.csv" / "x")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "elsewhere.csv")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"\[traces\]"):
        read_trace(tmp_path / "t.parquet")
