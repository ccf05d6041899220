"""The check for a borrowed GPU machine: runs here on tiny shapes, and notices what is wrong."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from lrmoe import ops

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
# On the way to a sigmoid of 0, as on a device, which says nothing.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def path() -> Iterator[None]:
    sys.path.append(str(BENCHMARKS))  # its scripts find each other there
    yield
    sys.path.remove(str(BENCHMARKS))


def run(*options: str) -> tuple[int, str, str]:
    """The command with some options: exit code and what it wrote."""
    check = importlib.import_module("gpu_check")
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as said,
        mock.patch.object(sys, "argv", ["gpu_check.py", "--dry-run", "--seed", "3", *options]),
    ):
        code = check.main()
    return code, printed.getvalue(), said.getvalue()


@pytest.fixture(scope="module")
def whole(path: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str]:
    """All of it, kernels in the interpreter where triton is installed."""
    out = tmp_path_factory.mktemp("check") / "figures.jsonl"
    code, printed, said = run("--json", "--out", str(out))
    assert out.read_text() == printed
    return code, printed, said


def test_dry_run_passes_and_prints_figures(whole: tuple[int, str, str]) -> None:
    code, printed, said = whole
    assert code == 0, said
    assert said.rstrip().endswith("all checks passed")
    figures = {item["name"]: item for item in map(json.loads, printed.splitlines())}
    for item in figures.values():
        assert item.keys() == {"name", "value", "unit", "better", "context"}
    for model in ("qwen3_30b_a3b", "glm_4_5_air"):
        assert figures[f"gpu_check.{model}.drop0.kept_share"]["value"] == 1
        assert abs(figures[f"gpu_check.{model}.drop0.5.kept_share"]["value"] - 0.5) < 0.01
        for name in ("gemms", "plain_loop", "transformers_grouped_mm", "drop0.2"):
            assert figures[f"gpu_check.{model}.{name}.ms"]["value"] > 0
        assert figures[f"gpu_check.{model}.pass.activation_backward.ops.rate"]["value"] > 0
        assert figures[f"gpu_check.replay.{model}.lrmoe.backward_memory_over_megatron"]["value"] > 0
    assert figures["gpu_check.layer.small.fp32.drop0.3.topk.error_over_limit"]["value"] <= 1
    cases = {name.split(".")[2] for name in figures if name.startswith("gpu_check.cases.")}
    assert cases == {"u02", "u06", "u07", "u09", "u10", "u12", "u26", "u27", "u33"}
    (row,) = [line for line in said.splitlines() if line.startswith("glm_4_5_air.drop0.5.over_grouped_mm")]
    assert len(row.split()) == 4, "measured beside what is expected"
    assert "transformers' sonicmoe: " in said


def test_every_kernel_is_among_what_is_checked(whole: tuple[int, str, str]) -> None:
    pytest.importorskip("triton")
    figures = [json.loads(line)["name"].removeprefix("gpu_check.") for line in whole[1].splitlines()]
    names = {name.removeprefix("triton.") for name in figures if name.startswith("triton.")}
    checked = {name.split(".")[-2] for name in names if name.endswith("error_over_limit")}
    products = {"forward", "input_grad", "weight_grad", "weight_grad_added", "gathered"}
    moves = {"combine", "combine_fp32_weights", "sum", "gather_scaled", "row_norms", "abs_sums"}
    assert checked == products | moves | {"silu", "gelu", "gelu_tanh", "silu_norms"}
    assert {"select.topk.differing_rows", "select.sampled.differing_rows", "bf16.misplaced"} <= names


def test_kernels_are_left_out_where_they_cannot_run() -> None:
    done = subprocess.run(
        [sys.executable, "gpu_check.py", "--dry-run", "--only", "kernels"], cwd=BENCHMARKS, capture_output=True,
        text=True, timeout=100, check=True, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert "\nTriton kernels: " in done.stdout
    assert "triton.fp32" not in done.stdout


@pytest.fixture
def cases() -> ModuleType:
    return importlib.import_module("gpu_cases")


def failed(cases: ModuleType, case: str) -> list[str]:
    report = importlib.import_module("gpu_report").Report(seed=0, device=torch.device("cpu"))
    cases.CASES[case](report, torch.device("cpu"), 0)
    found: list[str] = report.failed
    return found


@pytest.mark.parametrize("case", ["U02", "U06", "U09", "U10", "U12", "U33"])
def test_a_case_fails_where_results_differ(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    right = cases.run_layer
    monkeypatch.setattr(cases, "run_layer", lambda *args: [t + torch.rand_like(t) for t in right(*args)])
    assert failed(cases, case)


def test_a_case_fails_where_rows_are_misplaced_or_memory_grows(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, kept = cases.run_layer, []
    with monkeypatch.context() as patch:
        patch.setattr(cases.ops, "gather_rows", lambda source, index: source.clone())
        assert failed(cases, "U07")
    monkeypatch.setattr(cases, "run_layer", lambda *args: kept.append(right(*args)))
    assert failed(cases, "U26") == ["cases.u26.growth"]
    monkeypatch.setattr(
        cases, "run_layer", lambda layer, case: torch.empty(100_000 if not case.ids.any() else 1)
    )
    assert failed(cases, "U27") == ["cases.u27.hot_over_even"]


def test_a_wrong_gradient_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.grouped_mm_input

    def rolled(*args: Any, **kwargs: Any) -> torch.Tensor:
        return right(*args, **kwargs).roll(1, 0)

    monkeypatch.setattr(ops, "grouped_mm_input", rolled)
    code, printed, _ = run("--only", "ops")
    assert code == 1
    assert "FAILED: ops.fp32.uneven.input_grad" in printed.splitlines()[-1]


def test_rows_that_are_not_written_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "place_rows", lambda target, index, rows: target)
    code, printed, _ = run("--only", "ops")
    assert code == 1
    assert "FAILED: ops.fp32.misplaced" in printed.splitlines()[-1]


def test_a_part_that_breaks_has_failed_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = importlib.import_module("gpu_parts")

    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image is available\nfor this device")

    def ran(report: Any, *_: object) -> None:
        report.at_most("cases.ran", 0, 0, "calls")

    monkeypatch.setattr(parts, "check_ops", broken)
    monkeypatch.setattr(parts, "CASES", {"U02": ran})
    code, printed, said = run("--only", "ops.bf16,cases", "--json")
    assert code == 1
    assert "cases.ran" in printed
    assert "FAILED: ops.bf16 (RuntimeError: no kernel image is available)" in said


def test_a_call_of_the_layer_that_breaks_costs_only_its_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = importlib.import_module("gpu_layer")

    def broken(*_: object) -> None:
        raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(layer, "_multiply", broken)
    code, printed, said = run("--only", "layer.glm_4_5_air.times", "--json")
    assert code == 1
    assert "FAILED: glm_4_5_air.gemms (RuntimeError: out of resources: shared memory)" in said
    names = [json.loads(line)["name"] for line in printed.splitlines()]
    assert "gpu_check.glm_4_5_air.drop0.5.over_drop0" in names
    assert not [name for name in names if "gemms" in name]


def test_what_is_not_likely_to_end_in_time_is_left_out() -> None:
    code, printed, said = run("--only", "cases.u02,cases.u09", "--seconds", "1", "--json")
    assert code == 0
    assert printed == ""
    assert "cases.u02: too little time left\ncases.u09: too little time left\n" in said


def test_a_name_that_is_no_part_is_refused() -> None:
    with pytest.raises(
        SystemExit, match=r"--only cases\.u: must be among ops, kernels, cases, layer, replay"
    ):
        run("--only", "ops,cases.u")


def test_what_is_expected_has_the_names_of_what_is_measured_and_falls_with_the_drop() -> None:
    expected = importlib.import_module("gpu_expected").expected
    layer = importlib.import_module("gpu_layer")
    found = expected(layer.MODELS, layer.DROPS)
    for model, shape in layer.MODELS.items():
        times = [found[f"{model}.drop{drop:g}.ms"] for drop in layer.DROPS]
        assert times == sorted(times, reverse=True)
        rate = 18 * shape.tokens * shape.top_k * shape.hidden * shape.width / found[f"{model}.gemms.ms"] / 1e9
        assert 300 < rate <= 0.65 * 989, "TFLOP/s that are allowed for"
