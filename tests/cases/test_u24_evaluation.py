"""U24: evaluation changes no counter and no controller state, stores nothing, and computes the training forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.layer import MoELayer
from lrmoe.layer.buffers import scratch
from tests.distributed.calls import bounds_of
from tests.distributed.pool import Pool
from tests.layer.harness import build, forward, leaves, pruning, run
from tests.layer.test_memory import reachable_tensors
from tests.reference import GRADS, Case, make_case

CASE = make_case(tokens=40, experts=4, seed=2)
CONFIG = pruning(max_drop=0.5)
MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def evaluate(layer: MoELayer, case: Case, mode: str) -> Tensor:
    with MODES[mode]():
        return forward(layer, case, leaves(case, []), training=False)


@pytest.mark.parametrize("mode", MODES)
def test_state_and_next_training_step_do_not_feel_it(mode: str) -> None:
    quiet, disturbed = build(CASE, CONFIG), build(CASE, CONFIG)
    for layer in (quiet, disturbed):
        run(CASE, CONFIG, layer=layer)
    before = disturbed.state_dict()
    other = make_case(tokens=17, experts=4, seed=99)
    for _ in range(3):
        evaluate(disturbed, other, mode)
    assert disturbed.state_dict() == before
    first, second = (run(CASE, CONFIG, layer=layer) for layer in (quiet, disturbed))
    assert first.quota_E == second.quota_E
    assert first.record.micro_batch == second.record.micro_batch == 1
    for name in ("out", *GRADS):
        assert torch.equal(getattr(first.result, name), getattr(second.result, name)), name


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_stored(mode: str) -> None:
    layer = build(CASE, CONFIG)
    held = reachable_tensors(layer)  # its tables of fixed size
    evaluate(layer, CASE, mode)
    assert [t.shape for t in reachable_tensors(layer)] == [t.shape for t in held]
    assert sum(t.numel() for t in held) < CASE.hidden.numel(), "or the case is too small to tell"


@pytest.mark.parametrize("mode", MODES)
def test_output_equals_the_training_forward(mode: str) -> None:
    assert torch.equal(evaluate(build(CASE, CONFIG), CASE, mode), run(CASE, CONFIG).result.out)


def test_between_forward_and_backward_of_a_training_call() -> None:
    wanted = run(CASE, CONFIG).result
    layer, leaf = build(CASE, CONFIG), leaves(CASE, GRADS)
    out = forward(layer, CASE, leaf)
    evaluate(layer, make_case(tokens=9, experts=4, seed=5), "no_grad")
    out.backward(CASE.grad_out)
    for name in GRADS:
        assert torch.equal(leaf[name].grad, getattr(wanted, name)), name  # type: ignore[arg-type]


def test_the_controller_state_survives_a_round_trip() -> None:
    quiet = build(CASE, CONFIG)
    run(CASE, CONFIG, layer=quiet)
    loaded = build(CASE, CONFIG)
    loaded.load_state_dict(quiet.state_dict())
    first, second = (run(CASE, CONFIG, layer=layer) for layer in (quiet, loaded))
    assert first.quota_E == second.quota_E
    assert torch.equal(first.result.d_down, second.result.d_down)  # type: ignore[arg-type]


def train_and_evaluate() -> list[Tensor]:
    """Worker: a training step, an evaluation on all ranks, a training step."""
    part = CASE.tokens(*bounds_of([30, 10])[dist.get_rank()])
    other = CASE.tokens(*bounds_of([0, 40])[dist.get_rank()])
    layer = build(CASE, CONFIG, group=dist.group.WORLD)
    run(part, CONFIG, layer=layer, group=dist.group.WORLD)
    with torch.no_grad():
        out = forward(layer, other, leaves(other, [], dist.group.WORLD), training=False)
    again = run(part, CONFIG, layer=layer, group=dist.group.WORLD)
    assert again.record.micro_batch == 1
    return [out, again.result.out]


@pytest.mark.distributed
def test_evaluation_on_all_ranks(pool2: Pool) -> None:
    evaluated, trained = (torch.cat(parts) for parts in zip(*pool2.run(train_and_evaluate), strict=True))
    torch.testing.assert_close(evaluated, trained, rtol=1e-10, atol=1e-12)


def test_training_after_a_first_larger_evaluation_in_inference_mode() -> None:
    """Scratch that an evaluation in inference mode allocated must serve training."""
    scratch.release()
    large = make_case(tokens=300, experts=4, seed=3)
    with torch.inference_mode():
        forward(build(large, CONFIG), large, leaves(large, []), training=False)
    run(CASE, CONFIG)
