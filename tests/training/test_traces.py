"""trace.parquet of a training run: what the layers counted, through a resume and over ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from lrmoe.telemetry.traces import read_trace
from lrmoe.training import traces
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from lrmoe.training.process import Process
from lrmoe.training.run import train
from tests.distributed.pool import Pool
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


@pytest.mark.distributed
def test_rank_zero_keeps_the_counts_of_all_sources(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(two_ranks, tiny_config(tmp_path)) == [[[64, 64], [64, 64]], []]
