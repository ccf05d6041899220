"""A comparison of several cells: two seeds by two targets over two gloo processes, killed and gone on with."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lrmoe.errors import ConfigError, InfeasibleError, LRMoEError
from lrmoe.experiments.compare import matrix
from lrmoe.experiments.compare.command import compare, tables_of
from lrmoe.experiments.compare.config import Experiment
from lrmoe.experiments.compare.matrix_folder import make_room
from lrmoe.experiments.compare.matrix_rows import COLUMNS
from lrmoe.report.load import load_run
from lrmoe.report.matrix_figures import figures
from lrmoe.training.launch import WorkerError
from lrmoe.training.locks import locked
from tests.experiments.test_compare import read, tiny

TARGETS = [5.45, 5.0]
CELLS = [f"qwen3-moe-tiny-configured-aux0-seed{seed}" for seed in (3, 4)]


DIES = """
import os
import signal
from pathlib import Path
from lrmoe.planning.policies.llep import LLEP

class Mine(LLEP):
    def __call__(self, problem):
        if Path({marker!r}).exists() and Path({metrics!r}).exists() and Path({metrics!r}).stat().st_size:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(problem)
"""


def options(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Three systems, two seeds, two targets, at most six steps."""
    overrides = [*tiny(tmp_path), "compare.max_steps=6", "compare.smoothing_steps=1", "optim.lr=0.02"]
    return {
        "name": "grid",
        "systems": ["megatron", "lrmoe", f"{tmp_path / 'mine.py'}:Mine"],
        "seeds": [3, 4],
        "targets": TARGETS,
        "overrides": [*overrides, "optim.warmup_steps=1", "lrmoe.replica_slots=2"],
        **changes,
    }


@dataclass
class Stopped:
    """A run whose second cell's processes were killed after its first step, and which was then gone on with."""

    folder: Path
    error: str
    kept: dict[str, bytes]
    partial: set[str]
    said: str
    code: int


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Stopped]:
    tmp_path = tmp_path_factory.mktemp("matrix")
    folder = tmp_path / "runs" / "grid"
    marker, metrics = tmp_path / "die", folder / "cells" / CELLS[1] / "metrics.jsonl"
    (tmp_path / "mine.py").write_text(DIES.format(marker=str(marker), metrics=str(metrics)))
    marker.touch()
    with pytest.raises(LRMoEError) as caught:
        compare(**options(tmp_path))
    kept, partial = trees(folder / "cells" / CELLS[0]), {path.name for path in metrics.parent.iterdir()}
    marker.unlink()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = compare(**options(tmp_path))
    return tmp_path, Stopped(folder, str(caught.value), kept, partial, said.getvalue(), code)


