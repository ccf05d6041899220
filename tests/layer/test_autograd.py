"""The layer as an autograd citizen: frozen parts, accumulation, double backward, order of calls, eager errors."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.layer.harness import build, exact, forward, kept, leaves, pruning, run
from tests.reference import GRADS, assert_result, make_case, plain_loop

CASE = make_case(tokens=30, experts=4, seed=12)
SUBSETS = [s for n in range(1, 4) for s in itertools.combinations(GRADS, n)]


@pytest.mark.parametrize("checkpoint", [None, "non-reentrant"])
@pytest.mark.parametrize("needs", SUBSETS, ids="+".join)
def test_only_what_is_asked_for_is_computed_and_it_is_right(
    needs: tuple[str, ...], checkpoint: str | None
) -> None:
    found = run(CASE, exact(), needs=needs, checkpoint=checkpoint).result
    for name in GRADS:
        assert (getattr(found, name) is not None) == (name in needs)
    assert_result(found, CASE)


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
@pytest.mark.parametrize("needs", SUBSETS, ids="+".join)
def test_frozen_parts_with_pruning(needs: tuple[str, ...], estimator: str) -> None:
    config = pruning(max_drop=0.4, estimator=estimator)
    router_grad = "full" if estimator == "topk" else "retained"
    keep_TK = kept(CASE, config)
    assert_result(run(CASE, config, needs=needs).result, CASE, keep_TK=keep_TK, router_grad=router_grad)


def test_nothing_trainable_never_enters_backward() -> None:
    for mode in (exact(), pruning()):
        out = forward(build(CASE, mode), CASE, leaves(CASE, []))
        assert not out.requires_grad
        assert torch.allclose(out, plain_loop(CASE).out)


def test_thawed_experts_get_their_gradients() -> None:
    layer = build(CASE, exact())
    leaf = leaves(CASE, ["d_hidden"])
    forward(layer, CASE, leaf).backward(CASE.grad_out)
    assert leaf["d_down"].grad is None
    leaf["d_down"].requires_grad_(True)
    forward(layer, CASE, leaf).backward(CASE.grad_out)
    torch.testing.assert_close(leaf["d_down"].grad, plain_loop(CASE).d_down, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "config", [exact(), pruning(), pruning(estimator="topk")], ids=["exact", "sampled", "topk"]
)
def test_double_backward_is_a_clear_error(config: object) -> None:
    leaf = leaves(CASE, GRADS)
    out = forward(build(CASE, config), CASE, leaf)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(
        out, leaf["d_hidden"], CASE.grad_out.clone().requires_grad_(True), create_graph=True
    )
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_a_second_backward_through_a_freed_graph_is_refused() -> None:
    leaf = leaves(CASE, GRADS)
    out = forward(build(CASE, pruning()), CASE, leaf)
    out.backward(CASE.grad_out)
    with pytest.raises(RuntimeError, match=r"second time|freed"):
        out.backward(CASE.grad_out)


@pytest.mark.parametrize("config", [exact(), pruning(max_drop=0.5)], ids=["exact", "sampled"])
def test_a_retained_graph_gives_the_same_gradients_twice(config: object) -> None:
    leaf = leaves(CASE, GRADS)
    out = forward(build(CASE, config), CASE, leaf)  # type: ignore[arg-type]
    first = torch.autograd.grad(out, list(leaf.values()), CASE.grad_out, retain_graph=True)
    again = torch.autograd.grad(out, list(leaf.values()), CASE.grad_out)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


def test_inputs_are_never_written_to() -> None:
    for config in (exact(), pruning(), exact(activations="recompute"), pruning(estimator="topk")):
        leaf = leaves(CASE, GRADS)
        grad_out = CASE.grad_out.clone()
        forward(build(CASE, config), CASE, leaf).backward(grad_out)
        for name, field in zip(GRADS, ("hidden", "weights", "gate_up", "down"), strict=True):
            assert torch.equal(leaf[name].detach(), getattr(CASE, field)), name
        assert torch.equal(grad_out, CASE.grad_out)


def test_the_same_layer_in_two_places_of_one_graph() -> None:
    """Tied experts: the gradient is the sum of both uses, each with its own plan."""
    layer, leaf = build(CASE, exact()), leaves(CASE, GRADS)
    (forward(layer, CASE, leaf) + 2 * forward(layer, CASE, leaf)).backward(CASE.grad_out)
    wanted = plain_loop(CASE)
    for name in GRADS:
        torch.testing.assert_close(leaf[name].grad, 3 * getattr(wanted, name), rtol=1e-10, atol=1e-10)


def test_the_plan_of_a_call_is_fixed_in_its_forward() -> None:
    """Forward in a pruned step, backward after the clock moved into another step: the forward's plan counts."""
    config = pruning(max_drop=0.5)
    layer, leaf = build(CASE, config), leaves(CASE, GRADS)
    expected = run(CASE, config).result
    out = forward(layer, CASE, leaf)
    layer.clock.advance()
    out.backward(CASE.grad_out)
    for name in GRADS:
        assert torch.equal(leaf[name].grad, getattr(expected, name)), name  # type: ignore[arg-type]
