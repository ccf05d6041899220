"""Pruning under any plan: the kept set is one process's with the same quotas, and the result the pruned reference's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lrmoe.config import LRMoEConfig
from lrmoe.layer import MoELayer
from lrmoe.planning.policies import Policy
from tests.distributed.calls import even
from tests.distributed.plans import Crafted, Fixed, unpriced
from tests.distributed.pool import Pool
from tests.distributed.truth import Truth, kept_by, mine
from tests.layer.harness import build, kept, pruning, run
from tests.reference import Case, make_case

pytestmark = pytest.mark.distributed

WIRES: tuple[bool | str, ...] = (False, "auto")
MODES = list(itertools.product(("topk", "sampled"), ("global", "local"), ("full", "retained"), WIRES))
DROPS = ("any", "all", "floor")
CASE = make_case(tokens=30, experts=8, top_k=3, hidden=8, width=6, seed=4, skew=1.5)


def config_of(mode: tuple[str, str, str, bool | str], **fields: object) -> LRMoEConfig:
    estimator, selection, router_grad, lean = mode
    return pruning(
        max_drop=0.9,
        estimator=estimator,
        selection=selection,
        router_grad=router_grad,
        lean_wire=lean,
        **fields,
    )


def layers(config: LRMoEConfig, policy: Policy) -> list[MoELayer]:
    """Two layers that see the same first call: one to read the kept set off, one as configured."""
    group = dist.group.WORLD
    retained = config.replace(router_grad="retained")
    return [build(CASE, one, group=group, policy=policy) for one in (retained, config)]


def check_pruned(config: LRMoEConfig, policy: Policy, what: str) -> int:
    """Hold one call against the pruned reference, and its kept set against one process's; returns foreign experts."""
    sizes, (reader, layer) = even(CASE, dist.get_world_size()), layers(config, policy)
    keep_TK = kept_by(CASE, config, sizes, reader)
    found = run(mine(CASE, sizes), config, group=dist.group.WORLD, layer=layer)
    Truth.of(CASE, keep_TK=keep_TK, router_grad=config.router_grad).check(found.result, sizes, what)
    here = [int(((keep_TK > 1e-9) & (CASE.ids == e)).sum()) for e in range(CASE.num_experts)]
    assert here == found.quota_E, f"{what}: kept {here}, quotas {found.quota_E}"
    assert found.record.rows_backward_local == found.record.backward_load_R[dist.get_rank()]
    if config.selection == "global":
        alone = build(CASE, config.replace(router_grad="retained"), policy=Fixed(quota_E=np.array(here)))
        alone_TK = kept(CASE, config, layer=alone)
        assert torch.equal(alone_TK > 1e-9, keep_TK > 1e-9), f"{what}: one process keeps other pairs"
        torch.testing.assert_close(alone_TK, keep_TK, rtol=1e-9, atol=0)
    return sum(found.record.replicas_R)


def crafted(first: int) -> list[int]:
    """Worker: every mode under a plan of its own; returns the foreign experts of each."""
    return [
        check_pruned(config_of(mode), Crafted(seed=seed, drop=DROPS[seed % 3]), f"plan {seed}, {mode}")
        for seed, mode in enumerate(MODES[:: 1 if dist.get_world_size() < 8 else 3], start=first)
    ]


@pytest.mark.parametrize(("ranks", "first"), [(2, 0), (2, 19), (4, 3), (8, 9)])
def test_crafted_plans(request: pytest.FixtureRequest, ranks: int, first: int) -> None:
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    moved = pool.run(crafted, first, limit_s=90)[0]
    assert sum(copies > 0 for copies in moved) >= len(moved) // 2


def lrmoe() -> list[int]:
    """Worker: every mode under the plans of this package."""
    return [check_pruned(config_of(mode, replica_slots=2), unpriced, f"lrmoe, {mode}") for mode in MODES]


def test_the_policy_of_this_package_places_copies_and_prunes(pool4: Pool) -> None:
    assert min(pool4.run(lrmoe, limit_s=60)[0]) > 0


def low_precision(dtype: torch.dtype) -> bool:
    """Worker: the set that bf16 kept itself (retained), under plans whose kept pairs run elsewhere."""
    case: Case = CASE.to(dtype)
    sizes, config = (
        even(case, dist.get_world_size()),
        pruning(max_drop=0.5, estimator="topk", router_grad="retained"),
    )
    for seed, lean in itertools.product(range(3), (False, True)):
        config = config.replace(lean_wire=lean)
        policy = Crafted(seed=seed, layout="many", back="any", drop="all")
        layer = build(case, config, group=dist.group.WORLD, policy=policy)
        found = run(mine(case, sizes), config, group=dist.group.WORLD, layer=layer)
        assert found.result.d_weights is not None
        parts: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(parts, (found.result.d_weights != 0).double())
        truth = Truth.of(case, keep_TK=torch.cat(parts), router_grad="retained")
        truth.check(found.result, sizes, f"{dtype}, plan {seed}, lean wire {lean}")
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(pool4: Pool, dtype: torch.dtype) -> None:
    assert all(pool4.run(low_precision, dtype, limit_s=60))
