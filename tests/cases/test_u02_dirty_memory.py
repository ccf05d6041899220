"""U02: experts without rows (by count or by quota) get exactly zero weight gradients, whatever the memory held."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lrmoe.ops import grouped_mm, grouped_mm_input, grouped_mm_weight
from tests.cases.common import poison_memory
from tests.layer.harness import build, exact, kept, pruning, run
from tests.reference import Case, assert_result, make_case


def counts_case(counts: list[int], dtype: torch.dtype) -> Case:
    ids = torch.tensor([e for e, n in enumerate(counts) for _ in range(n)]).unsqueeze(1)
    case = make_case(tokens=sum(counts), experts=len(counts), top_k=1, hidden=16, width=16, dtype=dtype)
    return dataclasses.replace(case, ids=ids)


@pytest.mark.parametrize("counts", [[3, 0, 2, 0], [162, 0, 2577, 446, 0, 83], [0, 0], [0, 5]], ids=str)
def test_grouped_products_never_show_old_memory(counts: list[int]) -> None:
    rows = torch.randn(sum(counts), 16).bfloat16()
    weight = torch.randn(len(counts), 16, 16).bfloat16()
    for _ in range(5):
        poison_memory()
        out = torch.empty_like(weight)
        out.view(torch.int16).fill_(0x7FC0)  # NaN in bf16
        grouped_mm_weight(rows, rows, counts, out=out)
        assert bool(out.isfinite().all())
        for s, count in enumerate(counts):
            assert count or torch.equal(out[s], torch.zeros_like(out[s]))
        assert bool(grouped_mm(rows, weight, counts).isfinite().all())
        assert bool(grouped_mm_input(rows, weight, counts).isfinite().all())


@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[3, 0, 2, 0], [0, 0, 7, 1]], ids=str)
def test_experts_without_tokens(counts: list[int], dtype: torch.dtype, activations: str) -> None:
    case = counts_case(counts, dtype)
    layer = build(case, exact(activations=activations))
    for _ in range(2):  # two passes: the second meets the first one's memory
        poison_memory()
        found = run(case, exact(), layer=layer).result
        assert_result(found, case)
        for e, n in enumerate(counts):
            for grad in (found.d_gate_up, found.d_down):
                assert grad is not None
                assert n or torch.equal(grad[e], torch.zeros_like(grad[e]))


@pytest.mark.parametrize("activations", ["stash", "recompute"])
def test_experts_without_quota(activations: str) -> None:
    """Counts [3,4,2]; some expert's quota is 0 although it has tokens."""
    case = counts_case([3, 4, 2], torch.float64)
    config = pruning(max_drop=0.9, min_keep=0, estimator="topk", activations=activations)
    keep_TK = kept(case, config)
    layer = build(case, config)
    for _ in range(2):
        poison_memory()
        found = run(case, config, layer=layer)
        assert found.quota_E.count(0) == 2
        assert_result(found.result, case, keep_TK=keep_TK, router_grad="full")
        for e, quota in enumerate(found.quota_E):
            for grad in (found.result.d_gate_up, found.result.d_down):
                assert grad is not None
                assert quota or torch.equal(grad[e], torch.zeros_like(grad[e]))
