"""check_every over several ranks: all ranks' gradients as one vector, and training that does not notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.config import LRMoEConfig
from lrmoe.planning.policies import Policy
from tests.distributed.calls import RankRun, Spread, even, merge, spread
from tests.distributed.plans import Crafted
from tests.distributed.pool import Pool
from tests.distributed.test_sharded_layer import sharded_call
from tests.distributed.truth import mine
from tests.layer.harness import build, pruning, run
from tests.layer.test_check import ZERO_TIME, compared
from tests.reference import GRADS, make_case

pytestmark = pytest.mark.distributed
CASE = make_case(tokens=61, experts=8, top_k=3, seed=1, skew=3.0)
SIZES = {2: [20, 41], 4: [1, 30, 0, 30]}


def same(checked: Spread, plain: Spread) -> None:
    """Figures against the float64 loop on every rank; same bits and records as without the check."""
    for name in ("out", *GRADS):
        assert torch.equal(getattr(checked.result, name), getattr(plain.result, name)), name
    # Memory is booked by address, and parts of a call may or may not get an address again.
    loose: dict[str, Any] = {"mem": {}, "peak_measured": 0, **ZERO_TIME}
    blank = {"check_cosine": None, "check_relative_error": None, **loose}
    for one, other in zip(checked.records, plain.records, strict=True):
        assert dataclasses.replace(one, **blank) == dataclasses.replace(other, **blank)
    cosine, error = compared(checked.result, CASE)
    assert error > 0.05
    for record in checked.records:
        assert record.check_cosine == pytest.approx(cosine, rel=1e-9)
        assert record.check_relative_error == pytest.approx(error, rel=1e-9)


def check(pool: Pool, **fields: Any) -> None:
    """With and without the check, tokens spread unevenly."""
    config, sizes = pruning(max_drop=0.5, **fields), SIZES[pool.world_size]
    checked, plain = (spread(pool, CASE, config.replace(check_every=every), sizes=sizes) for every in (1, 0))
    same(checked, plain)


@pytest.mark.parametrize("lean_wire", ["auto", False])
@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_equals_the_reference(pool2: Pool, estimator: str, activations: str, lean_wire: Any) -> None:
    check(pool2, estimator=estimator, activations=activations, lean_wire=lean_wire)


@pytest.mark.parametrize("selection", ["global", "local"])
def test_four_ranks_one_without_tokens(pool4: Pool, selection: str) -> None:
    check(pool4, selection=selection, lean_wire="auto")


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_a_kept_set_that_forward_fixed(pool2: Pool, estimator: str) -> None:
    check(pool2, estimator=estimator, select_in="forward", score="alpha", lean_wire="auto")


def planned_call(config: LRMoEConfig, policy: Policy | None) -> RankRun:
    """Worker: one call under a given policy, or on shards under the configuration's."""
    case, group = mine(CASE, even(CASE, dist.get_world_size())), dist.group.WORLD
    layer = build(CASE, config, group=group, policy=policy)
    if policy is None:
        result = sharded_call(layer, case)
        assert layer.last_record is not None
        return RankRun(result=result, record=layer.last_record)
    found = run(case, config, group=group, layer=layer)
    return RankRun(result=found.result, record=found.record)


def check_planned(pool: Pool, config: LRMoEConfig, policy: Policy | None) -> None:
    checked, plain = (pool.run(planned_call, config.replace(check_every=every), policy) for every in (1, 0))
    same(
        *(
            Spread(result=merge([r.result for r in ranks]), records=[r.record for r in ranks], ranks=[])
            for ranks in (checked, plain)
        )
    )


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 6, 13])
def test_copies_parts_and_ways_back_of_any_plan(pool4: Pool, seed: int) -> None:
    estimator = ("topk", "sampled")[seed % 2]
    check_planned(
        pool4, pruning(max_drop=0.5, estimator=estimator, lean_wire="auto"), Crafted(seed=seed, drop="all")
    )


def test_sharded_storage(pool2: Pool) -> None:
    check_planned(pool2, pruning(max_drop=0.5, storage="sharded"), None)