def trees(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, by path."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def summary_of(tmp_path: Path) -> dict[str, Any]:
    loaded = json.loads((tmp_path / "runs" / "grid" / "summary.json").read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.distributed
def test_every_cell_is_a_comparison_of_its_own(finished: tuple[Path, Stopped]) -> None:
    tmp_path, run_ = finished
    folder = run_.folder
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "cells",
        "config.toml",
        "report.html",
        "rows.csv",
        "summary.json",
    }
    assert sorted(path.name for path in (folder / "cells").iterdir()) == CELLS
    first_losses = set()
    for seed, name in zip((3, 4), CELLS, strict=True):
        summary, lines = read(folder / "cells" / name)
        assert (summary["kind"], summary["seed"], summary["targets"]) == ("compare", seed, TARGETS)
        assert {line["system"] for line in lines} == set(summary["systems"])
        first_losses.add(lines[0]["loss"])
        run = load_run(folder / "cells" / name)
        assert run.kind == "compare"
        assert run.config["lrmoe"]["seed"] == seed, "the selection's too, as with --seed"
    assert len(first_losses) == 2, "other seeds start from other weights"
    reached = all(row["reached"] for row in summary_of(tmp_path)["rows"])
    assert run_.code == (0 if reached else 1)


@pytest.mark.distributed
def test_rows_are_those_of_the_cells_and_ratios_are_paired_by_seed(finished: tuple[Path, Stopped]) -> None:
    summary = summary_of(finished[0])
    rows = summary["rows"]
    assert [(r["seed"], r["system"], r["target"]) for r in rows] == [
        (seed, system, target) for seed in (3, 4) for system in summary["systems"] for target in TARGETS
    ]
    for row in rows:
        entry = read(finished[0] / "runs" / "grid" / "cells" / row["cell"])[0]["systems"][row["system"]]
        found = next(item for item in entry["to_target"] if item["target"] == row["target"])
        assert found.items() <= row.items()
    high = {(r["seed"], r["system"]): r for r in rows if r["target"] == TARGETS[0]}
    assert all(row["reached"] and row["steps"] < 6 for row in high.values())
    expected = [high[seed, "lrmoe"]["critical_s"] / high[seed, "megatron"]["critical_s"] for seed in (3, 4)]
    found = paired(summary)
    assert (found["system"], found["against"], found["seeds"]) == ("lrmoe", "megatron", 2)
    assert found["ratio_mean"] == pytest.approx(sum(expected) / 2)
    assert found["standard_error"] == pytest.approx(abs(expected[0] - expected[1]) / 2)


def paired(summary: dict[str, Any]) -> dict[str, Any]:
    """Of lrmoe's time to the first target."""
    [found] = [
        p
        for p in summary["paired"]
        if (p["system"], p["quantity"], p["target"]) == ("lrmoe", "critical_s", TARGETS[0])
    ]
    assert isinstance(found, dict)
    return found


@pytest.mark.distributed
def test_csv_and_figures_hold_the_same_numbers(finished: tuple[Path, Stopped]) -> None:
    tmp_path = finished[0]
    summary = summary_of(tmp_path)
    with (tmp_path / "runs" / "grid" / "rows.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [list(row) for row in written] == [list(COLUMNS)] * len(summary["rows"])
    for text, row in zip(written, summary["rows"], strict=True):
        assert text["system"] == row["system"]
        assert text["critical_s"] == ("" if row["critical_s"] is None else str(row["critical_s"]))
    found = {item["name"]: item for item in figures(summary)}
    name = f"compare.qwen3-moe-tiny.configured.aux0.target{TARGETS[0]:g}.lrmoe"
    ratio = paired(summary)
    assert found[f"{name}.time_to_loss_over_megatron"]["value"] == ratio["ratio_mean"]
    assert found[f"{name}.time_to_loss_over_megatron"]["context"]["standard_error"] == ratio["standard_error"]
    assert found[f"{name}.reached"]["value"] == 1
    assert f"{name.replace('lrmoe', 'megatron')}.time_to_loss_over_megatron" not in found


@pytest.mark.distributed
def test_a_killed_cell_is_named_and_run_again_while_finished_ones_are_kept(
    finished: tuple[Path, Stopped],
) -> None:
    _, run = finished
    assert f"cell 2 of 2, {CELLS[1]}: rank" in run.error
    assert "ended by signal 9" in run.error
    assert "metrics.jsonl" in run.partial
    assert "summary.json" not in run.partial
    assert f"cell 1 of 2, {CELLS[0]}: finished before" in run.said
    assert f"cell 2 of 2, {CELLS[1]}: done in" in run.said
    assert trees(run.folder / "cells" / CELLS[0]) == run.kept
    lines = read(run.folder / "cells" / CELLS[1])[1]
    assert lines[0]["step"] == 1, "from its start"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"targets": [5.45, 4.9]},
            r"seed3 was run with .*compare\.targets was \[5\.45, 5\.0\], now \[5\.45, 4\.9\]",
        ),
        ({"systems": ["lrmoe"]}, r"compare\.systems was"),
        ({"seeds": [4, 5]}, rf"cells that are not asked for now \({CELLS[0]}\)"),
        ({"seeds": [3]}, "holds a comparison of several cells; pass --overwrite"),
        ({"seeds": None, "seed": 9}, "holds a comparison of several cells; pass --overwrite"),
    ],
)
def test_another_configuration_is_refused_and_changes_nothing(
    finished: tuple[Path, Stopped], changes: Mapping[str, Any], message: str
) -> None:
    folder = finished[0] / "runs" / "grid"
    before = trees(folder)
    with pytest.raises(ConfigError, match=message):
        compare(**options(finished[0], **changes))
    assert trees(folder) == before


