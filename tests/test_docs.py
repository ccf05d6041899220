"""The documents keep up with the code: generated pages are current, links lead somewhere, code blocks are code."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lrmoe
from lrmoe.experiments.compare.config import CompareConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def _ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _blocks(path: Path) -> list[str]:
    return PYTHON_BLOCK.findall(path.read_text(encoding="utf-8"))


def _anchors(path: Path) -> set[str]:
    """The anchors that a page's headings make, as on the usual forges."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _tool(name: str) -> ModuleType:
    tools = str(ROOT / "tools")
    if tools not in sys.path:
        sys.path.append(tools)  # they find each other there
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return _tool("gen_reference")


@pytest.fixture(scope="module")
def filler() -> ModuleType:
    return _tool("fill_figures")


def _summary(*, reached: bool) -> dict[str, Any]:
    common = {"steps": 100, "moe_time_wall_s": 8.0, "wire_bytes": 2**31, "backward_peak_rows": 50}
    fixed = {**common, "reached": True, "moe_time_critical_s": 4.0, "kept_share": 1.0}
    ours = {**common, "reached": reached, "moe_time_critical_s": 3.0, "kept_share": 0.7}
    context = {"hardware": {"cores": 2, "cpu": "test"}, "versions": {"torch": "2"}, "date": "2026-01-01"}
    systems = {"megatron": fixed, "lrmoe": ours}
    summary = {"target_loss": 2.5, "world_size": 2, "link_bytes_per_s": 100 * 2**20}
    return {**summary, "context": context, "systems": systems}


def test_figures_are_filled_between_the_markers(filler: ModuleType) -> None:
    table = filler.demo_table(_summary(reached=True))
    assert "| MoE-layer time, critical path over the modelled link (s) | 4.0 | 3.0 | 0.750 |" in table
    assert "modelled link of 100 MiB/s" in table
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    once = filler.fill(readme, table)
    assert table in once
    assert filler.fill(once, table) == once
    outside = re.sub(r"(figures:start -->).*(<!-- figures:end)", r"\1\n\2", once, flags=re.DOTALL)
    assert outside == re.sub(r"(figures:start -->).*(<!-- figures:end)", r"\1\n\2", readme, flags=re.DOTALL)


def test_layer_figures_are_words_with_a_column_per_dtype(filler: ModuleType) -> None:
    context = _summary(reached=True)["context"]
    names = {
        "fp32.drop0.2.over_best_peer": 0.8,
        "bf16.drop0.2.over_best_peer": 0.9,
        "fp32.drop0.over_gemms": 1.25,
        "fp32.drop0.over_gemms.t1": 1.3,
        "fp32.drop0.over_gemms.t1.and_more": 9.0,
    }
    lines = [{"name": f"layer.{name}", "value": value, "context": context} for name, value in names.items()]
    lines.append({"name": "memory.bf16.drop0.over_grouped_mm", "value": 0.6, "context": context})
    rows = filler.layer_table(lines).splitlines()
    assert "| | fp32 | bf16 | fp32, 1 thread |" in rows
    assert "| `max_drop=0.2` over the same | 0.800 | 0.900 | - |" in rows
    assert "| `max_drop=0` over its bare matrix products | 1.250 | - | 1.300 |" in rows
    assert any(row.startswith("| peak memory") and row.endswith("| - | 0.600 | - |") for row in rows)
    assert not any("over_" in row for row in rows), "words, not names of figures"


def test_every_layer_figure_has_words(filler: ModuleType) -> None:
    printed = (ROOT / "benchmarks" / "layer.py").read_text(encoding="utf-8")
    assert {name.rsplit(".", 1)[1] for name in filler.LAYER_WORDS} == set(
        re.findall(r"f\"(?:layer|memory)\.\{name\}\.[\w.{}:]+?\.(\w+)\"", printed)
    )


def test_figures_of_an_unreached_target_are_refused(filler: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"systems\.lrmoe\.reached"):
        filler.demo_table(_summary(reached=False))
    with pytest.raises(ValueError, match="figures:start"):
        filler.fill("no markers", "table")


