"""U04: ranks hold different numbers of tokens, odd numbers, or none; nobody pads, nobody waits."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.calls import spread, spread_kept
from tests.distributed.pool import Pool
from tests.layer.harness import exact, pruning
from tests.reference import assert_result, make_case

pytestmark = pytest.mark.distributed
SIZES = [[5, 7], [1, 9], [0, 6], [5, 5], [6, 6]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_exact(pool2: Pool, sizes: list[int], dtype: torch.dtype) -> None:
    case = make_case(tokens=sum(sizes), experts=4, top_k=2, hidden=8, width=6, dtype=dtype)
    found = spread(pool2, case, exact(), sizes=sizes)
    assert_result(found.result, case)
    assert [r.out.shape[0] for r in found.ranks] == sizes


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_pruned(pool2: Pool, sizes: list[int], estimator: str) -> None:
    case = make_case(tokens=sum(sizes), experts=4, top_k=2, hidden=8, width=6)
    config = pruning(max_drop=0.5, estimator=estimator, router_grad="full")
    found = spread(pool2, case, config, sizes=sizes)
    assert_result(found.result, case, keep_TK=spread_kept(pool2, case, config, sizes=sizes))
    first, second = found.records
    assert list(first.quota_E) == list(second.quota_E)
    assert list(first.counts_E) == list(second.counts_E)
    assert first.pairs == 2 * sum(sizes)


def test_quotas_come_from_global_counts(pool2: Pool) -> None:
    case = make_case(tokens=12, experts=4, top_k=2, hidden=8, width=6)
    config = pruning(max_drop=0.5)
    quotas = {tuple(spread(pool2, case, config, sizes=s).quota_E) for s in ([5, 7], [0, 12], [6, 6])}
    assert len(quotas) == 1


def test_ragged_over_four_ranks(pool4: Pool) -> None:
    case = make_case(tokens=23, experts=8, top_k=2, hidden=8, width=6)
    assert_result(spread(pool4, case, exact(), sizes=[0, 1, 22, 0]).result, case)
