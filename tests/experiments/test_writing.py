from __future__ import annotations

from pathlib import Path

import pytest

from lrmoe.experiments.writing import csv_text, json_text, write_whole


def test_a_file_is_replaced_as_a_whole_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "first")
    write_whole(path, "second")
    assert [item.name for item in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_text(encoding="utf-8") == "second"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "second \ud800")  # half a character: no encoding has it
    assert path.read_text(encoding="utf-8") == "first"


def test_json_holds_finite_numbers_only() -> None:
    assert json_text({"loss": 0.5}) == '{\n  "loss": 0.5\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"loss": float("nan")})


def test_a_table_has_a_header_empty_cells_and_no_other_columns() -> None:
    assert csv_text(("a", "b"), [{"a": 1, "b": None}, {"a": "x,y", "b": 0.5}]) == 'a,b\n1,\n"x,y",0.5\n'
    with pytest.raises(ValueError, match="c"):
        csv_text(("a",), [{"a": 1, "c": 2}])
