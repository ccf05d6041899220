"""U18: under EP the router and input gradients hold every expert's term, not only the local ones'."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.calls import bounds_of
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, forward, leaves, pruning
from tests.reference import GRADS, make_case, plain_loop

pytestmark = pytest.mark.distributed

# The two experts of every token live on different ranks: (0 or 1) on the first, (2 or 3) on the second.
CASE = dataclasses.replace(
    make_case(tokens=12, experts=4, top_k=2, hidden=8, width=6),
    ids=torch.stack([torch.arange(12) % 2, 2 + torch.arange(12) // 2 % 2], dim=1),
)


def routing_weights(hidden: Tensor, router_EH: Tensor, ids: Tensor) -> Tensor:
    return torch.softmax(hidden @ router_EH.t(), dim=-1).gather(1, ids)


def router_run(config: Any, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Worker: gradients of router weights (this rank's tokens) and of the input, through a real router."""
    part = CASE.tokens(*bounds_of(sizes)[dist.get_rank()])
    leaf = leaves(part, GRADS, dist.group.WORLD)
    router = torch.randn(
        4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ).requires_grad_(True)
    weights = routing_weights(leaf["d_hidden"], router, part.ids)
    out = forward(build(part, config, group=dist.group.WORLD), part, {**leaf, "d_weights": weights})
    out.backward(part.grad_out)
    assert router.grad is not None
    assert leaf["d_hidden"].grad is not None
    return router.grad, leaf["d_hidden"].grad


def reference_run() -> tuple[Tensor, Tensor]:
    hidden = CASE.hidden.clone().requires_grad_(True)
    router = torch.randn(
        4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ).requires_grad_(True)
    weights = routing_weights(hidden, router, CASE.ids)
    truth = plain_loop(dataclasses.replace(CASE, weights=weights.detach()))
    weights.backward(truth.d_weights)
    assert router.grad is not None
    assert hidden.grad is not None
    assert truth.d_hidden is not None
    return router.grad, hidden.grad + truth.d_hidden


@pytest.mark.parametrize("sizes", [[6, 6], [2, 10], [0, 12]], ids=str)
def test_router_and_input_gradients_equal_the_reference(pool2: Pool, sizes: list[int]) -> None:
    ranks = pool2.run(router_run, exact(), sizes)
    d_router, d_hidden = reference_run()
    torch.testing.assert_close(sum(r[0] for r in ranks), d_router, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(torch.cat([r[1] for r in ranks]), d_hidden, rtol=1e-10, atol=1e-13)


def test_a_full_router_gradient_does_not_feel_pruning(pool2: Pool) -> None:
    for estimator in ("topk", "sampled"):
        ranks = pool2.run(router_run, pruning(max_drop=0.5, estimator=estimator, router_grad="full"), [6, 6])
        d_router, _ = reference_run()
        torch.testing.assert_close(sum(r[0] for r in ranks), d_router, rtol=1e-10, atol=1e-13)
