"""U19: the backward exchange moves this call's rows: g then -3g gives gradients times -3, in poisoned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.cases.common import poison_memory
from tests.distributed.calls import bounds_of
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, forward, leaves, pruning
from tests.reference import GRADS, make_case

CASE = make_case(tokens=24, experts=4, top_k=2, hidden=16, width=12)
MODES = {
    "exact": exact(),
    "recompute": exact(activations="recompute"),
    "topk": pruning(max_drop=0.5, estimator="topk"),
    "topk retained": pruning(max_drop=0.5, estimator="topk", router_grad="retained"),
    "sampled": pruning(max_drop=0.5),
    "sampled full local": pruning(max_drop=0.5, router_grad="full", selection="local"),
}


def two_backwards(config: Any, sizes: list[int] | None) -> list[dict[str, Tensor]]:
    """Gradients for g and for -3g, of the same call repeated, everything poisoned before each backward."""
    group = None if sizes is None else dist.group.WORLD
    part = CASE if sizes is None else CASE.tokens(*bounds_of(sizes)[dist.get_rank()])
    found = []
    for factor in (1.0, -3.0):
        leaf = leaves(part, GRADS, group)
        out = forward(build(part, config, group=group), part, leaf)
        poison_memory()
        out.backward(factor * part.grad_out)
        found.append({n: grad for n in GRADS if (grad := leaf[n].grad) is not None})
    return found


def assert_scaled(first: dict[str, Tensor], second: dict[str, Tensor], mode: str) -> None:
    """Sampled weights 1/pi come from fp32 scores, which a factor of 3 rounds anew; all else is exact to fp64."""
    limit = 1e-5 if mode.startswith("sampled") else 1e-13
    for n in GRADS:
        assert bool(first[n].isfinite().all()), n
        assert bool(second[n].isfinite().all()), n
        gap = (second[n] + 3 * first[n]).abs().max() if first[n].numel() else 0.0
        assert float(gap) <= limit * float(first[n].abs().amax() if first[n].numel() else 0.0), n


@pytest.mark.parametrize("mode", MODES)
def test_one_process(mode: str) -> None:
    first, second = two_backwards(MODES[mode], None)
    assert_scaled(first, second, mode)


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [[12, 12], [3, 21], [24, 0]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks(pool2: Pool, mode: str, sizes: list[int]) -> None:
    for first, second in pool2.run(two_backwards, MODES[mode], sizes):
        assert_scaled(first, second, mode)
