from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lrmoe.errors import MissingExtraError
from lrmoe.telemetry.live import TensorBoard, WandB

VALUES = {
    "step": 4,
    "loss": 2.0,
    "lrmoe/kept_share": 0.7,
    "lrmoe/drop_reason": "always",
    "loads": [{"layer": 0}],
}
DRAWN = {"lrmoe/layer0/counts_E": [4, 5, float("nan")], "lrmoe/nothing_by_layer": []}


def test_tensorboard_gets_scalars_and_histograms(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.write(4, VALUES, DRAWN)
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "lrmoe/kept_share"]
    assert [(e.step, e.value) for e in events.Scalars("lrmoe/kept_share")] == [(4, pytest.approx(0.7))]
    assert events.Tags()["histograms"] == ["lrmoe/layer0/counts_E"]
    drawn = events.Histograms("lrmoe/layer0/counts_E")[0]
    assert (drawn.step, drawn.histogram_value.num, drawn.histogram_value.sum) == (4, 2, 9)


def test_a_resumed_run_keeps_the_steps_that_are_done(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, range(1, 6)), (3, range(4, 6))):
        board = TensorBoard(tmp_path, resume_step)
        for step in steps:
            board.write(step, {"loss": float(step if resume_step is None else -step)}, {})
        board.close()
        time.sleep(1.1)  # the second of its start orders the files
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1), (2, 2), (3, 3), (4, -4), (5, -5)]


class FakeRun:
    """What `wandb.init` gives."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.id = options, options["id"] or "made-up"
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """The runs that a stand-in for wandb begins."""
    begun: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        begun.append(FakeRun(options))
        return begun[-1]

    def histogram(values: Any) -> tuple[str, list[float]]:
        return "histogram", list(values)

    fake = types.ModuleType("wandb")
    fake.init, fake.Histogram = init, histogram  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return begun


def test_wandb_gets_the_same_names(tmp_path: Path, runs: list[FakeRun]) -> None:
    shown = WandB("proj", name="run", config={"lrmoe": {"max_drop": 0.3}}, folder=tmp_path)
    shown.write(4, VALUES, DRAWN)
    shown.close()
    (run,) = runs
    assert run.options["project"] == "proj"
    assert run.options["config"] == {"lrmoe": {"max_drop": 0.3}}
    assert run.options["resume"] is None
    assert run.finished
    histogram = ("histogram", [4, 5])
    assert run.logged == [(4, {"loss": 2.0, "lrmoe/kept_share": 0.7, "lrmoe/layer0/counts_E": histogram})]


def test_a_resumed_run_goes_on_at_wandb(tmp_path: Path, runs: list[FakeRun]) -> None:
    WandB("proj", folder=tmp_path).close()
    WandB("proj", folder=tmp_path, resume=True).close()
    WandB("proj", folder=tmp_path).close()
    WandB("proj", folder=tmp_path / "..", resume=True).close()  # begun without it
    wanted = [(None, None), ("made-up", "allow"), (None, None), (None, None)]
    assert [(run.options["id"], run.options["resume"]) for run in runs] == wanted


@pytest.mark.parametrize(
    ("kind", "module", "extra"), [("wandb", "wandb", "wandb"), ("board", "tensorboard", "report")]
)
def test_what_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{module} is needed.*\[{extra}\]"):
        WandB("proj", folder=tmp_path) if kind == "wandb" else TensorBoard(tmp_path)


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(tmp_path: Path) -> None:
    code = (
        "import sys; from lrmoe.telemetry.live import WandB; w = WandB('p', name='n', folder=sys.argv[1]); "
        "w.write(1, {'loss': 1.0}, {'lrmoe/layer0/counts_E': [1, 2, 2]}); w.close()"
    )
    environment = {**os.environ, "WANDB_MODE": "offline"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=100, env=environment)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
