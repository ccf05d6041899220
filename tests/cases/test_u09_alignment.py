"""U09: any counts and any base pointer: nothing needs multiples of 8 rows or 16 bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lrmoe.ops import grouped_mm, grouped_mm_input, grouped_mm_weight
from tests.layer.harness import build, exact, forward, kept, leaves, pruning, run
from tests.reference import GRADS, Case, Result, assert_result, make_case


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, one element off the start of a storage."""
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    view = storage[1:].view(tensor.shape)
    return view.copy_(tensor.detach())


def counts_case(counts: list[int], hidden: int, dtype: torch.dtype) -> Case:
    ids = torch.tensor([e for e, n in enumerate(counts) for _ in range(n)]).unsqueeze(1)
    case = make_case(tokens=sum(counts), experts=len(counts), top_k=1, hidden=hidden, width=40, dtype=dtype)
    return dataclasses.replace(case, ids=ids)


@pytest.mark.parametrize("hidden", [24, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activations", ["stash", "recompute"])
def test_odd_counts_and_misaligned_everything(hidden: int, dtype: torch.dtype, activations: str) -> None:
    case = counts_case([1, 7, 9, 0, 15], hidden, dtype)
    leaf = {n: misaligned(t).requires_grad_(True) for n, t in leaves(case, GRADS).items()}
    assert leaf["d_gate_up"].data_ptr() % 16
    out = forward(build(case, exact(activations=activations)), case, leaf)
    out.backward(misaligned(case.grad_out))
    assert_result(Result(out=out.detach(), **{n: leaf[n].grad for n in GRADS}), case)


@pytest.mark.parametrize("offset", [True, False])
def test_grouped_products_of_misaligned_operands(offset: bool) -> None:
    counts = [1, 7, 9, 0, 15]
    place = misaligned if offset else torch.clone
    rows, grad = place(torch.randn(32, 24).bfloat16()), place(torch.randn(32, 40).bfloat16())
    weight = place(torch.randn(5, 40, 24).bfloat16())
    copies = [t.clone() for t in (rows, grad, weight)]
    assert torch.equal(grouped_mm(rows, weight, counts), grouped_mm(copies[0], copies[2], counts))
    assert torch.equal(grouped_mm_input(grad, weight, counts), grouped_mm_input(copies[1], copies[2], counts))
    found, wanted = misaligned(weight), torch.empty_like(weight)
    grouped_mm_weight(grad, rows, counts, out=found)
    grouped_mm_weight(copies[1], copies[0], counts, out=wanted)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_quotas_that_turn_even_counts_odd(dtype: torch.dtype) -> None:
    case = counts_case([8, 8], 24, dtype)
    config = pruning(max_drop=0.5, estimator="topk", score="alpha")
    case = dataclasses.replace(case, weights=(torch.arange(16).unsqueeze(1) + 1).to(dtype) / 16)
    found = run(case, config)
    assert sum(found.quota_E) == 8
    odd = run(case, pruning(max_drop=0.44, estimator="topk", score="alpha"))
    assert {q % 2 for q in odd.quota_E} == {0, 1}
    for one, settings in ((found, config), (odd, pruning(max_drop=0.44, estimator="topk", score="alpha"))):
        assert_result(one.result, case, keep_TK=kept(case.to(torch.float64), settings))
