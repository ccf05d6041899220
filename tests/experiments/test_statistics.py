from __future__ import annotations

import math

import pytest

from lrmoe.experiments.statistics import paired


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
