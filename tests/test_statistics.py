from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from lrmoe.statistics import averaged, paired, standard_error


def test_a_constant_difference_has_no_error_however_much_the_values_vary() -> None:
    found = paired([1.5, 7.5, -2.5], [1.0, 7.0, -3.0])
    assert (found.mean, found.standard_error, found.n) == (0.5, 0.0, 3)


def test_the_standard_error_is_that_of_the_mean() -> None:
    found = paired([1.0, 2.0, 3.0, 6.0], [0.0] * 4)  # sample variance 14 / 3
    assert found.mean == 3.0
    assert found.standard_error == pytest.approx(math.sqrt(14 / 3 / 4))
    assert found.resolved()
    assert not found.resolved(errors=3)


def test_one_pair_says_nothing_of_its_error() -> None:
    found = paired([1.0], [3.0])
    assert found.mean == -2.0
    assert math.isnan(found.standard_error)
    assert not found.resolved()


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0])])
def test_sides_that_do_not_pair_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="must be as many, 1 or more"):
        paired(a, b)


def test_fewer_than_two_values_have_no_standard_error() -> None:
    assert standard_error([]) is standard_error([2.0]) is None
    assert standard_error([1.0, 2.0, 3.0, 6.0]) == pytest.approx(math.sqrt(14 / 3 / 4))


def test_a_value_that_is_not_finite_is_told_and_does_not_fail() -> None:
    found = averaged([math.nan, 1.0])
    assert math.isnan(found.mean)
    assert math.isnan(found.standard_error)


def test_standard_errors_have_one_home() -> None:
    root = Path(__file__).resolve().parents[1]
    sources = [path for folder in ("src", "tools", "benchmarks") for path in (root / folder).rglob("*.py")]
    spread = re.compile(r"\bp?stdev\(|\.std\(ddof=1\)")
    assert [path.name for path in sources if spread.search(path.read_text("utf-8"))] == []
