"""Every score, over all ranks and within each rank's share, fixed in backward and in forward: what each promises.

`sampled`: the weights of every pair (0 or 1/pi) average to one, so that all gradients are unbiased: they are linear in
the weights. `topk`: the highest scores of every expert, or of every rank's share of it.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.config import FORWARD_SCORES, SCORES, LRMoEConfig
from tests.distributed.calls import bounds_of
from tests.distributed.pool import Pool
from tests.distributed.truth import mine
from tests.layer.harness import build, pruning, run
from tests.reference import counts, make_case, plain_loop, scores, top_pairs

pytestmark = pytest.mark.distributed

CASE = make_case(tokens=24, experts=4, top_k=2, hidden=6, width=5, seed=4, skew=1.0)
SIZES = {2: [7, 17], 4: [5, 0, 13, 6]}
SELECTIONS = ("global", "local")
WAYS = [("forward" if score in FORWARD_SCORES else "backward", score) for score in SCORES]
DRAWS, PROJECTIONS = 60, 12


def config_of(estimator: str, place: str, score: str, selection: str) -> LRMoEConfig:
    return pruning(
        max_drop=0.5,
        estimator=estimator,
        select_in=place,
        score=score,
        selection=selection,
        router_grad="retained",
        replica_slots=0,
        seed=5,
    )


def exact_alpha() -> Tensor:
    found = plain_loop(CASE, needs=["d_weights"]).d_weights
    assert found is not None
    return found


def draws(place: str, score: str, selection: str, count: int) -> Tensor:
    """Worker: weights of this rank's pairs in independent draws of the kept set, (draws, pairs), float64."""
    group, sizes = dist.group.WORLD, SIZES[dist.get_world_size()]
    part, config = mine(CASE, sizes), config_of("sampled", place, score, selection)
    exact_TK = exact_alpha()[slice(*bounds_of(sizes)[dist.get_rank()])]
    found = []
    for step in range(count):
        layer = build(part, config, group=group)  # a new one: its quotas do not depend on earlier draws
        layer.clock.step = step
        grad = run(part, config, group=group, layer=layer, needs=["d_weights"]).result.d_weights
        assert grad is not None
        found.append((grad / exact_TK).reshape(-1))
    return torch.stack(found)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(("place", "score"), WAYS)
def test_sampled_is_unbiased(pool2: Pool, place: str, score: str, selection: str) -> None:
    weights = torch.cat(pool2.run(draws, place, score, selection, DRAWS, limit_s=100), dim=1)
    assert bool(((weights > 0).double().mean(dim=0) > 0).all()), "a pair was never kept"
    draw = torch.Generator().manual_seed(weights.shape[1])
    directions = torch.randn(weights.shape[1], PROJECTIONS, generator=draw, dtype=torch.float64)
    # One direction adds all weights: their number is fixed, so that little of chance is in it.
    error = (weights - 1) @ torch.cat([directions, torch.ones_like(directions[:, :1])], dim=1)
    spread = error.std(dim=0) / DRAWS**0.5
    off = (error.mean(dim=0).abs() / spread.clamp(min=1e-9)).max()
    assert float(off) < 4, f"{float(off):.1f} standard errors off"


def highest() -> bool:
    """Worker: `topk` keeps the highest of every expert, or of every rank's share of it, wherever it is fixed."""
    sizes = SIZES[dist.get_world_size()]
    bounds = bounds_of(sizes)
    here, part = slice(*bounds[dist.get_rank()]), mine(CASE, sizes)
    for (place, score), selection in itertools.product(
        [*WAYS, *(("backward", score) for score in FORWARD_SCORES)], SELECTIONS
    ):
        what = f"{place}, {score}, {selection}"
        config = config_of("topk", place, score, selection)
        found = run(part, config, group=dist.group.WORLD)
        assert found.result.d_weights is not None
        mine_TK = (found.result.d_weights / exact_alpha()[here]) > 0.5
        parts: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(parts, mine_TK)
        keep_TK = torch.cat(parts)
        kept_E = counts(torch.where(keep_TK, CASE.ids, -1), 4).tolist()
        assert kept_E == found.quota_E, what
        if score == "random":
            continue
        if selection == "global":
            assert torch.equal(keep_TK, top_pairs(scores(CASE, score), CASE.ids, kept_E) > 0.5), what
        else:
            share_E = counts(torch.where(mine_TK, part.ids, -1), 4).tolist()
            best_TK = top_pairs(scores(CASE, score)[here], part.ids, share_E) > 0.5
            assert torch.equal(mine_TK, best_TK), what
    return True


@pytest.mark.parametrize("ranks", [2, 4])
def test_topk_keeps_the_highest(request: pytest.FixtureRequest, ranks: int) -> None:
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    assert all(pool.run(highest, limit_s=100))


@pytest.mark.parametrize("place", ["backward", "forward"])
def test_uniform_choices_of_topk_change_with_the_step(pool2: Pool, place: str) -> None:
    sets = [pool2.run(random_set, place, step)[0] for step in (0, 0, 1)]
    assert torch.equal(sets[0], sets[1])
    assert not torch.equal(sets[0], sets[2])


def random_set(place: str, step: int) -> Tensor:
    """Worker: which of this rank's pairs uniform numbers keep at a step."""
    part = mine(CASE, SIZES[2])
    config = config_of("topk", place, "random", "global")
    grad = run(part, config, group=dist.group.WORLD, step=step).result.d_weights
    assert grad is not None
    return grad != 0
