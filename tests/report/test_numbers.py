"""How numbers are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lrmoe.report.html import render
from lrmoe.report.load import load_run
from lrmoe.report.numbers import even, number, seconds, size, with_error
from tests.report.synthetic import compare_run

GIB = 2**30


@pytest.mark.parametrize(
    ("value", "short", "padded"),
    [
        (0, "0", "0"),
        (1.0, "1", "1.000"),
        (0.8, "0.8", "0.8000"),
        (999.96, "1,000", "1,000"),
        (7704.4, "7,704", "7,704"),
        (10047.2, "10,047", "10,047"),
        (100.0, "100", "100.0"),
        (1e-7, "1e-07", "1e-07"),
        (None, "-", "-"),
    ],
)
def test_measured_numbers_keep_their_zeros_and_thousands_stand_in_groups(
    value: float | None, short: str, padded: str
) -> None:
    assert (number(value, 4), even(value, 4)) == (short, padded)


def test_sizes_and_times() -> None:
    assert [size(v) for v in (12 * 2**20, 3.38 * GIB, 700, None)] == ["12 MiB", "3.380 GiB", "700 B", "-"]
    assert seconds(2.4) == "2.400 s"


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.49123, 0.0123, "0.491 +- 0.012"),
        (0.5, 0.15, "0.50 +- 0.15"),
        (270.4, 12.3, "270 +- 12"),
        (1.5e-9, 2e-10, "1.50e-09 +- 2.0e-10"),
        (0.5, None, "0.500"),
        (0.5, 0.0, "0.500 +- 0"),
    ],
)
def test_a_number_has_the_decimals_of_its_error(value: float, error: float | None, text: str) -> None:
    assert with_error(value, error) == text


def test_a_number_and_its_unit_do_not_part_at_the_end_of_a_line(tmp_path: Path) -> None:
    page = render([load_run(compare_run(tmp_path / "run"))])
    assert re.search(r'<span class="whole">[0-9.]+ s</span> \(-', page)
    assert re.search(r'<span class="whole">[0-9.]+ MiB</span>', page)
