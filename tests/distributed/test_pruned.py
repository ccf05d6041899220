"""Pruning under expert parallelism: the kept set is one process's, and what travels is what is kept."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lrmoe.config import SCORES
from tests.distributed.calls import bounds_of, even, spread, spread_kept
from tests.distributed.pool import Pool
from tests.layer.harness import kept, pruning
from tests.reference import Case, assert_result, counts, make_case, scores, top_pairs

pytestmark = pytest.mark.distributed
CASE = make_case(tokens=61, experts=8, top_k=3, seed=1)


def balanced(case: Case, ranks: int) -> Case:
    """The case with expert ids shifted so that EP's quotas equal one process's: equal load on every rank."""
    tokens, top_k = case.ids.shape
    ids = (torch.arange(tokens * top_k) % case.num_experts).reshape(tokens, top_k)
    return dataclasses.replace(case, ids=ids)


def kept_per_expert(keep_TK: torch.Tensor, case: Case) -> list[int]:
    return [int(((case.ids == e) & (keep_TK > 1e-9)).sum()) for e in range(case.num_experts)]


@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("router_grad", ["full", "retained"])
@pytest.mark.parametrize("selection", ["global", "local"])
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_equals_the_reference(
    pool2: Pool, estimator: str, selection: str, router_grad: str, activations: str
) -> None:
    config = pruning(
        max_drop=0.4,
        estimator=estimator,
        selection=selection,
        router_grad=router_grad,
        activations=activations,
    )
    keep_TK = spread_kept(pool2, CASE, config)
    found = spread(pool2, CASE, config)
    assert_result(found.result, CASE, keep_TK=keep_TK, router_grad=router_grad)
    assert kept_per_expert(keep_TK, CASE) == found.quota_E
    assert sum(found.quota_E) == found.records[0].kept == 183 - 73
    n_E = counts(CASE.ids, 8).tolist()
    assert all(min(n, 1) <= q <= n for q, n in zip(found.quota_E, n_E, strict=True))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_every_score(pool2: Pool, estimator: str, score: str) -> None:
    config = pruning(max_drop=0.4, estimator=estimator, score=score)
    keep_TK = spread_kept(pool2, CASE, config)
    found = spread(pool2, CASE, config)
    router_grad = "full" if estimator == "topk" else "retained"
    assert_result(found.result, CASE, keep_TK=keep_TK, router_grad=router_grad)
    if estimator == "topk" and score != "random":
        assert torch.equal(keep_TK > 0.5, top_pairs(scores(CASE, score), CASE.ids, found.quota_E) > 0.5)


@pytest.mark.parametrize("score", ["lrm", "abs_grad", "random"])
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_keeps_the_same_set_as_one_process(pool2: Pool, pool4: Pool, estimator: str, score: str) -> None:
    """Balanced counts, so that one process and EP get the same quotas; an odd split of the tokens."""
    case = balanced(make_case(tokens=64, experts=4, top_k=2, seed=3), 2)
    config = pruning(max_drop=0.5, estimator=estimator, score=score)
    alone = kept(case, config)
    for pool, sizes in ((pool2, [20, 44]), (pool4, [1, 30, 0, 33])):
        shared = spread_kept(pool, case, config, sizes=sizes)
        assert torch.equal(alone > 1e-9, shared > 1e-9)
        torch.testing.assert_close(alone, shared, rtol=1e-9, atol=0)


def test_local_selection_keeps_each_ranks_share(pool2: Pool) -> None:
    config = pruning(max_drop=0.5, estimator="topk", selection="local")
    keep_TK = spread_kept(pool2, CASE, config)
    found = spread(pool2, CASE, config)
    score_TK = scores(CASE)
    for begin, end in bounds_of(even(CASE, 2)):
        part, ids = keep_TK[begin:end] > 1e-9, CASE.ids[begin:end]
        here = [int((part & (ids == e)).sum()) for e in range(8)]
        assert torch.equal(part, top_pairs(score_TK[begin:end], ids, here) > 0.5)
        for e, kept_here in enumerate(here):
            fair = found.quota_E[e] * int((ids == e).sum()) / max(int((CASE.ids == e).sum()), 1)
            assert abs(kept_here - fair) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(pool2: Pool, dtype: torch.dtype) -> None:
    case = CASE.to(dtype)
    found = spread(pool2, case, pruning(max_drop=0.4, estimator="topk", router_grad="retained"))
    assert found.result.d_weights is not None
    keep_TK = (found.result.d_weights != 0).double()
    assert kept_per_expert(keep_TK, case) == found.quota_E
    assert_result(found.result, case, keep_TK=keep_TK, router_grad="retained")
    sampled = pruning(max_drop=0.4, score="alpha", router_grad="full")
    keep_TK = spread_kept(pool2, case.to(torch.float64), sampled)
    assert_result(spread(pool2, case, sampled).result, case, keep_TK=keep_TK)


def test_four_ranks(pool4: Pool) -> None:
    for estimator in ("topk", "sampled"):
        config = pruning(max_drop=0.5, estimator=estimator, router_grad="full")
        keep_TK = spread_kept(pool4, CASE, config, sizes=[0, 50, 3, 8])
        found = spread(pool4, CASE, config, sizes=[0, 50, 3, 8])
        assert_result(found.result, CASE, keep_TK=keep_TK)


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_checkpointing(pool2: Pool, checkpoint: str) -> None:
    config = pruning(max_drop=0.5)
    plain = spread(pool2, CASE, config).result
    replayed = spread(pool2, CASE, config, checkpoint=checkpoint).result
    for name in ("out", "d_hidden", "d_weights", "d_gate_up", "d_down"):
        assert torch.equal(getattr(plain, name), getattr(replayed, name)), name


def test_overload_drops_the_fewest_and_only_on_the_loaded_rank(pool2: Pool) -> None:
    ids = torch.cat([torch.zeros(30, 1), torch.full((10, 1), 2)]).long()
    case = dataclasses.replace(make_case(tokens=40, experts=4, top_k=1), ids=ids)
    config = pruning(max_drop=0.5, drop="overload", replica_slots=0)
    found = spread(pool2, case, config)
    assert found.quota_E == [20, 0, 10, 0]
    assert list(found.records[0].backward_load_R) == [20, 10]
    assert found.records[0].drop_reason == "overload"
    assert_result(found.result, case, keep_TK=spread_kept(pool2, case, config), router_grad="retained")


def test_the_peak_falls_first(pool2: Pool) -> None:
    found = spread(pool2, CASE, pruning(max_drop=0.3)).records[0]
    load = list(found.forward_load_R)
    gap, cap = abs(load[0] - load[1]), int(0.3 * 183)
    least = max(load) - cap if cap <= gap else -(-(sum(load) - cap) // 2)
    assert max(found.backward_load_R) == least


def test_rows_and_bytes_fall_to_the_kept_share(pool2: Pool) -> None:
    case = balanced(make_case(tokens=256, experts=8, top_k=2, hidden=64, width=16), 2)
    full = spread(pool2, case, pruning(max_drop=0.0)).records
    half = spread(pool2, case, pruning(max_drop=0.5)).records
    for complete, pruned in zip(full, half, strict=True):
        assert pruned.rows_backward_local == sum(pruned.quota_E) // 2
        assert complete.rows_backward_local == 256
        for phase in ("exchange", "return"):
            assert pruned.bytes[phase] == pytest.approx(0.5 * complete.bytes[phase], rel=0.1), phase
            assert complete.bytes[phase] >= 128 * 64 * 8
        for phase in ("dispatch", "combine"):
            assert pruned.bytes[phase] == pytest.approx(complete.bytes[phase], rel=0.05), phase
    sent = sum(sum(r.bytes.values()) for r in half) / sum(sum(r.bytes.values()) for r in full)
    assert sent < 0.8


def test_score_messages_are_a_few_bytes_per_pair(pool2: Pool) -> None:
    records = spread(pool2, CASE, pruning(max_drop=0.5)).records
    for one in records:
        assert sum(one.bytes.get(p, 0) for p in ("score", "select", "reroute")) <= 183 * 16
