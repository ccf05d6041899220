"""Fresh benchmark figures are held against committed ones: what counts as worse, and what is not compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import compare_bench


def row(value: float, *, unit: str = "ratio", better: str = "lower", **context: Any) -> dict[str, Any]:
    return {"value": value, "unit": unit, "better": better, "context": context}


def verdict(old: dict[str, Any], new: dict[str, Any]) -> str:
    (found,) = compare_bench.judge({"a": old}, {"a": new})
    return found.verdict


def write(folder: Path, file: str, rows: dict[str, dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    lines = (json.dumps({"name": name, **values}) for name, values in rows.items())
    (folder / file).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("old", "new", "better", "expected"),
    [
        (1.0, 1.09, "lower", "as before"),
        (1.0, 1.11, "lower", "worse"),
        (1.0, 0.89, "lower", "better"),
        (1.0, 0.89, "higher", "worse"),
        (1.0, 1.11, "higher", "better"),
        (-0.5, -0.44, "lower", "worse"),
        (0.0, 0.001, "lower", "worse"),
        (0.0, 0.0, "lower", "as before"),
        (1.0, float("nan"), "lower", "worse"),
        (1.0, float("nan"), "higher", "worse"),
    ],
)
def test_without_a_spread_ten_percent_are_allowed(old: float, new: float, better: str, expected: str) -> None:
    assert verdict(row(old, better=better), row(new, better=better)) == expected


def test_an_exponent_may_grow_by_its_own_room() -> None:
    assert verdict(row(0.3, unit="exponent", spread=0.0), row(0.44, unit="exponent")) == "as before"
    assert verdict(row(0.9, unit="exponent", spread=0.9), row(1.06, unit="exponent")) == "worse"


def test_twice_the_larger_recorded_spread_is_allowed_within_limits() -> None:
    assert verdict(row(1.0, spread=0.07), row(1.13)) == "as before"
    assert verdict(row(1.0, spread=0.07), row(1.15)) == "worse"
    assert verdict(row(1.0, spread=0.07), row(1.15, spread=0.08)) == "as before"
    assert verdict(row(1.0, spread=0.0), row(1.09)) == "as before", "ten percent at least"
    assert verdict(row(1.0, spread=0.0), row(1.11)) == "worse"
    assert verdict(row(1.0, spread=0.9), row(1.3)) == "worse", "a noisy run hides no slowdown of a quarter"


@pytest.mark.parametrize(
    ("unit", "better"), [("ms", "lower"), ("s", "lower"), ("B", "lower"), ("calls", "higher")]
)
def test_seconds_bytes_and_amounts_of_work_are_not_compared(unit: str, better: str) -> None:
    assert compare_bench.judge({"a": row(1, unit=unit, better=better)}, {}) == []


def test_planned_loads_have_no_noise() -> None:
    assert verdict(row(1.0, unit="mean loads"), row(1.03, unit="mean loads")) == "worse"
    assert verdict(row(1.0, unit="mean loads"), row(1.01, unit="mean loads")) == "as before"


def test_counts_of_what_went_wrong_are_compared() -> None:
    assert verdict(row(0, unit="failures"), row(1, unit="failures")) == "worse"
    assert verdict(row(0, unit="calls"), row(2, unit="calls")) == "worse"


def test_what_is_gone_fails_and_what_is_new_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(old, "x.jsonl", {"a": row(1.0), "gone": row(1.0)})
    write(old, "not_run.jsonl", {"b": row(1.0)})
    write(new, "x.jsonl", {"a": row(1.0), "fresh": row(9.0)})
    write(new, "not_committed.jsonl", {"c": row(9.0)})
    arguments = [str(new), "--against", str(old), "--json"]
    assert compare_bench.main(arguments) == 1
    out, err = capsys.readouterr()
    found = {line["name"]: line for line in map(json.loads, out.splitlines())}
    assert {name: line["verdict"] for name, line in found.items()} == {
        "a": "as before", "gone": "missing", "fresh": "new",
    }  # fmt: skip
    assert found["a"]["allowed"] == pytest.approx(1.1)
    assert "3 figures, 1 worse than allowed or missing" in err
    write(new, "x.jsonl", {"a": row(1.2), "gone": row(1.0)})
    assert compare_bench.main(arguments) == 1
    write(new, "x.jsonl", {"a": row(0.5), "gone": row(1.0)})
    assert compare_bench.main(arguments) == 0


def test_nothing_to_compare_and_broken_files_are_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_bench.main([str(tmp_path)]) == 2
    assert "nothing in" in capsys.readouterr().err
    for line in ("{", "[]", '{"name": "a", "value": 1}'):
        (tmp_path / "layer.jsonl").write_text(line + "\n")
        assert compare_bench.main([str(tmp_path)]) == 2
        assert "layer.jsonl, line 1: not a figure" in capsys.readouterr().err


def test_the_committed_results_are_as_before_against_themselves() -> None:
    verdicts = list(compare_bench.compare(compare_bench.RESULTS, compare_bench.RESULTS))
    assert len(verdicts) > 100
    assert {one.verdict for one in verdicts} == {"as before"}
