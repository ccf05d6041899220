"""Random calls of every kind against the reference: whatever the sizes, ids, limits and settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrmoe.config import SCORES, LRMoEConfig
from tests.distributed.calls import spread, spread_kept
from tests.distributed.pool import Pool
from tests.layer.harness import kept, pruning, run
from tests.reference import Case, assert_result, counts, make_case


@st.composite
def calls(draw: st.DrawFn, *, experts: tuple[int, ...] = (1, 2, 3, 8)) -> tuple[Case, LRMoEConfig]:
    """A case with skew, missing and doubled experts; and a configuration."""
    number = draw(st.sampled_from(experts))
    case = make_case(
        tokens=draw(st.integers(0, 40)),
        experts=number,
        top_k=draw(st.integers(1, min(number, 4))),
        hidden=draw(st.sampled_from([1, 5, 16])),
        width=draw(st.sampled_from([1, 7, 12])),
        seed=draw(st.integers(0, 2**31)),
        skew=draw(st.sampled_from([0.0, 1.0, 4.0])),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
    )
    gen = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ids, dice = case.ids.clone(), torch.rand(case.ids.shape, generator=gen)
    strange = draw(st.sampled_from([0.0, 0.3]))
    ids[dice < strange / 2] = draw(st.sampled_from([-1, number, 2**40]))
    ids = torch.where(dice > 1 - strange / 2, ids[:, :1], ids)
    config = pruning(
        max_drop=draw(st.sampled_from([0.1, 0.5, 0.95])),
        drop=draw(st.sampled_from(["always", "always", "overload"])),
        estimator=(estimator := draw(st.sampled_from(["topk", "sampled"]))),
        score=draw(st.sampled_from(SCORES)),
        selection=draw(st.sampled_from(["global", "local"])),
        router_grad=draw(st.sampled_from(["full", "retained"])),
        activations=draw(st.sampled_from(["stash", "recompute"])),
        min_keep=draw(st.sampled_from([1, 3] if estimator == "sampled" else [0, 1, 3])),
        seed=draw(st.integers(0, 2**31)),
    )
    return dataclasses.replace(case, ids=ids), config


def check(case: Case, config: LRMoEConfig, result: Any, quota_E: list[int], keep_TK: torch.Tensor) -> None:
    n_E = counts(case.ids, case.num_experts).tolist()
    kept_E = [int(((case.ids == e) & (keep_TK > 1e-9)).sum()) for e in range(case.num_experts)]
    assert kept_E == quota_E
    assert all(min(n, config.min_keep) <= q <= n for q, n in zip(quota_E, n_E, strict=True))
    assert sum(n_E) - sum(quota_E) <= config.max_drop * sum(n_E)
    assert_result(result, case, keep_TK=keep_TK, router_grad=config.router_grad)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(calls())
def test_one_process(call: tuple[Case, LRMoEConfig]) -> None:
    case, config = call
    found = run(case, config)
    check(case, config, found.result, found.quota_E, kept(case, config))


@pytest.mark.distributed
@settings(
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_several_ranks(pool2: Pool, pool4: Pool, data: st.DataObject) -> None:
    pool = data.draw(st.sampled_from([pool2, pool4]))
    case, config = data.draw(calls(experts=(4, 8)))
    cuts = sorted(data.draw(st.integers(0, len(case.ids))) for _ in range(pool.world_size - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, len(case.ids)], strict=True)]
    found = spread(pool, case, config, sizes=sizes)
    check(case, config, found.result, found.quota_E, spread_kept(pool, case, config, sizes=sizes))
