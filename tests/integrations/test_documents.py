"""What the documents tell users to write works as printed, and what they say about figures is what there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.integrations.transformers._summary import SHORT, short_figures
from lrmoe.telemetry import PARTS, PHASES
from tests.forked import torchrun
from tests.integrations.models import make_model, make_tokens, run

ROOT = Path(__file__).resolve().parents[2]
MODEL = "Qwen/Qwen3-30B-A3B"
PAGES = ("README.md", "docs/quickstart.md", "docs/support.md", "docs/when-it-helps.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def test_every_snippet_that_trains_sets_training_mode() -> None:
    examples = [(ROOT / "examples" / name).read_text("utf-8") for name in ("ep_torchrun.py",)]
    snippets = [block for page in PAGES for block in blocks(page)] + examples + [lrmoe_hf.__doc__]
    enabling = [snippet for snippet in snippets if "lrmoe_hf.enable(" in snippet]
    assert len(enabling) >= 6
    for snippet in enabling:
        assert "model.train()" in snippet, snippet


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model."""
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3").save_pretrained(folder)
    return str(folder)


@pytest.mark.distributed
def test_expert_parallel_snippet_runs_as_printed(tmp_path: Path, saved: str) -> None:
    snippet = next(block for block in blocks("docs/quickstart.md") if "ep_implementation" in block)
    assert MODEL in snippet
    (tmp_path / "train.py").write_text(snippet.replace(MODEL, saved), encoding="utf-8")
    first, second = torchrun(tmp_path / "train.py")
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    said = first[1]
    assert "lrmoe: 2 MoE layers over 2 ranks: backward keeps 70% of" in said
    assert "UserWarning: lrmoe" not in said
    assert (
        "\nlrmoe after 40 optimizer steps: 80 training calls of 2 MoE layers (40 warmup, 40 always)\n"
        "backward kept 85.0% of the (token, expert) pairs; busiest rank "
    ) in said
    assert "lrmoe after" not in second[1]


TELEMETRY = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")


def names_in(heading: str) -> list[set[str]]:
    """Names in the first columns of the page's tables with that heading, placeholders filled in."""
    tables = [rest.split("\n\n")[0] for rest in TELEMETRY.split(f"| {heading} |")[1:]]
    firsts = [" ".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)) for table in tables]
    return [set(filled(re.findall(r"`([\w/<>]+)`", first))) for first in firsts]


def filled(names: list[str]) -> list[str]:
    reasons, drops = ("observe",), ("0.1", "0.3", "0.5")
    values = {"<phase>": PHASES, "<part>": PARTS, "<reason>": reasons, "<drop>": drops}
    for placeholder, words in values.items():
        names = [name.replace(placeholder, word) for name in names for word in words]
    return names


def test_telemetry_page_lists_every_key_and_no_other() -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, LRMoEConfig(observe=True))
    run(model, make_tokens())
    summary, records = handle.summary(), handle.telemetry.records
    assert names_in("key") == [summary.keys() | {"check", "control"}, summary["observed"]["0.3"].keys()]
    figures = {**short_figures(records, 1e3), **handle.figures()}
    known = {name for name in figures if not name.endswith("_worst")}
    checks = {"lrmoe/check_cosine", "lrmoe/check_relative_error", "lrmoe/check_layer"}
    logged = {name for table in names_in("figure") for name in table}
    assert logged == known | checks


def test_telemetry_page_lists_every_field_of_a_record_and_no_other() -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, LRMoEConfig(observe=True))
    run(model, make_tokens())
    (fields,), (attributes,) = names_in("field of `as_dict()`"), names_in("attribute")
    record = handle.telemetry.records[0]
    assert fields == record.as_dict().keys() | {"check_cosine", "check_relative_error"}
    flat = {field.name for field in dataclasses.fields(record)} & fields
    assert {field.name for field in dataclasses.fields(record)} == attributes | flat


def test_telemetry_page_lists_every_decision_and_no_other() -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, LRMoEConfig(drop="auto", max_added_variance=0.1, warmup_steps=0))
    run(model, make_tokens())
    record = handle.telemetry.records[0]
    assert names_in("figure of `as_dict()`") == [record.control.keys()]


def test_telemetry_page_lists_what_a_short_log_has() -> None:
    section = TELEMETRY.split("### The short log of the Trainer")[1].split("\n|")[0]
    assert set(SHORT) <= set(re.findall(r"`(\w+)`", section))
