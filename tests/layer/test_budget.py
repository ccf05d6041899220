"""Budgets on one rank: of a call, and of a model whose layers wait for their backward together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lrmoe.errors import InfeasibleError
from lrmoe.layer import MoELayer, StepClock, release_scratch
from lrmoe.layer.budget import device_bytes
from lrmoe.telemetry.tracking import StorageTracker
from tests.layer.harness import build, exact, forward, leaves, pruning, run
from tests.reference import GRADS, assert_result, make_case

CASE = make_case(tokens=256, experts=4, top_k=2, hidden=64, width=48, dtype=torch.float32)
LAYERS = 3
PARAMETERS = 4 * 3 * 64 * 48 * 4  # bytes of one layer


def model(budget: int | str, **fields: Any) -> list[MoELayer]:
    clock = StepClock()
    return [
        MoELayer(
            num_experts=4,
            hidden_size=64,
            intermediate_size=48,
            config=exact(memory_budget=budget, **fields),
            layer=number,
            clock=clock,
        )
        for number in range(LAYERS)
    ]


def step(layers: list[MoELayer], *, checkpoint: str | None = None) -> int:
    """Two micro-batches through all layers, each fed by the one before; the tracker's peak in bytes."""
    release_scratch()
    leaf = [leaves(CASE, GRADS) for _ in layers]
    tracker = StorageTracker()
    with tracker:
        for _ in range(2):
            hidden = leaf[0]["d_hidden"]
            for layer, mine in zip(layers, leaf, strict=True):
                hidden = forward(layer, CASE, {**mine, "d_hidden": hidden}, checkpoint=checkpoint)
            hidden.backward(CASE.grad_out)
            del hidden
    layers[0].clock.advance()
    return tracker.peak


def smallest(layers: list[MoELayer]) -> int:
    with pytest.raises(InfeasibleError, match=r"^memory_budget: ") as caught:
        step(layers)
    assert caught.value.smallest is not None
    return caught.value.smallest


def test_a_model_keeps_its_budget_over_all_layers() -> None:
    # Between the layers autograd holds outputs and gradients of inputs: not the layers' own, and few.
    between = 2 * CASE.hidden.nbytes
    loose = step(model(2**60)) + LAYERS * PARAMETERS
    least = smallest(model(1))
    assert least < 0.8 * loose
    for budget in (least, (least + loose) // 2):
        layers = model(budget)
        assert step(layers) + LAYERS * PARAMETERS <= budget + between
        assert layers[0].last_record is not None
    with pytest.raises(InfeasibleError):
        step(model(LAYERS * PARAMETERS))


def test_a_model_budget_leaves_room_for_the_layers_that_come() -> None:
    tight = model((step(model(2**60)) + LAYERS * PARAMETERS) * 3 // 4)
    step(tight)
    records = [layer.last_record for layer in tight]
    assert all(record is not None and record.recomputed for record in records)


def test_nothing_waits_after_a_step_and_budgets_hold_in_every_step() -> None:
    layers = model(2**60)
    step(layers)
    assert layers[0].clock.waiting.stashes == []
    with torch.no_grad():
        forward(layers[0], CASE, leaves(CASE, GRADS))
    forward(layers[0], CASE, leaves(CASE, GRADS))  # never backpropagated
    assert len(layers[0].clock.waiting.stashes) == 1
    layers[0].clock.advance()
    assert layers[0].clock.waiting.stashes == []


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_checkpointed_layers_wait_for_nothing(checkpoint: str, training: bool) -> None:
    layers = model(2**60)
    hidden, leaf = CASE.hidden.clone().requires_grad_(), leaves(CASE, GRADS)
    waiting = layers[0].clock.waiting
    for layer in layers:
        hidden = forward(layer, CASE, {**leaf, "d_hidden": hidden}, training=training, checkpoint=checkpoint)
    assert waiting.stashes == []
    hidden.backward(CASE.grad_out)
    assert waiting.stashes == []


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_many_checkpointed_micro_batches_need_no_more_than_one(checkpoint: str) -> None:
    budget = step(model(2**60), checkpoint=checkpoint) + 2 * LAYERS * PARAMETERS
    layers = model(budget)
    for _ in range(4):
        hidden, leaf = CASE.hidden.clone().requires_grad_(), leaves(CASE, GRADS)
        for layer in layers:
            hidden = forward(layer, CASE, {**leaf, "d_hidden": hidden}, checkpoint=checkpoint)
        hidden.backward(CASE.grad_out)
        for layer in layers:
            assert layer.last_record is not None
            assert (layer.last_record.chunks, layer.last_record.recomputed) == (1, False)


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_a_checkpointed_layer_leaves_room_for_what_waits(checkpoint: str) -> None:
    def least() -> int:
        with pytest.raises(InfeasibleError) as caught:
            forward(tight, CASE, leaves(CASE, GRADS), checkpoint=checkpoint)
        assert caught.value.smallest is not None
        return caught.value.smallest

    loose, tight = model(2**60)[0], model(1)[1]
    before = least()
    forward(loose, CASE, leaves(CASE, GRADS))
    (stash,) = loose.clock.waiting.stashes
    tight.clock.waiting.stashes.append(stash)
    assert least() == before + int(stash[1][0])


@pytest.mark.parametrize("config", [exact(), pruning(max_drop=0.5), exact(activations="recompute")])
@pytest.mark.parametrize("share", [1, 1.5])
def test_a_call_within_a_budget_gives_the_same(config: Any, share: float) -> None:
    with pytest.raises(InfeasibleError) as caught:
        run(CASE, config.replace(layer_budget=1))
    assert caught.value.smallest is not None
    bounded = config.replace(layer_budget=int(share * caught.value.smallest))
    found = run(CASE, bounded)
    assert found.record.chunks > 1 or found.record.recomputed
    if config.max_drop == 0:
        assert_result(found.result, CASE)
    free = run(CASE, config).result
    assert torch.allclose(found.result.out, free.out, atol=1e-5)
    for name in GRADS:
        assert torch.allclose(getattr(found.result, name), getattr(free, name), atol=1e-4), name


def test_of_two_budgets_the_error_names_the_one_that_cannot_be_met() -> None:
    with pytest.raises(InfeasibleError, match=r"^layer_budget: ") as caught:
        run(CASE, exact(layer_budget=1, memory_budget=2**30))
    least = caught.value.smallest
    assert least is not None
    with pytest.raises(InfeasibleError, match=r"^memory_budget: "):
        run(CASE, exact(layer_budget=2**30, memory_budget=1))
    assert run(CASE, exact(layer_budget=least, memory_budget=2**30)).record.chunks > 1
    with pytest.raises(InfeasibleError, match=r"^layer_budget: "):
        run(CASE, exact(layer_budget=least - 1, memory_budget=2**30))


def test_evaluation_keeps_to_the_budget_too() -> None:
    layer = build(CASE, exact(layer_budget=1))
    with pytest.raises(InfeasibleError), torch.no_grad():
        forward(layer, CASE, leaves(CASE, []), training=False)


def test_a_share_is_of_the_hosts_memory() -> None:
    assert device_bytes(torch.device("cpu")) > 2**28
    assert run(CASE, exact(layer_budget="50%")).record.chunks == 1
