"""Choosing rows: probabilities, systematic sampling and its weights, uniform numbers, what a choice costs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from lrmoe.layer import selection
from lrmoe.layer.randomness import UNIT, Key, uniform_rows
from lrmoe.layer.selection import Candidates, choose, inclusion, systematic
from lrmoe.ops import cpu
from tests.reference import inclusion as reference_inclusion


def candidates(
    score: torch.Tensor, counts: list[int], quotas: list[int], offset: int = UNIT // 2
) -> Candidates:
    return Candidates(
        score_M=score.float(),
        counts_L=torch.tensor(counts),
        quota_L=torch.tensor(quotas),
        offset_L=torch.full((len(counts),), offset),
        word_L=torch.arange(len(counts)) * 1_000_003,
    )


def random_table(seed: int, sigma: float = 1.0) -> Candidates:
    gen = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 60, (5,), generator=gen).tolist()
    quotas = [int(torch.randint(0, n + 1, (1,), generator=gen)) for n in counts]
    return candidates(torch.exp(sigma * torch.randn(sum(counts), generator=gen)), counts, quotas)


@pytest.mark.parametrize("seed", range(10))
def test_probabilities_are_the_clamped_proportional_ones_and_sum_to_the_quota_exactly(seed: int) -> None:
    rows = random_table(seed)
    chance = inclusion(rows)
    counts, quotas = rows.counts_L.tolist(), rows.quota_L.tolist()
    for part, score, quota in zip(chance.split(counts), rows.score_M.split(counts), quotas, strict=True):
        assert int(part.sum()) == quota * UNIT
        assert bool((part >= 0).all())
        assert bool((part <= UNIT).all())
        wanted = reference_inclusion(score, quota) if len(part) else score.double()
        torch.testing.assert_close(part.double() / UNIT, wanted, rtol=2e-3, atol=1e-8)


@pytest.mark.parametrize("sigma", [3.0, 10.0])
def test_no_probability_is_zero_however_far_the_scores_spread(sigma: float) -> None:
    rows = random_table(3, sigma)
    chance = inclusion(rows)
    for part, quota in zip(chance.split(rows.counts_L.tolist()), rows.quota_L.tolist(), strict=True):
        assert int(part.sum()) == quota * UNIT
        assert quota == 0 or bool((part > 0).all())


def test_scores_of_zero_may_still_be_drawn() -> None:
    rows = candidates(torch.tensor([0.0, 0.0, 1.0, 1.0]), [4], [2])
    assert bool((inclusion(rows) > 0).all())


def test_a_row_is_drawn_as_often_as_its_probability_says() -> None:
    rows = random_table(7)
    chance = inclusion(rows)
    draws = 2000
    total = torch.zeros_like(chance)
    for i in range(draws):
        offsets = torch.full_like(rows.offset_L, (i * UNIT) // draws)
        total += systematic(dataclasses.replace(rows, offset_L=offsets), chance)
    torch.testing.assert_close(total.double() / draws, chance.double() / UNIT, rtol=0, atol=1.5 / draws)


@pytest.mark.parametrize("offset", [0, 1, UNIT // 3, UNIT - 1])
def test_every_offset_keeps_exactly_the_quota(offset: int) -> None:
    for seed in range(20):
        rows = dataclasses.replace(random_table(seed), offset_L=torch.full((5,), offset))
        weight = choose("sampled", "lrm", rows).weight_M
        kept = [int((part > 0).sum()) for part in weight.split(rows.counts_L.tolist())]
        assert kept == rows.quota_L.tolist()


def test_weights_are_one_over_the_probability() -> None:
    rows = random_table(1)
    weight, chance = choose("sampled", "lrm", rows).weight_M, inclusion(rows).double() / UNIT
    kept = weight > 0
    torch.testing.assert_close(weight[kept].double(), 1 / chance[kept], rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", [None, 0])  # NumPy's and torch's operators, and compiled code
@pytest.mark.parametrize("run", [1, 40, 100])
def test_experts_are_chosen_alike_however_many_are_looked_at_together(
    run: int, level: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [random_table(seed, sigma) for seed in range(10) for sigma in (0.0, 1.0, 6.0)]
    wanted = [(choose("sampled", "lrm", rows), inclusion(rows)) for rows in tables]
    monkeypatch.setattr(selection, "_RUN_ROWS", run)
    with cpu.limited(level):
        for rows, (choice, chance) in zip(tables, wanted, strict=True):
            found = choose("sampled", "lrm", rows)
            assert torch.equal(found.weight_M, choice.weight_M)
            assert torch.equal(inclusion(rows), chance)


@pytest.mark.parametrize("level", [None, 0])
@pytest.mark.parametrize("broken", [0, 3, 900])
@pytest.mark.parametrize("sigma", [0.0, 1.5, 8.0])
def test_an_expert_alone_is_chosen_as_beside_others(
    sigma: float, broken: int, level: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_LARGE_ROWS", 2000)
    gen, counts = torch.Generator().manual_seed(5), [3000, 5, 0, 1500, 0, 40, 2000]
    score = torch.exp(sigma * torch.randn(sum(counts), generator=gen))
    score[torch.randperm(len(score), generator=gen)[:broken]] = torch.nan
    for quotas in ([300, 5, 0, 1499, 0, 7, 2000], [2999, 0, 0, 0, 0, 39, 5]):
        rows = candidates(score, counts, quotas, offset=UNIT // 3)
        with cpu.limited(level):
            alone = choose("sampled", "lrm", rows), inclusion(rows)
        with monkeypatch.context() as patch, cpu.limited(None):
            for name in ("_LARGE_ROWS", "_RUN_ROWS", "_EACH_ROWS"):
                patch.setattr(selection, name, 2**60)
            together = choose("sampled", "lrm", rows), inclusion(rows)
        assert torch.equal(alone[0].weight_M, together[0].weight_M)
        assert torch.equal(alone[1], together[1])
        for name in ("energy", "dropped", "variance", "nonfinite"):
            found, wanted = (float(getattr(choice.loss, name)) for choice in (alone[0], together[0]))
            assert found == pytest.approx(wanted, rel=1e-9)


def test_runs_leave_no_row_out_and_large_experts_come_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_RUN_ROWS", 10)
    monkeypatch.setattr(selection, "_LARGE_ROWS", 8)
    runs = list(selection._run_bounds([0, 3, 0, 4, 5, 1, 9, 0, 2, 8, 0]))
    assert runs == [(1, 5, 0, 12), (5, 6, 12, 13), (6, 7, 13, 22), (8, 9, 22, 24), (9, 10, 24, 32)]
    assert list(selection._run_bounds([0, 0])) == []


def test_rounds_that_nobody_looks_at_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [random_table(seed, 2.0) for seed in range(10)]
    wanted = [inclusion(rows) for rows in tables]
    monkeypatch.setattr(selection, "_looks", lambda rounds, like: rounds % 5 == 0)
    for rows, chance in zip(tables, wanted, strict=True):
        assert torch.equal(inclusion(rows), chance)


def test_a_non_finite_score_does_not_flatten_the_finite_ones() -> None:
    score = torch.tensor([1.0, float("nan"), 2.0, 4.0, 8.0, float("inf"), 1.0, 1.0])
    chance = inclusion(candidates(score, [8], [4])).double() / UNIT
    assert chance[[1, 5]].tolist() == pytest.approx([1.0, 1.0])
    wanted = reference_inclusion(score[score.isfinite()], 2)
    torch.testing.assert_close(chance[torch.isfinite(score)], wanted, rtol=2e-3, atol=0)


def test_the_cost_of_a_choice() -> None:
    score = torch.tensor([3.0, 1.0, 2.0, float("nan")])
    rows = candidates(score, [4], [2])
    top = choose("topk", "lrm", rows).loss
    assert float(top.energy) == 14.0
    assert float(top.dropped) == 5.0  # NaN and 3 stay
    assert float(top.variance) == 0.0
    assert int(top.nonfinite) == 1
    finite = candidates(torch.tensor([3.0, 1.0, 2.0]), [3], [2])
    chosen = choose("sampled", "lrm", finite).loss
    pi = reference_inclusion(finite.score_M, 2)
    assert float(chosen.variance) == pytest.approx(
        float(((1 / pi - 1) * finite.score_M.double() ** 2).sum()), rel=1e-3
    )


def test_a_choice_of_nothing_costs_nothing_and_one_of_everything_leaves_nothing_out() -> None:
    none = choose("sampled", "lrm", candidates(torch.zeros(0), [0, 0], [0, 0]))
    assert none.weight_M.shape == (0,)
    assert float(none.loss.energy) == float(none.loss.variance) == 0
    every = candidates(torch.rand(3000), [2000, 1000], [2000, 1000])
    loss = choose("sampled", "lrm", every).loss
    assert float(loss.dropped) == float(loss.variance) == 0
    assert float(loss.energy) > 0


def test_uniform_numbers_are_uniform_and_independent_between_experts() -> None:
    word = Key(seed=1, layer=2, step=3, micro_batch=4).words(np.arange(2))
    rows = [uniform_rows(torch.full((4000,), int(w.astype(np.int64))), torch.arange(4000)) for w in word]
    for numbers in rows:
        assert float(numbers.min()) > 0
        assert float(numbers.max()) <= 1
        histogram = torch.histc(numbers, bins=10, min=0, max=1)
        assert float((histogram - 400).abs().max()) < 4 * 400**0.5
        assert abs(float(torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1])) < 4 / 4000**0.5
    assert abs(float(torch.corrcoef(torch.stack(rows))[0, 1])) < 4 / 4000**0.5


def test_offsets_cover_the_unit_interval_over_steps() -> None:
    found = np.array([Key(seed=0, layer=0, step=s, micro_batch=0).offsets(np.arange(4)) for s in range(1000)])
    assert found.min() >= 0
    assert found.max() < UNIT
    for column in found.T:
        histogram, _ = np.histogram(column, bins=10, range=(0, UNIT))
        assert np.abs(histogram - 100).max() < 4 * 100**0.5


@pytest.mark.parametrize("seed", [0, 2**31, 2**62, 2**64 - 1])
def test_any_seed_serves(seed: int) -> None:
    assert Key(seed=seed, layer=0, step=0, micro_batch=0).words(np.arange(3)).dtype == np.uint64


def test_non_finite_scores_are_certain_among_many_large_ones() -> None:
    score = torch.ones(5000)
    score[[7, 4000]] = torch.tensor([float("nan"), float("inf")])
    rows = Candidates(
        score_M=score,
        counts_L=torch.tensor([5000]),
        quota_L=torch.tensor([3]),
        offset_L=torch.tensor([12345]),
        word_L=torch.tensor([1]),
    )
    kept = choose("sampled", "lrm", rows).weight_M
    assert (kept > 0).sum() == 3
    assert kept[7] == kept[4000] == 1