@pytest.fixture
def without_training(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cells end at once, as a comparison of which nothing is left but its configuration; the second one fails."""
    ran: list[str] = []

    def run(experiment: Any, *, overwrite: bool, place: Any) -> dict[str, Any]:
        ran.append(place.name)
        if experiment.train.train.seed == 4:
            raise ERRORS.pop()
        experiment.folder.mkdir(parents=True)
        experiment.write(experiment.folder / "config.toml")
        summary: dict[str, Any] = {"kind": "compare", "systems": {}, "total_s": 1.0}
        (experiment.folder / "summary.json").write_text(json.dumps(summary))
        return summary

    monkeypatch.setattr(matrix, "compare", run)
    return ran


ERRORS: list[BaseException] = []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerError("rank 1: killed"), LRMoEError),
        (InfeasibleError("too large"), InfeasibleError),
        (ConfigError("no"), ConfigError),
    ],
)
def test_a_failed_cell_is_named_and_the_ones_before_it_stay(
    tmp_path: Path, without_training: list[str], error: Exception, kind: type[Exception]
) -> None:
    ERRORS.append(error)
    (tmp_path / "mine.py").write_text(DIES.format(marker="", metrics=""))
    with pytest.raises(kind, match=f"cell 2 of 3, {CELLS[1]}: {error}") as caught:
        compare(**options(tmp_path, seeds=[3, 4, 5]))
    assert type(caught.value) is kind
    assert without_training == CELLS
    assert summary_of(tmp_path)["cells_finished"] == 1
    assert summary_of(tmp_path)["cells_asked"] == 3


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, without_training: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ERRORS.append(KeyboardInterrupt())
    (tmp_path / "mine.py").write_text(DIES.format(marker="", metrics=""))
    with pytest.raises(KeyboardInterrupt):
        compare(**options(tmp_path))
    assert f"stopped in cell 2 of 2, {CELLS[1]}; the same command goes on with it" in capsys.readouterr().out
    assert summary_of(tmp_path)["cells_finished"] == 1


def test_one_comparison_takes_the_place_of_several_only_with_overwrite(tmp_path: Path) -> None:
    tables = tables_of("demo", None, [f"train.runs={json.dumps(str(tmp_path))}"], {"seeds": [3, 4]})
    experiment = Experiment.from_dict("demo", tables)
    old = experiment.folder / "cells" / CELLS[0]
    old.mkdir(parents=True)
    (experiment.folder / "rows.csv").touch()
    with pytest.raises(ConfigError, match="holds a comparison of several cells; pass --overwrite"):
        make_room(experiment, overwrite=False)
    assert old.is_dir()
    (experiment.folder / "summary.json").write_text('{"kind": "ablate"}')
    for overwrite in (False, True):
        with pytest.raises(
            ConfigError, match="holds a run of `lrmoe ablate`, which `lrmoe compare` does not replace"
        ):
            make_room(experiment, overwrite=overwrite)
    assert old.is_dir()
    (experiment.folder / "summary.json").unlink()
    make_room(experiment, overwrite=True)
    assert list(experiment.folder.iterdir()) == []


def test_several_do_not_take_the_place_of_one_unasked(tmp_path: Path, without_training: list[str]) -> None:
    folder = tmp_path / "runs" / "grid"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "mine.py").write_text(DIES.format(marker="", metrics=""))
    with pytest.raises(ConfigError, match=r"holds an earlier run \(metrics\.jsonl\)"):
        compare(**options(tmp_path))
    assert without_training == []


def test_a_folder_in_which_another_comparison_is_at_work_is_left_alone(
    tmp_path: Path, without_training: list[str]
) -> None:
    folder = tmp_path / "runs" / "grid"
    (tmp_path / "mine.py").write_text(DIES.format(marker="", metrics=""))
    with locked(folder / ".lock"), pytest.raises(ConfigError, match="another `lrmoe compare` is at work"):
        compare(**options(tmp_path))
    assert without_training == []
    assert [path.name for path in folder.iterdir()] == [".lock"]
