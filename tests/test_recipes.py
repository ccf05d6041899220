"""The code of docs/recipes.md runs, offline, with a tiny model for the named one and stand-ins for other packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer
from typer.testing import CliRunner

from lrmoe.cli import app
from lrmoe.integrations import transformers as lrmoe_hf
from tests.integrations.models import Tokens, make_model
from tests.integrations.trainers import four_steps as arguments

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.filterwarnings("ignore")


def blocks(section: str, language: str) -> list[str]:
    """The blocks of that language under a heading."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, (section, language)
    return found


def block(section: str, language: str) -> str:
    """The first of them."""
    return blocks(section, language)[0]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a model and a tokenizer, and a working directory with texts."""
    monkeypatch.chdir(tmp_path)
    make_model("qwen3", eos_token_id=1).save_pretrained(tmp_path / "model")
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path / "model")
    Path("train.txt").write_text("a b c d e f g h " * 40)
    lines = [json.dumps({"text": "a b c d e f g h " * (1 + number % 3)}) for number in range(16)]
    Path("train.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "model")


def run(code: str, **changes: object) -> dict[str, Any]:
    """Execute a block with other values in its line of constants; what it defined."""
    old = re.search(r"^NAME, .* = .*$", code, re.MULTILINE)
    assert old is not None
    names = old[0].partition(" = ")[0].split(", ")
    assert set(names) == set(changes)
    values = ", ".join(repr(changes[name]) for name in names)
    space: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(code.replace(old[0], f"{', '.join(names)} = {values}"), "recipes.md", "exec"), space)
    return space


def kept(trainer: Any) -> list[float]:
    return [logs["lrmoe/kept_share"] for logs in trainer.state.log_history if "loss" in logs]


def test_trainer(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("Transformers Trainer", "python").replace("max_drop=0.3", "max_drop=0.3, warmup_steps=1")
    space = run(code, NAME=tiny, LENGTH=16, STEPS=3)
    assert kept(space["trainer"]) == pytest.approx([1.0, 0.7, 0.7], abs=0.02)
    assert "lrmoe after 3 optimizer steps" in capsys.readouterr().out


def test_trl(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    trl = pytest.importorskip("trl", reason="needs the extra trl")
    assert f"with trl {trl.__version__}" in PAGE
    code = block("TRL SFTTrainer", "python").replace("max_drop=0.3", "max_drop=0.3, warmup_steps=1")
    code = code.replace('report_to="none"', 'report_to="none", use_cpu=True')
    space = run(code, NAME=tiny, STEPS=3)
    assert kept(space["trainer"]) == pytest.approx([1.0, 0.7, 0.7], abs=0.02)
    assert "lrmoe after 3 optimizer steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "files"),
    [
        ("Expert parallel, one node", ["examples/ep_torchrun.py"]),
        (
            "Trainer, expert parallel",
            [f"tests/integrations/{name}.py" for name in ("test_resume", "trainers", "ranks")],
        ),
    ],
)
def test_the_calls_of_an_expert_parallel_recipe_are_those_of_what_runs_it(
    section: str, files: list[str]
) -> None:
    """On two processes, in tests/test_examples.py and tests/integrations/test_resume.py."""
    runs = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    code = block(section, "python")
    calls = set(re.findall(r"[\w.]+(?=\()", re.sub(r"#.*", "", code))) - {"lrmoe.LRMoEConfig"}
    assert len(calls) >= 7
    assert sorted(call for call in calls if f"{call}(" not in runs) == []
    assert 'ep_implementation="lrmoe"' in code


@pytest.mark.parametrize(
    "section", ["Expert parallel, one node", "Expert parallel, two nodes", "Slurm", "ms-swift"]
)
def test_shell_is_shell(section: str) -> None:
    for code in blocks(section, "bash"):
        command = ["bash", "-n"]
        done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("section", ["Expert parallel, one node", "Expert parallel, two nodes", "Slurm"])
def test_torchrun_knows_its_options(section: str) -> None:
    from torch.distributed.run import get_args_parser

    variables = {'"$SLURM_NNODES"': "2", '"$SLURM_JOB_ID"': "7", '"$first:29500"': "node:29500"}
    for code in blocks(section, "bash"):
        command = code.partition("torchrun ")[2].replace("\\\n", " ").split()
        parsed = get_args_parser().parse_args([variables.get(word, word) for word in command])
        assert parsed.nproc_per_node == "8"
        assert (parsed.training_script, parsed.module) in {("train.py", False), ("lrmoe.cli", True)}
        if parsed.module:  # the run file is not there: everything before that was understood
            done = CliRunner().invoke(app, parsed.training_script_args)
            assert "run.toml: cannot be read" in str(done.exception)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    """A module that is not installed."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    vars(sys.modules[name]).update(content)


def test_axolotl_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "axolotl.integrations.base", BasePlugin=object)
    space: dict[str, Any] = {}
    exec(block("Axolotl", "python"), space)
    assert "lrmoe_axolotl.LRMoEPlugin" in block("Axolotl", "yaml")
    plugin, model = space["LRMoEPlugin"](), make_model("qwen3")
    plugin.post_model_load({}, model)
    trainer = Trainer(model, arguments(tmp_path, max_steps=2), train_dataset=Tokens(64))
    for callback in plugin.add_callbacks_post_trainer({}, trainer):
        trainer.add_callback(callback)
    trainer.train()
    assert len(kept(trainer)) == 2


def test_swift_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {}
    stand_in(monkeypatch, "swift.callbacks", callbacks_map=known)
    exec(block("ms-swift", "python"), {})
    args = arguments(tmp_path, max_steps=2)
    callback = known["lrmoe"](args, object())  # built before its trainer has a model
    assert isinstance(callback, lrmoe_hf.LRMoECallback)
    trainer = Trainer(make_model("qwen3"), args, train_dataset=Tokens(64), callbacks=[callback])
    trainer.train()
    assert len(kept(trainer)) == 2
    assert callback.handle is not None
    assert callback.handle.clock.step == 2


def test_every_recipe_says_whether_it_is_tested() -> None:
    rows = dict(re.findall(r"^\| \[(.+?)\]\(.*?\) \| (.+) \|$", PAGE, re.MULTILINE))
    assert list(rows) == re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert all(state.startswith(("Run in CI", "Untested")) for state in rows.values())
