"""Dtypes, autocast, evaluation, checkpointing, retained graphs and stacked layers, under plans that move experts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.layer import MoELayer
from tests.distributed.calls import even
from tests.distributed.plans import Crafted
from tests.distributed.pool import Pool
from tests.distributed.truth import Truth, mine
from tests.layer.harness import build, exact, forward, leaves, local_experts, pruning, run
from tests.reference import GRADS, Case, Result, make_case, plain_loop

pytestmark = pytest.mark.distributed

CASE = make_case(tokens=26, experts=8, top_k=3, hidden=8, width=6, seed=2, skew=1.5)
PLANS = (0, 1, 3, 10, 17, 19, 28)  # every layout that moves experts, every way back


def dtypes(dtype: torch.dtype) -> bool:
    """Worker: exact calls in a dtype, on either wire."""
    truth = Truth.of(CASE.to(dtype))
    sizes = even(CASE, dist.get_world_size())
    for seed, lean in itertools.product(range(1, 7), (False, True)):
        config = exact(lean_wire=lean)
        layer = build(truth.case, config, group=dist.group.WORLD, policy=Crafted(seed=seed))
        found = run(mine(truth.case, sizes), config, group=dist.group.WORLD, layer=layer)
        truth.check(found.result, sizes, f"{dtype}, plan {seed}, lean wire {lean}")
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(pool4: Pool, dtype: torch.dtype) -> None:
    assert all(pool4.run(dtypes, dtype, limit_s=60))


def autocast(dtype: torch.dtype) -> bool:
    """Worker: fp32 tensors under autocast give what a loop in its dtype gives, gradients in fp32."""
    truth = Truth.of(CASE.to(dtype))
    wide, sizes = truth.case.to(torch.float32), even(CASE, dist.get_world_size())
    for seed, lean in itertools.product(PLANS, (False, True)):
        layer = build(wide, exact(lean_wire=lean), group=dist.group.WORLD, policy=Crafted(seed=seed))
        with torch.autocast("cpu", dtype):
            found = run(mine(wide, sizes), exact(), group=dist.group.WORLD, layer=layer).result
        values = {name: getattr(found, name) for name in ("out", *GRADS)}
        assert {value.dtype for value in values.values()} == {torch.float32}
        cast = Result(**{name: value.to(dtype) for name, value in values.items()})
        truth.check(cast, sizes, f"autocast {dtype}, plan {seed}, lean wire {lean}")
    return True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(pool2: Pool, dtype: torch.dtype) -> None:
    assert all(pool2.run(autocast, dtype))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "evaluation with gradients": torch.enable_grad,
}


def evaluation() -> bool:
    """Worker: evaluation gives the training call's output, bit for bit, and touches no state; training goes on."""
    sizes, group = even(CASE, dist.get_world_size()), dist.group.WORLD
    part, truth = mine(CASE, sizes), Truth.of(CASE)
    for seed, lean in itertools.product(PLANS, (False, True)):
        config = exact(lean_wire=lean)
        layer = build(CASE, config, group=group, policy=Crafted(seed=seed))
        trained, before = run(part, config, group=group, layer=layer), layer.state_dict()
        for mode, context in MODES.items():
            with context():
                out = forward(layer, part, leaves(part, GRADS, group), training=False)
            assert torch.equal(out.detach(), trained.result.out), f"{mode}, plan {seed}"
        assert layer.state_dict() == before
        again = run(part, config, group=group, layer=layer)
        truth.check(again.result, sizes, f"training after evaluation, plan {seed}, lean wire {lean}")
    return True


def test_evaluation(pool2: Pool) -> None:
    assert all(pool2.run(evaluation))


