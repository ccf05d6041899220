"""Nothing of a call outlives it: counted over every tensor the process can still reach."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lrmoe.layer import MoELayer
from tests.layer.harness import build, exact, forward, leaves, pruning, run
from tests.reference import GRADS, make_case

CASE = make_case(tokens=64, experts=4, hidden=32, width=24)
MODES = [
    exact(),
    pruning(max_drop=0.5),
    pruning(max_drop=0.5, estimator="topk"),
    exact(activations="recompute"),
]


def reachable_tensors(root: object) -> list[Tensor]:
    """Every tensor that `root` keeps alive, modules, classes and functions' globals left out."""
    seen: set[int] = set()
    found: list[Tensor] = []
    stack: list[Any] = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type) or type(item).__name__ in ("module", "function"):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        stack.extend(gc.get_referents(item))
    return found


def row_tensors(layer: MoELayer) -> list[tuple[int, ...]]:
    """Shapes of floating tensors the layer still holds (routing ids and plans are integers)."""
    gc.collect()
    history = layer.controller.learned.sums_XF
    held = [t for t in reachable_tensors(layer) if t is not history]
    return [tuple(t.shape) for t in held if t.is_floating_point() and t.numel() > 8]


def kept_numbers(layer: MoELayer) -> int:
    """Entries of the tensors the layer holds beyond those of its controller (sums per expert)."""
    gc.collect()
    learned = layer.controller.learned
    own = learned.sums_XF.numel() + learned.booked_2.numel()
    return sum(t.numel() for t in reachable_tensors(layer)) - own


def live_growth(call: Callable[[], object]) -> int:
    """Floating tensors of this process that exist after the third `call` and not after the second."""

    def census() -> set[int]:
        gc.collect()
        return {id(t) for t in gc.get_objects() if issubclass(type(t), Tensor) and t.is_floating_point()}

    call()
    call()
    before = len(census())
    call()
    return len(census()) - before


@pytest.mark.parametrize("config", MODES, ids=lambda c: f"{c.estimator}-{c.max_drop}-{c.activations}")
def test_nothing_is_left_after_backward(config: Any) -> None:
    layer = build(CASE, config)
    assert live_growth(lambda: bool(run(CASE, config, layer=layer))) == 0
    assert row_tensors(layer) == []


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_keeps_nothing(grad_mode: Callable[[], Any]) -> None:
    layer = build(CASE, pruning())

    def evaluate() -> None:
        with grad_mode():
            forward(layer, CASE, leaves(CASE, []), training=False)

    assert live_growth(evaluate) == 0
    assert kept_numbers(layer) == 0


def test_no_grad_in_train_mode_keeps_ids_and_plan_until_the_next_step() -> None:
    layer = build(CASE, pruning())
    with torch.no_grad():
        forward(layer, CASE, leaves(CASE, []))
    assert row_tensors(layer) == []
    assert 0 < kept_numbers(layer) <= 2 * CASE.ids.numel()
    layer.clock.advance()
    assert kept_numbers(layer) == 0


def test_records_for_replay_are_bounded() -> None:
    case = make_case(tokens=2, experts=4)
    layer = build(case, pruning(), step=1)
    sizes = []
    for _ in range(2):
        for _ in range(300):
            with torch.no_grad():
                forward(layer, case, leaves(case, []))
        sizes.append(kept_numbers(layer))
    assert sizes[0] == sizes[1], "a loop of no_grad calls in train mode grows without bound"
    layer.release()
    assert kept_numbers(layer) == 0


def test_a_forward_that_is_never_backpropagated_is_freed_with_its_output() -> None:
    layer = build(CASE, pruning())

    def drop_it() -> None:
        forward(layer, CASE, leaves(CASE, GRADS))

    assert live_growth(drop_it) == 0
    assert row_tensors(layer) == []


def test_the_output_does_not_pin_a_larger_buffer() -> None:
    for config in MODES:
        with torch.no_grad():
            out = forward(build(CASE, config), CASE, leaves(CASE, []), training=False)
        assert out.untyped_storage().nbytes() == out.numel() * out.element_size()
        found = run(CASE, config).result
        for name in GRADS:
            grad = getattr(found, name)
            assert grad.untyped_storage().nbytes() == grad.numel() * grad.element_size(), name


def test_stashes_are_saved_tensors_that_hooks_can_move() -> None:
    """Tensors go through save_for_backward, so offloading and activation checkpointing see them all."""
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel() * tensor.element_size())
        return tensor.clone()

    leaf = leaves(CASE, GRADS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward(build(CASE, exact(activations="stash")), CASE, leaf)
    rows = 128 * 2 * 24 * 8  # gate and up of every pair, float64
    assert sum(packed) >= rows
    out.backward(CASE.grad_out)
    expected = run(CASE, exact(activations="stash")).result
    for name in GRADS:
        assert torch.equal(leaf[name].grad, getattr(expected, name)), name  # type: ignore[arg-type]


def test_recompute_saves_no_activations_of_experts() -> None:
    sizes = {}
    for mode in ("stash", "recompute"):
        seen: dict[int, int] = {}

        def pack(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = forward(build(CASE, exact(activations=mode)), CASE, leaves(CASE, GRADS))
        sizes[mode] = sum(seen.values())
        del out
    assert sizes["recompute"] <= sizes["stash"] - 128 * 2 * 24 * 8