@pytest.mark.parametrize("name", ["configuration.md", "run-file.md", "commands.md", "policies.md"])
def test_generated_page_is_current(generator: ModuleType, name: str) -> None:
    page = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert page == generator.PAGES[name](), "run `make docs`"


def test_configuration_page_names_every_field_and_what_is_valid(generator: ModuleType) -> None:
    page = generator.configuration_page()
    for name in lrmoe.LRMoEConfig().to_dict():
        assert f"| `{name}` |" in page
    assert re.search(r"`drop`.*`\"always\"`, `\"overload\"`, `\"auto\"`", page)
    assert "| `max_added_variance` | `None` | `None`, or a positive number |" in page


def test_run_file_page_names_every_key_of_a_comparison(generator: ModuleType) -> None:
    section = generator.run_page().split("## [compare]")[1]
    assert "| `ep` | `2` | integer >= 2 |" in section
    for field in dataclasses.fields(CompareConfig):
        assert f"| `{field.name}` |" in section


@pytest.mark.parametrize("path", PAGES, ids=_ids)
def test_pages_are_ascii(path: Path) -> None:
    text = path.read_bytes()
    assert text.isascii(), f"first at byte {next(i for i, byte in enumerate(text) if byte > 127)}"


@pytest.mark.parametrize("path", PAGES, ids=_ids)
def test_relative_links_resolve(path: Path) -> None:
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        page = (path.parent / target).resolve() if target else path
        assert page.exists(), link
        assert not anchor or anchor in _anchors(page), link


def test_every_page_is_reachable_from_the_readme() -> None:
    """Following links, as a reader does."""
    seen, todo = set[Path](), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        targets = (link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")))
        todo += [
            (page.parent / t).resolve()
            for t in targets
            if t and "://" not in t and not t.startswith("mailto:")
        ]
    assert set(PAGES) <= seen, sorted(_ids(page) for page in set(PAGES) - seen)


@pytest.mark.parametrize("path", PAGES, ids=_ids)
def test_commands_in_the_text_exist(path: Path) -> None:
    from typer.main import get_command

    from lrmoe.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    text = path.read_text(encoding="utf-8")
    spoken = re.findall(r"`lrmoe ([a-z]+)", text)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    started = [
        command
        for kind, block in blocks
        for command in re.findall(
            r"^\$ lrmoe ([a-z]+)" if kind == "text" else r"^(?:\S+/)?lrmoe ([a-z]+)", block, re.MULTILINE
        )
    ]
    assert {*spoken, *started} <= known


@pytest.mark.parametrize("path", [path for path in PAGES if _blocks(path)], ids=_ids)
def test_python_blocks_parse(path: Path) -> None:
    for block in _blocks(path):
        ast.parse(block)


def test_readme_shows_the_ten_lines_and_the_expert_parallel_form() -> None:
    readme, guide = _blocks(ROOT / "README.md"), _blocks(ROOT / "docs" / "quickstart.md")
    assert len(readme) == 2
    assert readme[0] == guide[0]
    assert guide[1].startswith(readme[1])


def test_quick_start_of_ten_lines_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    page = ROOT / "docs" / "quickstart.md"
    block = _blocks(page)[0]
    statements = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.stmt)]
    assert len(statements) == 10
    command = [sys.executable, "-c", block + "\nprint(handle)\n"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^```text\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    assert shown.splitlines()[:2] == done.stdout.splitlines()[:2]
    number = re.compile(r"\d+(\.\d+)?( [kM]B| bytes)?")  # times, and what hangs on random weights
    assert number.sub("N", shown) == number.sub("N", done.stdout)


def test_versions_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f'\nversion = "{lrmoe.__version__}"\n' in project
    assert f"\nversion: {lrmoe.__version__}\n" in citation


def test_every_dependency_is_pinned_exactly() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins)
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = {name.lower() for name in re.findall(r'"([A-Za-z0-9-]+)>=[0-9.]+"', project)}
    assert {"torch", "transformers", "pytest"} <= wanted
    assert wanted <= pinned
