from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit

import lrmoe
from lrmoe import cli
from lrmoe.errors import (
    CheckpointError,
    ConfigError,
    InfeasibleError,
    MissingExtraError,
    UnsupportedError,
    require_extra,
)
from lrmoe.experiments.compare.config import CompareConfig
from lrmoe.experiments.compare.presets import PRESETS
from lrmoe.experiments.systems.registry import SYSTEMS
from lrmoe.training.config import TrainConfig
from tests.command import Run, in_process
from tests.training.tiny import SHAPE, tiny_config

COMMANDS = (
    "train",
    "compare",
    "ablate",
    "simulate",
    "replay",
    "report",
    "plan",
    "export",
    "import",
    "doctor",
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the entry point in this process."""
    return in_process(monkeypatch, capsys)


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def small_run(folder: Path, steps: int = 3) -> list[str]:
    """Options that train the tiny test model in `folder`."""
    tiny_config(folder).write(folder / "tiny.toml")
    return ["train", "--config", str(folder / "tiny.toml"), "--steps", str(steps)]


def test_only_commands_that_exist_are_listed(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    listed = done.out.split("Commands:")[1].split("Example:")[0]
    assert [line.split()[0] for line in listed.strip().splitlines()] == list(COMMANDS)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_ends_with_an_example(run: Run, command: tuple[str, ...]) -> None:
    done = run(*command, "--help")
    assert done.code == 0
    assert done.out.strip().splitlines()[-1].strip().startswith("Example: lrmoe ")


def words(text: str) -> str:
    return " ".join(text.split())


def test_train_help_names_all_that_a_run_leaves(run: Run, tmp_path: Path) -> None:
    said = words(run("train", "--help").out)
    assert run(*small_run(tmp_path, 1), "--set", "train.checkpoint_every=1").code == 0
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "trace.parquet", "checkpoints"} <= left
    for name in {*left, "tensorboard", "report.html"}:
        assert f"- {name}" in said
    assert "every file that is neither binary nor hidden" in said


def test_compare_help_describes_systems_presets_and_its_table(run: Run) -> None:
    said = words(run("compare", "--help").out)
    for system in SYSTEMS.values():
        assert f"- {system.name}: {system.about}" in said
    for name, preset in PRESETS.items():
        limits = preset["compare"]
        assert f"- {name}: " in said
        aim = f"to loss {limits['target_loss']}, at most " if "target_loss" in limits else ""
        assert f"{limits['ep']} ranks" in said
        assert f"{aim}{limits['max_steps']} steps" in said
    keys = said.split("Its keys:")[1].split("Options")[0]
    for field in dataclasses.fields(CompareConfig):
        assert field.name in keys


def test_version(run: Run) -> None:
    assert run("--version").out == f"lrmoe {lrmoe.__version__}\n"


def test_the_package_can_be_run_as_a_module() -> None:
    command = [sys.executable, "-m", "lrmoe", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.startswith(
        "lrmoe "
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "--bogus"), "--bogus"),
        (("train", "--steps", "many"), "--steps"),
        (("train", "--ep", "0"), "--ep"),
        (("train", "--set", "train.stepz=3"), "did you mean 'train.steps'"),
        (("train", "--set", "lrmoe.max_drop=1.5"), "lrmoe.max_drop=1.5"),
        (("train", "--set", "lrmoe.policy=nope"), "or 'my_file.py:MyPolicy'"),
        (("train", "--set", "lrmoe.policy=no-such.py:Mine"), "lrmoe.policy='no-such.py:Mine': no file"),
        (("train", "--preset", "qwen4"), "valid: qwen3-moe-tiny"),
        (("train", "--config", "no-such.toml"), "no-such.toml"),
        (("train", "--set", "data.path=no-such-text", "--set", "train.device=cpu"), "no-such-text"),
        (("nonsense",), "nonsense"),
        (("report",), "RUN"),
    ],
)
def test_bad_usage_is_code_2_and_says_what(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.mark.parametrize("empty", ["", " , "])
@pytest.mark.parametrize(
    ("command", "option", "valid"),
    [
        ("compare", "systems", "megatron, fastermoe"),
        ("compare", "models", "qwen3-moe-tiny"),
        ("compare", "seeds", "integers"),
        ("compare", "aux", "numbers"),
        ("compare", "targets", "numbers"),
        ("ablate", "seeds", "integers"),
        ("ablate", "regime", "scratch, continued, memorise"),
        ("ablate", "scores", "lrm, grad_norm"),
        ("ablate", "estimators", "sampled, topk"),
        ("ablate", "drops", "numbers"),
        ("ablate", "quota-rule", "variance, count"),
        ("ablate", "router-grad", "auto, full, retained"),
        ("ablate", "select-in", "backward, forward"),
        ("simulate", "systems", "megatron, fastermoe"),
        ("replay", "systems", "megatron, fastermoe"),
    ],
)
def test_an_option_that_names_nothing_is_bad_usage(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    option: str,
    valid: str,
    empty: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(command, f"--{option}", empty)
    assert done.code == 2
    assert f"--{option} {empty!r}: " in done.err
    assert valid in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x=1: bad"), 2),
        (UnsupportedError("has_bias: refused"), 2),
        (InfeasibleError("needs 3 bytes"), 3),
        (CheckpointError("partial"), 1),
        (MissingExtraError("pip install"), 1),
        (KeyError("lost"), 1),
    ],
)
def test_errors_are_one_line_and_a_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    monkeypatch.setattr(cli.training, "_train", raising(error))
    done = run("train")
    assert done.code == code
    assert done.err.startswith("error: ")
    assert str(error) in done.err
    assert len(done.err.splitlines()) == 1
    shown = run("train", "--debug")
    assert shown.code == code
    assert "Traceback" in shown.err


def test_a_missing_extra_is_named_as_a_checkout_installs_it() -> None:
    with pytest.raises(MissingExtraError, match=r'pip install -e "\.\[report\]"'):
        require_extra("no_such_module", "report")


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        (
            ("train", "--preset", "qwen3-moe-tiny", "--steps", "1", "--set", "train.wandb=mine"),
            "wandb",
            "wandb",
        ),
        (("train", "--preset", "qwen3-moe-tiny", "--steps", "1"), "transformers", "transformers"),
        (("simulate",), "plotly", "report"),
    ],
)
def test_every_missing_extra_ends_with_code_1_and_its_name(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    module: str,
    extra: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    done = run(*command)
    assert done.code == 1
    assert f'is not installed: pip install -e ".[{extra}]"' in done.err
    assert not list(tmp_path.iterdir())


def test_train_leaves_its_folder_and_prints_json_only(run: Run, tmp_path: Path) -> None:
    done = run(
        *small_run(tmp_path),
        "--json",
        "--name",
        "one",
        "--set",
        "train.checkpoint_every=2",
        "--set",
        "train.eval_every=2",
    )
    assert done.code == 0, done.err
    figures = {line["name"]: line for line in map(json.loads, done.out.splitlines())}
    assert all(line.keys() == {"name", "value", "unit", "better", "context"} for line in figures.values())
    folder = tmp_path / "one"
    assert {path.name for path in folder.iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "trace.parquet",
        "summary.json",
        "checkpoints",
    }
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert ["eval_loss" in line for line in lines] == [False, True, True]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["world_size"]) == (3, 1)
    assert figures["train.one.final_loss"]["value"] == summary["final_loss"] == lines[-1]["loss"]
    assert figures["train.one.wire_bytes"]["value"] == 0
    assert 0.7 < figures["train.one.kept_share"]["value"] < 0.9  # one step of three keeps all


def test_an_observing_run_ends_with_a_table(run: Run, tmp_path: Path) -> None:
    done = run(*small_run(tmp_path, 2), "--set", "lrmoe.observe=true", "--json")
    assert done.code == 0, done.err
    table = done.err.split("what backward would have saved")[1].splitlines()
    assert [line.split()[0] for line in table[1:]] == ["max_drop", "0.1", "0.3", "0.5"]
    assert all(line.startswith("{") for line in done.out.splitlines())


def test_a_run_is_replaced_only_when_asked(run: Run, tmp_path: Path) -> None:
    options = small_run(tmp_path, 1)
    assert run(*options).code == 0
    kept = (tmp_path / "run" / "metrics.jsonl").read_text()
    refused = run(*options)
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == kept
    (tmp_path / "run" / "report.html").write_text("of the first run")
    assert run(*options, "--steps", "2", "--overwrite").code == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "run" / "report.html").exists()
    both = run(*options, "--overwrite", "--resume")
    assert both.code == 2
    assert "valid: one of them" in both.err


def test_checkpoints_are_never_overwritten_but_gone_on_from(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = [*small_run(tmp_path, 3), "--set", "train.checkpoint_every=2", "--set", "optim.lr=0.01"]
    assert run(*options).code == 0
    refused = run(*options, "--overwrite")
    assert refused.code == 2
    assert "--resume" in refused.err
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000003")  # as if killed after step 3
    with caplog.at_level(logging.INFO):
        where = ["--set", f"train.runs={tmp_path}", "--name", "run"]
        done = run("train", "--resume", *where, "--steps", "4", "--json")
    assert done.code == 0, done.err
    assert "resumed from step 2" in caplog.messages
    assert f"{tmp_path / 'run' / 'metrics.jsonl'}: 1 lines after step 2 dropped" in caplog.messages
    assert all(json.loads(line)["context"]["steps"] == 4 for line in done.out.splitlines())
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    config = TrainConfig.load(tmp_path / "run" / "config.toml")
    assert (config.optim.lr, config.data.seq_len, config.train.steps) == (0.01, 16, 4), "only --steps changed"


def test_resuming_what_is_not_there_creates_nothing(run: Run, tmp_path: Path) -> None:
    done = run("train", "--resume", "--name", "new", "--set", f"train.runs={tmp_path / 'runs'}")
    assert done.code == 2
    assert f"no run {tmp_path / 'runs' / 'new'} to go on with" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.checkpoint=no-such", "no-such"),
        ("data.path=no-such", "no-such"),
        ("data.tokenizer=no-such.json", "no-such.json"),
        ("model.overrides.no_such=1", "no_such"),
    ],
)
def test_a_run_that_cannot_start_leaves_no_folder(run: Run, tmp_path: Path, override: str, said: str) -> None:
    options = [option for option in small_run(tmp_path) if option]
    if "checkpoint" in override:
        options = ["train", "--set", f"train.runs={tmp_path}", "--name", "run"]
    done = run(*options, "--set", override)
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
@pytest.mark.long
def test_ep_starts_local_processes_and_a_resumed_run_keeps_their_number(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lrmoe.cli", *small_run(tmp_path)]
    first = [*command, "--ep", "2", "--set", "train.checkpoint_every=3"]
    again = [*command, "--steps", "4", "--resume"]
    for arguments, said in ((first, "step 3/3"), (again, "step 4/4")):
        done = subprocess.run([*arguments, "--json"], capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr
        figures = [json.loads(line) for line in done.stdout.splitlines()]
        assert {line["context"]["world_size"] for line in figures} == {2}
        assert next(line["value"] for line in figures if line["name"] == "train.run.wire_bytes") > 0
        assert said in done.stderr
        assert "\x1b" not in done.stderr
    assert "resumed from step 3" in done.stderr.splitlines()


@pytest.mark.distributed
def test_an_error_in_the_processes_keeps_its_code(tmp_path: Path) -> None:
    experts = json.dumps({**SHAPE, "num_experts": 3}).replace(":", " =")
    command = [sys.executable, "-m", "lrmoe.cli", *small_run(tmp_path), "--ep", "2"]
    done = subprocess.run(
        [*command, "--set", f"model.overrides={experts}"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "--ep 2: 3 experts cannot be spread evenly over 2 ranks; valid: 1, 3" in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_export_and_import(run: Run, tmp_path: Path) -> None:
    """A run exported, imported as a run, gone on with, and what each says; bad usage is code 2."""
    assert run(*small_run(tmp_path, 1), "--set", "train.checkpoint_every=1").code == 0
    first, out, new = (str(tmp_path / name) for name in ("run", "out", "new"))
    done = run("export", first, out)
    assert (done.code, done.out) == (0, "")
    assert re.search(rf"^{out}: step 1, 1 file, 0\.\d MB, per-expert, float32$", done.err, re.MULTILINE)
    corpus = ["--config", str(tmp_path / "given.toml"), "--set", "train.steps=2"]
    tables = tomllib.loads((tmp_path / "tiny.toml").read_text())
    del tables["model"], tables["train"]["name"], tables["train"]["runs"]
    (tmp_path / "given.toml").write_text(tomlkit.dumps(tables))
    done = run("import", out, new, *corpus)
    assert done.code == 0, done.err
    said = f"{new}/checkpoints/step-00000000: go on with lrmoe "
    [command] = [line.removeprefix(said) for line in done.err.splitlines() if line.startswith(said)]
    assert run(*command.split()).code == 0
    assert json.loads((tmp_path / "new" / "summary.json").read_text())["steps"] == 2
    for arguments, complaint in (
        (("export", first, out), f"{out}: exists; pass --overwrite"),
        (("export", first, str(tmp_path / "x"), "--step", "7"), "step=7: "),
        (("export", str(tmp_path / "nowhere"), str(tmp_path / "x")), "neither a checkpoint nor a run with"),
        (("import", str(tmp_path / "nowhere"), str(tmp_path / "x")), "no directory with a config.json"),
        (("import", out, new), f"{new}: exists"),
    ):
        refused = run(*arguments)
        assert refused.code == 2
        assert complaint in refused.err
    assert not (tmp_path / "x").exists()
