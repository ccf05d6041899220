from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lrmoe.training.metrics import MetricsWriter, Progress, StepMetrics
from lrmoe.training.records import _decode, _encode
from tests.telemetry.records import record


def metrics(step: int = 1, *, skipped: bool = False) -> StepMetrics:
    ours = [record(0), record(1, kept=90)]
    theirs = [record(0, ms={"experts": 5.0}, energy_dropped=2.0), record(1, kept=90)]
    return StepMetrics(
        step=step,
        loss=2.5,
        lr=1e-3,
        grad_norm=1.0,
        skipped=skipped,
        tokens=2000,
        step_ms=500.0,
        records=ours,
        records_by_rank=[ours, theirs],
    )


def test_sums_of_a_step() -> None:
    step = metrics()
    assert step.kept_share == pytest.approx(0.8)
    assert step.wire_bytes == 400
    assert step.moe_ms_wall == 6.0
    line = step.as_dict()
    assert line["tokens_per_s"] == pytest.approx(4000)
    assert line["kept_share"] == pytest.approx(0.8)
    assert line["dropped_energy"] == pytest.approx(5 / 40)
    assert line["added_variance"] == pytest.approx(8 / 40)
    assert line["loads"][1] == {
        "layer": 1,
        "forward_R": [60, 40],
        "backward_R": [60, 30],
        "counts_E": [60, 40],
        "quota_E": [60, 30],
    }
    assert line["lrmoe/mem_stash_predicted"] == 900


def test_lines_are_json_and_resuming_cuts_what_came_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, metrics(step).as_dict())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a line cut off by a kill
    with caplog.at_level(logging.INFO), MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.write(3, {"step": 3, "loss": 9.0})
    assert caplog.messages == [f"{tmp_path / 'metrics.jsonl'}: 2 lines after step 2 dropped"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] == 9.0


def test_unreadable_lines_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    bad = [b"{", b"\xff\xfe", b"[1]", b"7", b"{}", b'{"step": "2"}', b"", b"[" * 100_000]
    path.write_bytes(b"\n".join([b'{"step": 1}', *bad, b'{"step": 2}', b'{"step": 3}', b'{"step": 2']))
    with caplog.at_level(logging.INFO), MetricsWriter(tmp_path, resume_step=2):
        pass
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert f"{path}: 8 unreadable lines dropped" in caplog.messages
    assert f"{path}: 2 lines after step 2 dropped" in caplog.messages


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }


def test_without_a_terminal_there_are_log_lines(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO), Progress(20, every=10) as progress:
        for step in range(1, 21):
            progress.update(metrics(step, skipped=step == 20))
    assert [m.split("  ")[0] for m in caplog.messages] == ["step 1/20", "step 10/20", "step 20/20"]
    assert "loss 2.5000  kept 0.80  peak 1.20  moe 6 ms  4000 tok/s" in caplog.messages[0]
    assert caplog.messages[-1].endswith("skipped: gradient not finite")
    assert capsys.readouterr().err == ""


class Seen:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
        self.closed = 0

    def write(self, step: int, values: Mapping[str, Any], histograms: Mapping[str, Sequence[float]]) -> None:
        self.steps.append((step, dict(values), dict(histograms)))

    def close(self) -> None:
        self.closed += 1


def test_reporters_get_the_line_and_histograms_and_are_closed(tmp_path: Path) -> None:
    seen = Seen()
    with MetricsWriter(tmp_path, reporters=[seen]) as writer:
        writer.write(1, {"step": 1, "loss": 2.0}, {"lrmoe/layer0/counts_E": [1, 2]})
        writer.write(2, {"step": 2, "loss": 1.0})
    assert seen.steps == [
        (1, {"step": 1, "loss": 2.0}, {"lrmoe/layer0/counts_E": [1, 2]}),
        (2, {"step": 2, "loss": 1.0}, {}),
    ]
    assert seen.closed == 1
    assert "counts_E" not in (tmp_path / "metrics.jsonl").read_text()


def test_records_of_other_ranks_keep_their_own_memory() -> None:
    own = record(0)
    other = record(
        0, peak_predicted=11, peak_measured=7, mem={"stash": 5}, mem_predicted={"stash": 6, "outputs": 2}
    )
    found = _decode(own, _encode(other, []), [])
    assert (found.peak_predicted, found.peak_measured) == (11, 7)
    assert (found.mem["stash"], found.mem_predicted["stash"], found.mem_predicted["outputs"]) == (5, 6, 2)
    assert isinstance(found.mem_predicted["stash"], int)
