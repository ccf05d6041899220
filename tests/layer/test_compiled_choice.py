"""Choosing rows and summing scores by compiled code: the same numbers as NumPy's and torch's, whatever the scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from lrmoe.layer.learned import _ROWS, Learned, score_sums
from lrmoe.layer.left_out import costs_of, inverse_of
from lrmoe.layer.randomness import UNIT, UNIT_BITS
from lrmoe.layer.selection import _UNITS
from lrmoe.layer.single import inclusion_of_each, sample_of_each
from lrmoe.ops import cpu
from lrmoe.planning.score_bins import BINS, LOWEST

pytestmark = pytest.mark.skipif(not cpu.state()[0], reason=f"compiled passes: {cpu.state()[1]}")

COUNTS = [[0], [1], [7, 0, 9], [63, 64, 65], [300], [1, 2, 3, 4, 5, 0], [5000, 17, 9000, 0, 1]]
KINDS = ["plain", "ties", "zero", "wide", "negative", "broken"]


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


@pytest.fixture(params=[(0, 1), (1, 2), (2, 2)], ids=str)
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """An instruction set at most, and threads."""
    level, threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with cpu.limited(level):
        yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_choices_equal_numpys(kind: str, counts: list[int]) -> None:
    draw = torch.Generator().manual_seed(len(counts))
    for share in (0.0, 0.02, 0.5, 0.9, 1.0):
        score = scores(kind, sum(counts), draw)
        quotas = [round(share * n) for n in counts]
        offsets = torch.randint(0, UNIT, (len(counts),), generator=draw)
        given = torch.tensor(counts), torch.tensor(quotas)
        chance = cpu.inclusion(score, *given, _UNITS)
        assert chance is not None
        wanted = torch.from_numpy(
            inclusion_of_each(score.numpy(), counts, quotas) if sum(counts) else np.zeros(0)
        )
        assert torch.equal(chance, wanted)
        found = cpu.keep(score, *given, offsets, _UNITS)
        assert found is not None
        kept = torch.from_numpy(
            sample_of_each(wanted.numpy(), counts, offsets.tolist()) if sum(counts) else np.zeros(0)
        )
        inverse = inverse_of(wanted)
        assert torch.equal(found[0], (inverse * kept).float())
        parts = zip(*(value.split(counts) for value in (score, kept, inverse, chance)), strict=True)
        for quota, costs, (one, taken, factor, units) in zip(quotas, found[1], parts, strict=True):
            assert taken.sum() == quota
            assert units.sum() == quota * 2**UNIT_BITS
            torch.testing.assert_close(costs, costs_of(one, taken, factor), rtol=1e-12, atol=0)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("counts", [*COUNTS, [_ROWS, _ROWS + 1, 2 * _ROWS, 0, 2 * _ROWS + 1, 5]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_sums_of_scores_equal_torchs(kind: str, counts: list[int]) -> None:
    score, given = scores(kind, sum(counts), torch.Generator().manual_seed(1)), torch.tensor(counts)
    found = cpu.score_sums(score, given, most=_ROWS, bins=BINS, lowest=LOWEST)
    with cpu.limited(None):
        wanted = score_sums(score, given)
    assert found is not None
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_plain_sums_of_several_calls_are_the_same(kind: str) -> None:
    draw, compiled, plain = torch.Generator().manual_seed(2), *(Learned(4, 1, own=False) for _ in range(2))
    for counts in ([9, 0, 5000, 1], [0, 0, 3, 300], [1, 0, 0, 0], [0, 0, 0, 0]):
        score, given = scores(kind, sum(counts), draw), torch.tensor(counts)
        compiled.learn(score, given)
        with cpu.limited(None):
            plain.learn(score, given)
        assert torch.equal(compiled.sums_XF, plain.sums_XF)
    past = torch.zeros(4, 3 + 2 * BINS)
    for unfit in (past, past.double()[:3], past.double().t().contiguous().t()):
        assert cpu.score_sums(score, given, most=_ROWS, bins=BINS, lowest=LOWEST, past_XF=unfit) is None


def test_counts_that_are_not_of_the_rows_are_refused() -> None:
    for counts in ([3], [5, 1], [-1, 6], [2**62, 2**62]):
        given = torch.tensor(counts)
        with pytest.raises(ValueError, match="do not sum to 5 rows"):
            cpu.inclusion(torch.ones(5), given, given, _UNITS)
        with pytest.raises(ValueError, match="do not sum to 5 rows"):
            cpu.keep(torch.ones(5), given, given, given, _UNITS)
        with pytest.raises(ValueError, match="do not sum to 5 rows"):
            cpu.score_sums(torch.ones(5), given, most=_ROWS, bins=BINS, lowest=LOWEST)


def test_what_the_library_cannot_read_is_left_to_numpy() -> None:
    counts, ones = torch.tensor([4]), torch.ones(4)
    for score, given in ((torch.ones(8)[::2], counts), (ones.double(), counts), (ones, counts.int())):
        assert cpu.inclusion(score, given, counts, _UNITS) is None
        assert cpu.keep(score, given, counts, counts, _UNITS) is None
        assert cpu.score_sums(score, given, most=_ROWS, bins=BINS, lowest=LOWEST) is None
    assert cpu.inclusion(ones, counts, torch.tensor([1, 2]), _UNITS) is None
    assert cpu.keep(ones, counts, counts, torch.tensor([1, 2]), _UNITS) is None
    with cpu.limited(None):
        assert cpu.keep(ones, counts, counts, counts, _UNITS) is None
        assert cpu.score_sums(ones, counts, most=_ROWS, bins=BINS, lowest=LOWEST) is None
