"""Choosing rows by compiled code: the same numbers as NumPy's, whatever the scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lrmoe.layer.randomness import UNIT, UNIT_BITS
from lrmoe.layer.selection import _UNITS
from lrmoe.layer.single import inclusion_of_each, sample_of_each
from lrmoe.ops import cpu

pytestmark = pytest.mark.skipif(not cpu.state()[0], reason=f"compiled passes: {cpu.state()[1]}")

COUNTS = [[0], [1], [7, 0, 9], [300], [1, 2, 3, 4, 5, 0], [5000, 17, 9000, 0, 1]]


def scores(kind: str, rows: int, draw: torch.Generator) -> Tensor:
    score = torch.rand(rows, generator=draw) ** 4
    if kind == "ties":
        return (score * 3).round()
    if kind == "zero":
        return torch.zeros(rows)
    if kind == "wide":
        return torch.exp(40 * torch.randn(rows, generator=draw)).clamp(max=3e38)
    if kind == "negative":
        return -score
    if kind == "broken":
        score[torch.rand(rows, generator=draw) < 0.3] = float("nan")
        score[torch.rand(rows, generator=draw) < 0.1] = float("inf")
    return score


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "ties", "zero", "wide", "negative", "broken"])
def test_compiled_choices_equal_numpys(kind: str, counts: list[int], threads: int) -> None:
    draw = torch.Generator().manual_seed(len(counts) + threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for share in (0.0, 0.02, 0.5, 0.9, 1.0):
            score = scores(kind, sum(counts), draw)
            quotas = [round(share * n) for n in counts]
            offsets = torch.randint(0, UNIT, (len(counts),), generator=draw)
            given = torch.tensor(counts), torch.tensor(quotas)
            chance = cpu.inclusion(score, *given, _UNITS)
            assert chance is not None
            wanted = inclusion_of_each(score.numpy(), counts, quotas) if sum(counts) else np.zeros(0)
            assert np.array_equal(chance.numpy(), wanted)
            kept = cpu.sample(chance, given[0], offsets, _UNITS)
            assert kept is not None
            if sum(counts):
                assert np.array_equal(kept.numpy(), sample_of_each(wanted, counts, offsets.tolist()))
            ends = np.cumsum(counts)
            for end, n, quota in zip(ends, counts, quotas, strict=True):
                assert chance[end - n : end].sum() == quota * 2**UNIT_BITS
                assert kept[end - n : end].sum() == quota
    finally:
        torch.set_num_threads(before)


def test_counts_that_are_not_of_the_rows_are_refused() -> None:
    for counts in ([3], [5, 1], [-1, 6], [2**62, 2**62]):
        given = torch.tensor(counts)
        with pytest.raises(ValueError, match="do not sum to 5 rows"):
            cpu.inclusion(torch.ones(5), given, given, _UNITS)
        with pytest.raises(ValueError, match="do not sum to 5 rows"):
            cpu.sample(torch.ones(5, dtype=torch.float64), given, given, _UNITS)


def test_what_the_library_cannot_read_is_left_to_numpy() -> None:
    counts = torch.tensor([4])
    assert cpu.inclusion(torch.ones(8)[::2], counts, counts, _UNITS) is None
    assert cpu.inclusion(torch.ones(4, dtype=torch.float64), counts, counts, _UNITS) is None
    assert cpu.inclusion(torch.ones(4), counts.int(), counts, _UNITS) is None
    assert cpu.sample(torch.ones(4), counts, counts, _UNITS) is None
    with cpu.limited(None):
        assert cpu.inclusion(torch.ones(4), counts, counts, _UNITS) is None