def checkpointing() -> bool:
    """Worker: a recompute replays the plan: same bits, planned once, no further planning message."""
    sizes, group = even(CASE, dist.get_world_size()), dist.group.WORLD
    part = mine(CASE, sizes)
    for seed, drop in itertools.product(PLANS, (0.0, 0.5)):
        config = pruning(max_drop=drop, lean_wire="auto")
        plain = run(
            part, config, group=group, layer=build(CASE, config, group=group, policy=Crafted(seed=seed))
        )
        for kind in ("reentrant", "non-reentrant"):
            policy = Crafted(seed=seed)
            layer = build(CASE, config, group=group, policy=policy)
            found = run(part, config, group=group, layer=layer, checkpoint=kind)
            what = f"{kind}, plan {seed}, drop {drop}"
            for name in ("out", *GRADS):
                assert torch.equal(getattr(found.result, name), getattr(plain.result, name)), (
                    f"{what}: {name}"
                )
            assert policy.calls == 1, what
            assert found.record.bytes["plan"] == plain.record.bytes["plan"], what
    return True


def test_checkpointing(pool2: Pool) -> None:
    assert all(pool2.run(checkpointing))


def retained() -> bool:
    """Worker: a second backward through a kept graph, with another gradient, gives that gradient's result."""
    sizes, group = even(CASE, dist.get_world_size()), dist.group.WORLD
    part, truth = mine(CASE, sizes), Truth.of(CASE)
    for seed, lean in itertools.product(PLANS, (False, True)):
        layer = build(CASE, exact(lean_wire=lean), group=group, policy=Crafted(seed=seed))
        leaf = leaves(part, GRADS, group)
        out = forward(layer, part, leaf)
        out.backward(part.grad_out, retain_graph=True)
        for tensor in leaf.values():
            tensor.grad = None
        out.backward(-3 * part.grad_out)
        found = {name: tensor.grad / -3 for name, tensor in leaf.items() if tensor.grad is not None}
        truth.check(Result(out=out.detach(), **found), sizes, f"plan {seed}, lean wire {lean}")
        assert len(layer.telemetry.records) == 1
    return True


def test_a_graph_that_is_kept(pool2: Pool) -> None:
    assert all(pool2.run(retained))


def stacked(x: Tensor, call: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Two layers, one on the other, with a residual."""
    middle = x + call(0, x)
    return middle + call(1, middle)


def two_layers() -> bool:
    """Worker: layers that share scratch, called one after the other and twice before any backward."""
    group, sizes = dist.group.WORLD, even(CASE, dist.get_world_size())
    cases = [CASE, make_case(tokens=26, experts=8, top_k=2, hidden=8, width=5, seed=9)]
    exact_grads = reference_of_two(cases)
    for seed, lean in itertools.product(PLANS, (False, True)):
        layers = [
            build(case, exact(lean_wire=lean), group=group, policy=Crafted(seed=seed + 13 * i), layer=i)
            for i, case in enumerate(cases)
        ]
        parts = [mine(case, sizes) for case in cases]
        leaf = [leaves(part, GRADS, group) for part in parts]
        weights = [(one["d_gate_up"], one["d_down"]) for one in leaf]

        def call(i: int, x: Tensor, layers: list[MoELayer] = layers, weights: Any = weights) -> Tensor:
            return layers[i](
                x, mine(cases[i], sizes).ids, mine(cases[i], sizes).weights, *weights[i], training=True
            )

        outs = [stacked(leaf[0]["d_hidden"], call) for _ in range(2)]
        for out in outs:
            out.backward(parts[0].grad_out)
        block = local_experts(CASE, group)
        for i, (found, wanted) in enumerate(zip(weights, exact_grads, strict=True)):
            for mine_, whole in zip(found, wanted, strict=True):
                torch.testing.assert_close(
                    mine_.grad, 2 * whole[block], rtol=1e-10, atol=1e-11, msg=f"layer {i}, plan {seed}"
                )
    return True


def reference_of_two(cases: list[Case]) -> list[tuple[Tensor, Tensor]]:
    """Weight gradients of the two layers from plain loops, the chain rule by hand."""
    first = plain_loop(cases[0])
    middle = dataclasses.replace(cases[1], hidden=cases[0].hidden + first.out, grad_out=cases[0].grad_out)
    second = plain_loop(middle)
    assert second.d_hidden is not None
    below = plain_loop(dataclasses.replace(cases[0], grad_out=cases[0].grad_out + second.d_hidden))
    return [(one.d_gate_up, one.d_down) for one in (below, second)]  # type: ignore[misc]  # both were asked for


def test_layers_on_each_other(pool2: Pool) -> None:
    assert all(pool2.run(two_layers))
