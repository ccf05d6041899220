"""U15: weight gradients of all micro-batches add up, on top of what .grad held, each with its own plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.layer.harness import build, exact, forward, keep_weights, leaves, pruning
from tests.reference import GRADS, Result, make_case, plain_loop

CASE = make_case(tokens=32, experts=4, top_k=2, seed=3)
PARTS = [CASE.tokens(8 * i, 8 * i + 8) for i in range(4)]
SHARED = ("d_gate_up", "d_down")


def parameters() -> dict[str, Tensor]:
    leaf = leaves(CASE, GRADS)
    return {n: leaf[n] for n in SHARED}


@pytest.mark.parametrize("prefilled", [False, True])
def test_four_micro_batches_equal_one_batch(prefilled: bool) -> None:
    shared, layer = parameters(), build(CASE, exact())
    start = {n: torch.full_like(p, 0.25) if prefilled else torch.zeros_like(p) for n, p in shared.items()}
    if prefilled:
        for n, p in shared.items():
            p.grad = start[n].clone()
    for part in PARTS:
        forward(layer, part, {**leaves(part, GRADS), **shared}).backward(part.grad_out)
    wanted = plain_loop(CASE)
    for n in SHARED:
        torch.testing.assert_close(shared[n].grad, start[n] + getattr(wanted, n), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_gradients_between_steps(set_to_none: bool) -> None:
    shared, layer = parameters(), build(CASE, exact())
    optimizer = torch.optim.SGD(shared.values(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in PARTS:
            forward(layer, part, {**leaves(part, GRADS), **shared}).backward(part.grad_out)
        optimizer.step()
        layer.clock.advance()
    wanted = plain_loop(CASE)
    for n in SHARED:
        torch.testing.assert_close(shared[n].grad, getattr(wanted, n), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
@pytest.mark.parametrize("order", ["FBFB", "FFBB", "FFBB reversed"])
def test_every_micro_batch_keeps_its_own_plan(order: str, estimator: str) -> None:
    """Forward, forward, backward, backward: later calls must not overwrite the earlier ones' plans."""
    config = pruning(max_drop=0.5, estimator=estimator, router_grad="retained")
    shared, layer = parameters(), build(CASE, config)
    batches, outs = [leaves(part, GRADS) for part in PARTS], []
    for part, leaf in zip(PARTS, batches, strict=True):
        outs.append(forward(layer, part, {**leaf, **shared}))
        if order == "FBFB":
            outs[-1].backward(part.grad_out)
    if order != "FBFB":
        turn = range(3, -1, -1) if order.endswith("reversed") else range(4)
        for i in turn:
            outs[i].backward(PARTS[i].grad_out)
    wanted = {n: torch.zeros_like(p) for n, p in parameters().items()}
    for part, leaf in zip(PARTS, batches, strict=True):
        retained = Result(**{**vars(plain_loop(part)), "d_weights": leaf["d_weights"].grad})
        keep_TK = keep_weights(retained, part)
        assert int((keep_TK > 1e-9).sum()) == 8
        truth = plain_loop(part, keep_TK=keep_TK, router_grad="retained")
        torch.testing.assert_close(leaf["d_hidden"].grad, truth.d_hidden, rtol=1e-9, atol=1e-11)
        for n in SHARED:
            wanted[n] += getattr(truth, n)
    for n in SHARED:
        torch.testing.assert_close(shared[n].grad, wanted[n], rtol=1e-9, atol=1e-11)
