"""What the documents tell users to write works as printed, and what they say about figures is what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.telemetry import PARTS, PHASES
from tests.integrations.models import make_model, make_tokens, run

ROOT = Path(__file__).resolve().parents[2]
MODEL = "Qwen/Qwen3-30B-A3B"
PAGES = ("README.md", "docs/quickstart.md", "docs/support.md", "docs/when-it-helps.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def test_every_snippet_that_trains_sets_training_mode():
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


def torchrun(script: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as a user would, on two gloo processes, offline."""
    script.write_text(code, encoding="utf-8")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(launch, capture_output=True, text=True, timeout=100, check=False, env=environment)


@pytest.mark.distributed
def test_expert_parallel_snippet_runs_as_printed(tmp_path: Path, saved: str):
    snippet = next(block for block in blocks("docs/quickstart.md") if "ep_implementation" in block)
    assert MODEL in snippet
    done = torchrun(tmp_path / "train.py", snippet.replace(MODEL, saved))
    assert done.returncode == 0, done.stderr
    assert "lrmoe: 2 MoE layers over 2 ranks: backward keeps 70% of" in done.stderr
    assert "UserWarning: lrmoe" not in done.stderr
    assert done.stdout.startswith(
        "lrmoe after 40 optimizer steps: 80 training calls of 2 MoE layers (40 warmup, 40 always)\n"
        "backward kept 85.0% of the (token, expert) pairs; busiest rank "
    )


def test_telemetry_page_lists_every_key_and_no_other():
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, LRMoEConfig(observe=True))
    run(model, make_tokens())
    summary, figures = handle.summary(), handle.figures()
    page = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    tables = [rest.split("\n\n")[0] for rest in page.split("| key |")[1:]]
    listed = [set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) for table in tables]
    assert listed == [summary.keys() | {"check", "control"}, summary["observed"]["0.3"].keys()]
    named = re.findall(r"`(lrmoe/[\w<>]+)`", "".join(re.findall(r"^\| `lrmoe/.*$", page, re.MULTILINE)))
    known = {name for name in figures if not name.endswith("_worst")}
    checks = {"lrmoe/check_cosine", "lrmoe/check_relative_error", "lrmoe/check_layer"}
    written = {n.replace("<phase>", p).replace("<part>", q) for n in named for p in PHASES for q in PARTS}
    assert written == known | checks
