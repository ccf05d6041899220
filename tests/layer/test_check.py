"""check_every: the exact gradient beside the pruned one, and training that does not notice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lrmoe.layer import MoELayer, StepClock
from tests.layer.harness import Run, build, forward, leaves, pruning, run
from tests.reference import GRADS, Case, Result, make_case, plain_loop

CASE = make_case(tokens=61, experts=8, top_k=3, seed=1)
ZERO_TIME: dict[str, dict[str, float]] = {"ms": {}, "wall_ms": {}}


def compared(found: Result, case: Case, needs: Sequence[str] = GRADS) -> tuple[float, float]:
    """Cosine and relative error of a call's gradients against the float64 loop with nothing left out."""
    exact = plain_loop(case, dtype=torch.float64, needs=needs)
    ours, truth = (
        torch.cat([getattr(result, name).double().flatten() for name in needs]) for result in (found, exact)
    )
    return float(ours @ truth / (ours.norm() * truth.norm())), float((ours - truth).norm() / truth.norm())


def same_but_for_the_check(one: Run, other: Run) -> None:
    """Same bits out and back, and the same record."""
    for name in ("out", *GRADS):
        assert torch.equal(getattr(one.result, name), getattr(other.result, name)), name
    blank: dict[str, Any] = {"check_cosine": None, "check_relative_error": None, **ZERO_TIME}
    assert dataclasses.replace(one.record, **blank) == dataclasses.replace(other.record, **blank)


@pytest.mark.parametrize("checkpoint", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("select_in", ["backward", "forward"])
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_equals_the_reference_and_changes_nothing(
    estimator: str, select_in: str, activations: str, checkpoint: str | None
) -> None:
    fields = {"select_in": select_in, "score": "lrm" if select_in == "backward" else "alpha_phi"}
    config = pruning(max_drop=0.5, estimator=estimator, activations=activations, **fields)
    plain_layer, layer = build(CASE, config), build(CASE, config.replace(check_every=1))
    plain = run(CASE, config, layer=plain_layer, checkpoint=checkpoint)
    checked = run(CASE, layer.config, layer=layer, checkpoint=checkpoint)
    same_but_for_the_check(checked, plain)
    assert layer.state_dict() == plain_layer.state_dict()
    assert plain.record.check_cosine is None
    cosine, error = compared(checked.result, CASE)
    assert error > 0.05
    assert checked.record.check_cosine == pytest.approx(cosine, rel=1e-9)
    assert checked.record.check_relative_error == pytest.approx(error, rel=1e-9)
    assert checked.record.as_dict()["check_cosine"] == checked.record.check_cosine


@pytest.mark.parametrize("needs", [("d_hidden",), ("d_gate_up", "d_down")])
def test_compares_the_gradients_that_are_asked_for(needs: tuple[str, ...]) -> None:
    found = run(CASE, pruning(max_drop=0.5, check_every=1), needs=needs)
    cosine, error = compared(found.result, CASE, needs)
    assert found.record.check_cosine == pytest.approx(cosine, rel=1e-9)
    assert found.record.check_relative_error == pytest.approx(error, rel=1e-9)


def test_low_precision_is_compared_with_its_own_exact_gradient() -> None:
    case = CASE.to(torch.bfloat16)
    found = run(case, pruning(max_drop=0.5, check_every=1))
    cosine, error = compared(found.result, CASE)
    assert found.record.check_cosine == pytest.approx(cosine, abs=0.01)
    assert found.record.check_relative_error == pytest.approx(error, rel=0.05)


def test_no_gradient_at_all_compares_as_equal() -> None:
    case = dataclasses.replace(CASE, grad_out=torch.zeros_like(CASE.grad_out))
    record = run(case, pruning(max_drop=0.5, check_every=1)).record
    assert (record.check_cosine, record.check_relative_error) == (1.0, 0.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_compares_as_no_number(bad: float) -> None:
    grad = CASE.grad_out.clone()
    grad[3, 2] = bad
    record = run(dataclasses.replace(CASE, grad_out=grad), pruning(max_drop=0.5, check_every=1)).record
    assert record.check_cosine is not None
    assert record.check_relative_error is not None
    assert math.isnan(record.check_cosine)
    assert math.isnan(record.check_relative_error)


def steps_checked(config: Any, *, steps: int, layers: Sequence[int] = (2, 5, 9)) -> list[tuple[int, int]]:
    """(optimizer steps done, layer) of every checked call, two micro-batches a step."""
    clock = StepClock()
    model = [
        MoELayer(num_experts=8, hidden_size=16, intermediate_size=12, config=config, layer=index, clock=clock)
        for index in layers
    ]
    found = []
    for step in range(1, steps + 1):
        for _ in range(2):
            for layer in model:
                leaf = leaves(CASE, GRADS)
                forward(layer, CASE, leaf).backward(CASE.grad_out)
                if layer.last_record is not None and layer.last_record.check_cosine is not None:
                    assert layer.last_record.micro_batch == 0
                    found.append((step, layer.layer))
        clock.advance()
    return found


def test_layers_take_turns_in_the_first_micro_batch() -> None:
    expected = [(2, 2), (4, 5), (6, 9), (8, 2)]
    assert steps_checked(pruning(max_drop=0.5, check_every=2), steps=9) == expected


def test_exact_steps_are_not_checked() -> None:
    config = pruning(max_drop=0.5, check_every=1).replace(warmup_steps=3)
    assert steps_checked(config, steps=5, layers=(0,)) == [(4, 0), (5, 0)]


def test_a_second_backward_through_the_graph_keeps_the_first_ones_figures() -> None:
    layer, leaf = build(CASE, pruning(max_drop=0.5, check_every=1)), leaves(CASE, GRADS)
    out = forward(layer, CASE, leaf)
    out.backward(CASE.grad_out, retain_graph=True)
    assert layer.last_record is not None
    first = layer.last_record.check_relative_error
    out.backward(torch.ones_like(CASE.grad_out))
    assert layer.last_record.check_relative_error == first
