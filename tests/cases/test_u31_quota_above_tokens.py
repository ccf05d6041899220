"""U31: a limit above the number of tokens is clamped; zero quotas and counts are fine; negative ones are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from lrmoe.errors import PlanError
from lrmoe.layer.selection import Candidates, choose
from lrmoe.planning import LayerPlan, Problem, Topology
from tests.layer.harness import pruning, run
from tests.reference import assert_result, make_case


def candidates(counts: list[int], quotas: list[int], score: torch.Tensor | None = None) -> Candidates:
    rows = sum(counts)
    return Candidates(
        score_M=torch.rand(rows, generator=torch.Generator().manual_seed(rows)) if score is None else score,
        counts_L=torch.tensor(counts),
        quota_L=torch.tensor(quotas),
        offset_L=torch.full((len(counts),), 2**31),
        word_L=torch.arange(len(counts)),
    )


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
@pytest.mark.parametrize(
    ("counts", "quotas"),
    [
        ([4, 4], [16, 16]),
        ([3, 0, 5], [7, 2, 4]),
        ([0, 0], [3, 0]),
        ([4, 4], [0, 2]),
        ([1], [9]),
        ([5, 7], [5, 7]),
    ],
    ids=str,
)
def test_kept_rows_are_the_smaller_of_quota_and_count(
    counts: list[int], quotas: list[int], estimator: str
) -> None:
    choice = choose(estimator, "lrm", candidates(counts, quotas))
    kept = [int((part > 0).sum()) for part in choice.weight_M.split(counts)]
    assert kept == [min(q, n) for q, n in zip(quotas, counts, strict=True)]
    for part, q, n in zip(choice.weight_M.split(counts), quotas, counts, strict=True):
        assert q < n or torch.equal(part, torch.ones_like(part))


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
@pytest.mark.parametrize("fill", [0.0, 1e-38, 1e38, float("nan"), float("inf")])
def test_quotas_hold_for_degenerate_scores(fill: float, estimator: str) -> None:
    choice = choose(estimator, "lrm", candidates([9, 5], [4, 2], torch.full((14,), fill)))
    assert [int((part > 0).sum()) for part in choice.weight_M.split([9, 5])] == [4, 2]
    assert bool(choice.weight_M.isfinite().all())


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_quotas_hold_over_many_random_tables(estimator: str) -> None:
    gen = torch.Generator().manual_seed(0)
    for _ in range(100):
        counts = torch.randint(0, 40, (6,), generator=gen).tolist()
        quotas = [int(torch.randint(0, n + 3, (1,), generator=gen)) for n in counts]
        spread = torch.exp(4 * torch.randn(sum(counts), generator=gen))
        rows = dataclasses.replace(
            candidates(counts, quotas, spread), offset_L=torch.randint(0, 2**32, (6,), generator=gen)
        )
        kept = [int((part > 0).sum()) for part in choose(estimator, "lrm", rows).weight_M.split(counts)]
        assert kept == [min(q, n) for q, n in zip(quotas, counts, strict=True)]


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_the_layer_with_a_floor_above_every_count(estimator: str) -> None:
    case = make_case(tokens=4, experts=2, top_k=2)
    found = run(case, pruning(max_drop=0.9, min_keep=16, estimator=estimator))
    assert found.quota_E == [4, 4]
    assert found.record.kept == 8
    assert_result(found.result, case)


@pytest.mark.parametrize("quota", [[-1, 4], [2.5, 4.0], [5, 4]])
def test_a_plan_with_an_impossible_quota_is_refused(quota: list[Any]) -> None:
    problem = Problem(
        counts_RE=np.array([[4, 4]]), topology=Topology(ranks=1, experts=2), max_drop=0.9, min_keep=0
    )
    with pytest.raises(PlanError, match="quota"):
        LayerPlan.at_home(problem, np.array(quota), "always").check(problem)
