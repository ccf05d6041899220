"""trace.parquet of a training run: what the layers counted, through a resume and over ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from lrmoe.telemetry import CallRecord
from lrmoe.telemetry import traces as telemetry
from lrmoe.telemetry.traces import TraceWriter, read_trace
from lrmoe.training import traces
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from lrmoe.training.process import Process
from lrmoe.training.run import train
from lrmoe.training.traces import TraceLog
from tests.distributed.pool import Pool
from tests.telemetry.records import record
from tests.training.tiny import CPU, tiny_config

ALONE = Process(group=None, device=CPU, rank=0, world_size=1)


def two_ranks(config: TrainConfig) -> list[list[int]]:
    """Sums over experts of the counts that this rank's records hold; empty where it keeps none."""
    trainer = Trainer(config, dist.group.WORLD)
    records = trainer.step().records
    return [r.counts_RE.sum(axis=1).tolist() for r in records if r.counts_RE is not None]


def test_a_run_leaves_a_trace_that_a_resume_goes_on_with(tmp_path: Path) -> None:
    loop = {"train": {"steps": 2, "checkpoint_every": 1, "eval_every": 2, "accumulate": 2}}
    train(tiny_config(tmp_path, **loop), ALONE, show_progress=False)
    path = tmp_path / "run" / "trace.parquet"
    first = read_trace(path)
    assert (first.ranks, first.experts, first.layers) == (1, 4, (0, 1))
    assert first.about == {"model": "qwen3_moe", "top_k": 2, "hidden": 32, "width": 16}
    assert [
        *zip(first.step_C.tolist(), first.micro_batch_C.tolist(), first.layer_C.tolist(), strict=True)
    ] == [(step, micro, layer) for step in (0, 1) for micro in (0, 1) for layer in (0, 1)]
    assert (first.counts_CRE.sum(axis=(1, 2)) == 2 * 16 * 2).all()
    loop["train"]["steps"] = 3
    train(tiny_config(tmp_path, **loop), ALONE, resume=True, show_progress=False)
    both = read_trace(path)
    assert np.array_equal(both.counts_CRE[:8], first.counts_CRE)
    assert both.step_C.max() == 2


def test_no_trace_where_none_is_wanted(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, train={"steps": 1, "trace": False}), ALONE, show_progress=False)
    assert not (tmp_path / "run" / "trace.parquet").exists()


@pytest.mark.parametrize("asked", [None, True])
def test_without_pyarrow_a_run_goes_on_and_speaks_only_when_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: bool | None,
) -> None:
    monkeypatch.setattr(traces, "can_write", lambda: False)
    loop = {"steps": 1} if asked is None else {"steps": 1, "trace": asked}
    with caplog.at_level(logging.INFO):
        train(tiny_config(tmp_path, train=loop), ALONE, show_progress=False)
    assert not (tmp_path / "run" / "trace.parquet").exists()
    assert ('pip install -e ".[traces]"' in caplog.text) == (asked is True)
    assert ("pyarrow is not" in caplog.text) == (asked is True)


def call(step: int, ranks: int = 1) -> CallRecord:
    return record(step=step, counts_RE=np.full((ranks, 4), step))


def resume_on_two(config: TrainConfig) -> int:
    group = dist.group.WORLD
    process = Process(group=group, device=CPU, rank=dist.get_rank(), world_size=2)
    return train(config, process, resume=True, show_progress=False)["steps"]


@pytest.mark.distributed
def test_resuming_on_another_number_of_ranks_begins_a_new_file(pool2: Pool, tmp_path: Path) -> None:
    loop = {"train": {"steps": 2, "checkpoint_every": 1}}
    train(tiny_config(tmp_path, **loop), ALONE, show_progress=False)
    loop["train"]["steps"] = 3
    assert pool2.run(resume_on_two, tiny_config(tmp_path, **loop)) == [3, 3]
    before, after = (read_trace(tmp_path / "run" / name) for name in ("trace-1.parquet", "trace.parquet"))
    assert (before.ranks, before.step_C.tolist()) == (1, [0, 0, 1, 1])
    assert (after.ranks, after.step_C.tolist()) == (2, [2, 2])


def test_sizes_may_change_again_and_a_new_run_clears_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TraceLog(tmp_path) as trace:
        trace.add([call(step, ranks) for step, ranks in enumerate((1, 2, 2, 1))])
    assert (
        "calls are of 2 ranks and 4 experts from here on; those of 1 ranks and 4 experts are in trace-1.parquet"
        in (caplog.text)
    )
    assert [read_trace(path).step_C.tolist() for path in sorted(tmp_path.iterdir())] == [[0], [1, 2], [3]]
    with TraceLog(tmp_path) as trace:
        trace.add([call(7)])
    assert [path.name for path in tmp_path.iterdir()] == ["trace.parquet"]


@pytest.mark.parametrize("damage", ["cut", "text", "other columns"])
def test_an_earlier_trace_that_cannot_be_read_is_set_aside(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.parquet"
    with TraceLog(tmp_path) as trace:
        trace.add([call(0)])
    if damage == "other columns":
        pq.write_table(pa.table({"a": [1]}), path)
    else:
        path.write_bytes(b"nonsense" if damage == "text" else path.read_bytes()[:-20])
    bad = path.read_bytes()
    with TraceLog(tmp_path, resume_step=1) as trace:
        trace.add([call(1)])
    assert "it is now trace.parquet.unreadable, and a new trace.parquet begins" in caplog.text
    assert read_trace(path).step_C.tolist() == [1]
    assert (tmp_path / "trace.parquet.unreadable").read_bytes() == bad


@pytest.mark.parametrize("method", ["_flush", "__init__"])
def test_trouble_in_pyarrow_is_a_warning(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise pa.ArrowCapacityError("too much")

    monkeypatch.setattr(TraceWriter, method, fail)
    with TraceLog(tmp_path) as trace:
        trace.add([call(0), call(1)])
    assert caplog.text.count("ends here, the run goes on: ArrowCapacityError: too much") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_trace_given_up_midway_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TraceLog(tmp_path) as trace:
        trace.add([call(0)])
    monkeypatch.setattr(telemetry, "_GROUP_ROWS", 4)  # every call is written at once
    with TraceLog(tmp_path, resume_step=1) as trace:
        trace.add([call(1)])
        assert (tmp_path / "trace.parquet.part").exists()
        monkeypatch.setattr(TraceWriter, "add", lambda *_, **__: 1 / 0)
        trace.add([call(2)])
    assert read_trace(tmp_path / "trace.parquet").step_C.tolist() == [0]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.distributed
def test_rank_zero_keeps_the_counts_of_all_sources(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(two_ranks, tiny_config(tmp_path)) == [[[64, 64], [64, 64]], []]
