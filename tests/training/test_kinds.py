"""What kind of run a folder holds, and that no command replaces another's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lrmoe.errors import ConfigError
from lrmoe.experiments.ablate.command import ablate
from lrmoe.experiments.compare.command import compare
from lrmoe.experiments.simulation import simulate
from lrmoe.training.config import TrainConfig
from lrmoe.training.folder import check_free
from lrmoe.training.kinds import kind_of

TRAIN = {"config.toml": "[train]\nsteps = 1\n", "metrics.jsonl": "{}\n"}
COMPARE = {"config.toml": "[compare]\nep = 2\n[train]\n", "metrics.jsonl": "{}\n"}
MATRIX = {"config.toml": "[compare]\nep = 2\n", "cells/one/metrics.jsonl": "{}\n"}
ABLATE = {"config.toml": "[ablate]\naux = 0.0\n", "cells/one/steps.jsonl": "{}\n"}
HEADLINE = {"trajectories/one/DONE": "1\n"}
KINDS = {
    "train": TRAIN,
    "compare": COMPARE,
    "matrix": MATRIX,
    "ablate": ABLATE,
    "headline": HEADLINE,
    "plan": {"capacity.csv": "model\n"},
    "replay": {"summary.json": '{"kind": "replay"}'},
}


def lay(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def tree(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_is_known_by_what_it_left(tmp_path: Path, kind: str) -> None:
    lay(tmp_path, KINDS[kind])
    assert kind_of(tmp_path) == kind


def test_a_finished_run_says_what_it_is(tmp_path: Path) -> None:
    lay(tmp_path, {**ABLATE, "summary.json": '{"kind": "matrix"}'})
    assert kind_of(tmp_path) == "matrix"
    (tmp_path / "summary.json").write_text('{"systems": {}}')
    assert kind_of(tmp_path) == "compare"
    (tmp_path / "summary.json").write_text('{"loss": 1}')
    assert kind_of(tmp_path) == "train"


def test_nobody_knows_an_empty_folder_a_foreign_one_or_a_run_that_never_began(tmp_path: Path) -> None:
    assert kind_of(tmp_path / "absent") is None
    lay(tmp_path, {"notes.txt": "mine", "config.toml": "[ablate]\n", "metrics.jsonl": ""})
    (tmp_path / "cells").mkdir()
    assert kind_of(tmp_path) is None


def _train() -> None:
    config = TrainConfig.from_dict({"train": {"name": "taken"}})
    check_free(config, overwrite=True)


COMMANDS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "train": (_train, ("train",)),
    "compare": (
        lambda: compare(systems=["megatron"], name="taken", overwrite=True),
        ("compare", "matrix"),
    ),
    "compare of cells": (
        lambda: compare(systems=["megatron"], seeds=[0, 1], name="taken", overwrite=True),
        ("compare", "matrix"),
    ),
    "ablate": (lambda: ablate(grid={}, name="taken", overwrite=True), ("ablate",)),
    "simulate": (lambda: simulate(name="taken", overwrite=True), ("simulate",)),
}


FOREIGN = [(name, kind) for name, (_, own) in COMMANDS.items() for kind in KINDS if kind not in own]


@pytest.mark.parametrize(("command", "kind"), FOREIGN)
def test_overwrite_never_replaces_the_run_of_another_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, kind: str
) -> None:
    run, _ = COMMANDS[command]
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "taken"
    lay(folder, KINDS[kind])
    before = tree(folder)
    words = {"matrix": "a comparison of several cells", "headline": "a run of `make headline`"}
    with pytest.raises(ConfigError, match=words.get(kind, f"holds a run of `lrmoe {kind}`")) as caught:
        run()
    assert "choose another --name, or remove it" in str(caught.value)
    assert tree(folder) == before
