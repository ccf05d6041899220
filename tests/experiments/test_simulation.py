"""The simulate command: folder, JSON lines, tables, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrmoe.errors import ConfigError, InfeasibleError
from lrmoe.experiments.simulation import exit_code, simulate
from lrmoe.report.load import load_run
from lrmoe.telemetry.traces import Trace, write_trace

SMALL: dict[str, Any] = {"ranks": "4", "experts": "16", "top_k": 2, "tokens": 256, "steps": 2, "skip": 1}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, dict[str, dict[str, Any]], str]:
    code = simulate(**{**SMALL, **options}, as_json=True)
    out, err = capsys.readouterr()
    return code, {line["name"]: line for line in map(json.loads, out.splitlines())}, err


def test_json_lines_and_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, err = run(capsys, systems=["megatron", "symi", "lrmoe"], name="one", generator="hot_rank")
    assert code == 0
    assert all(line.keys() == {"name", "value", "unit", "better", "context"} for line in lines.values())
    peak = lines["simulate.R4E16.megatron.forward_peak"]
    assert peak["value"] > 2
    assert (peak["unit"], peak["better"]) == ("mean loads", "lower")
    assert peak["context"]["generator"] == "hot_rank"
    assert lines["simulate.R4E16.lrmoe.kept_share"]["value"] == pytest.approx(0.8, abs=1e-3)
    assert lines["simulate.R4E16.megatron.effective_throughput_20x"]["value"] == pytest.approx(0.4)
    assert "Balance: 4 ranks, 16 experts" in err
    assert "Fairness" in err
    folder = Path("runs/one")
    assert {path.name for path in folder.iterdir()} == {"summary.json", "report.html"}
    loaded = load_run(folder)
    assert (loaded.kind, [s.name for s in loaded.systems]) == ("simulate", ["megatron", "symi", "lrmoe"])


def test_without_json_the_tables_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(**SMALL, systems=["megatron", "ultraep"]) == 0
    out, _ = capsys.readouterr()
    assert "Cost: 4 ranks, 16 experts" in out
    assert "runs/simulate/report.html" in out


def test_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 100, (4, 4, 8))
    step = np.arange(4)
    made = Trace(step_C=step, micro_batch_C=step * 0, layer_C=step * 0, counts_CRE=counts)
    write_trace(tmp_path / "trace.parquet", made)
    nothing = dict.fromkeys(("tokens", "experts", "skip", "steps"))
    code, lines, _ = run(capsys, trace=tmp_path, ranks="4,2", systems=["megatron"], **nothing)
    assert code == 0
    loads = counts.sum(axis=1).reshape(4, 2, 4).sum(axis=2)
    wanted = float(np.mean(loads.max(axis=1) * 2 / loads.sum(axis=1)))
    assert lines["simulate.R2E8.megatron.forward_peak"]["value"] == pytest.approx(wanted)
    rows = ["step,layer,source,expert,count"]
    rows += [f"{s},0,{r},{e},{counts[s, r, e]}" for s in range(4) for r in range(4) for e in range(8)]
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    code, again, _ = run(
        capsys, trace=tmp_path / "t.csv", ranks="4,2", systems=["megatron"], **nothing, name="csv"
    )
    name = "simulate.R4E8.megatron.forward_peak"
    assert again[name]["value"] == lines[name]["value"]


def test_chunks_are_figures_where_any_system_has_more_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"systems": ["megatron", "lrmoe"], "generator": "hot_rank"}
    _, lines, _ = run(capsys, **options)
    assert not [name for name in lines if name.endswith("_chunks")]
    _, lines, err = run(capsys, **options, budget="112MiB")
    found = {
        name.split(".")[2]: line["value"] for name, line in lines.items() if name.endswith(".forward_chunks")
    }
    assert found["megatron"] == 1
    assert found["lrmoe"] > 1
    assert "Chunks: 4 ranks, 16 experts" in " ".join(err.split())


def test_idle_experts_of_a_csv_file_are_given_by_option(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("step,layer,source,expert,count\n0,0,0,0,5\n0,0,1,2,7\n")
    nothing = dict.fromkeys(("tokens", "skip", "steps"))
    code, lines, _ = run(
        capsys, trace=Path("t.csv"), systems=["megatron"], **{**nothing, "ranks": "2", "experts": "4"}
    )
    assert code == 0
    assert lines["simulate.R2E4.megatron.forward_peak"]["value"] == pytest.approx(7 / 6)


def test_a_policy_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lrmoe.planning.plan import LayerPlan\n\n\n"
        "def Home(problem):\n    return LayerPlan.at_home(problem, problem.counts_E, 'off')\n"
    )
    _, lines, _ = run(capsys, systems=["megatron", "mine.py:Home"])
    values = [lines[f"simulate.R4E16.{s}.forward_peak"]["value"] for s in ("megatron", "mine.py:Home")]
    assert values[0] == values[1]


def test_exit_code_three_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    fits, misses = {"infeasible_calls": 0}, {"infeasible_calls": 0, "over_budget_calls": 1}
    assert exit_code({"scenarios": [{"systems": {"a": misses, "b": fits}}]}) == 0
    assert exit_code({"scenarios": [{"systems": {"a": fits}}, {"systems": {"a": misses}}]}) == 3
    code, lines, err = run(capsys, systems=["megatron"], generator="hot_rank", budget="112MiB")
    assert code == 3
    assert lines["simulate.R4E16.megatron.over_budget_calls"]["value"] == 2
    assert "megatron does not fit the budget in 2 of 2 calls" in " ".join(err.split())
    code, lines, _ = run(capsys, systems=["megatron"], generator="balanced", budget="1GiB")
    assert (code, lines["simulate.R4E16.megatron.over_budget_calls"]["value"]) == (0, 0)
    with pytest.raises(InfeasibleError, match="home experts"):
        simulate(**SMALL, budget="1MiB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": "4;8"}, "ranks='4;8': must be whole numbers with commas"),
        ({"options": ["sigma"]}, "option 'sigma': must be KEY=VALUE"),
        ({"options": ["sigma=wide"]}, "sigma='wide': must be a number"),
        ({"generator": "hot_set", "options": ["hot=1.5"]}, "hot=1.5: must be a whole number"),
        ({"options": ["colour=2"]}, "option 'colour' of generator 'lognormal': unknown"),
        ({"budget": "much"}, "budget='much'"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"preset": "demo"}, "preset='demo': must be 'published'"),
        ({"preset": "published"}, "ranks='4': --preset published fixes it"),
        ({"trace_system": "lrmoe"}, "trace_system='lrmoe': there is no trace"),
        ({"trace": Path("none.parquet"), "tokens": None}, "no such file"),
        ({"trace": Path("none.parquet")}, "tokens=256: a trace has its own counts"),
    ],
)
def test_bad_usage(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(**{**SMALL, **options})
    assert not Path("runs").exists(), "nothing is written before the options are checked"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(ConfigError, match="name='simulate': cannot write to"):
        simulate(**SMALL)


def test_a_name_that_is_taken_is_refused_unless_asked() -> None:
    two = {**SMALL, "systems": ["megatron"]}
    simulate(**two, name="one")
    before = Path("runs/one/summary.json").read_bytes()
    with pytest.raises(ConfigError, match=r"runs/one holds an earlier run .*--overwrite"):
        simulate(**two, name="one")
    assert Path("runs/one/summary.json").read_bytes() == before
    simulate(**two, name="one", seed=5, overwrite=True)
    assert Path("runs/one/summary.json").read_bytes() != before


def test_the_default_name_replaces_simulations_and_nothing_else() -> None:
    two = {**SMALL, "systems": ["megatron"]}
    simulate(**two)
    simulate(**two)
    Path("runs/simulate/metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="holds an earlier run"):
        simulate(**two)
    simulate(**two, overwrite=True)
    assert not Path("runs/simulate/metrics.jsonl").exists(), "one folder holds one run"
    Path("runs/simulate/summary.json").write_text('{"systems": {}}')
    for overwrite in (False, True):
        with pytest.raises(
            ConfigError, match="holds a run of `lrmoe compare`, which `lrmoe simulate` does not"
        ):
            simulate(**two, overwrite=overwrite)


def test_checkpoints_and_the_trace_that_is_read_are_never_replaced() -> None:
    folder = Path("runs/trained")
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds checkpoints"):
        simulate(**SMALL, name="trained", overwrite=True)
    counts = np.full((1, 4, 8), 3)
    zero = np.zeros(1, dtype=np.int64)
    Path("runs/traced").mkdir()
    write_trace(
        Path("runs/traced/trace.parquet"),
        Trace(step_C=zero, micro_batch_C=zero, layer_C=zero, counts_CRE=counts),
    )
    for where in (Path("runs/traced"), Path("runs/traced/trace.parquet")):
        with pytest.raises(ConfigError, match="holds the trace that is read"):
            simulate(trace=where, name="traced", overwrite=True)
    assert Path("runs/traced/trace.parquet").is_file()


def test_the_published_preset_needs_its_baseline() -> None:
    with pytest.raises(ConfigError, match="needs megatron"):
        simulate(preset="published", systems=["lrmoe"])


def test_the_published_preset_names_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(preset="published", systems=["megatron", "lrmoe"], as_json=True) == 0
    out, err = capsys.readouterr()
    lines = {line["name"]: line for line in map(json.loads, out.splitlines())}
    assert lines["published.backward_subtotal_reduction"]["value"] >= 0.64
    assert lines["published.forward_peak"]["value"] <= 1.005
    assert lines["published.backward_speedup"]["better"] == "higher"
    reached = lines["published.effective_throughput_20x.lrmoe"]
    assert reached["value"] >= 0.995
    assert reached["context"]["published"] == 1.0
    assert "Beside the published figures" in err
    assert Path("runs/published/summary.json").is_file()


def test_simulating_loads_no_torch() -> None:
    code = (
        "import sys\nfrom lrmoe.experiments.simulation import simulate\n"
        "simulate(systems=['megatron', 'lrmoe'], ranks='4', experts='16', tokens=64, top_k=2)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
