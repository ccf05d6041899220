"""U26: nothing of a call outlives it but the ids and plan that a recompute needs, which are bounded and let go."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.layer import MoELayer, StepClock
from lrmoe.layer.buffers import scratch
from tests.cases.on_device import NEEDS_CUDA, check_on_device
from tests.integrations.models import make_model
from tests.layer.harness import REENTRANT, build, exact, forward, leaves, pruning, run
from tests.layer.test_memory import reachable_tensors
from tests.reference import GRADS, Case, make_case

LAYERS = 4
MODES: dict[str, LRMoEConfig] = {
    "exact": exact(),
    "sampled": pruning(max_drop=0.5),
    "topk": pruning(max_drop=0.5, estimator="topk"),
    "forward": pruning(max_drop=0.5, select_in="forward", score="alpha"),
    "chunks": exact(layer_budget=40_000),
}


def stack(config: LRMoEConfig) -> list[MoELayer]:
    clock = StepClock()
    return [
        MoELayer(num_experts=4, hidden_size=16, intermediate_size=12, config=config, layer=i, clock=clock)
        for i in range(LAYERS)
    ]


def case_of(tokens: int) -> Case:
    return make_case(tokens=tokens, experts=4, top_k=2, hidden=16, width=12, seed=tokens, dtype=torch.float32)


def train(layers: list[MoELayer], case: Case, kind: str | None = None) -> None:
    """One micro-batch through all layers, and back."""
    leaf = leaves(case, GRADS)
    hidden = leaf["d_hidden"]
    for layer in layers:
        hidden = forward(layer, case, {**leaf, "d_hidden": hidden}, checkpoint=kind)
    hidden.backward(case.grad_out)


def held(layers: list[MoELayer]) -> list[Tensor]:
    """What the layers keep alive beside their tables of fixed size, which past scores teach them."""
    gc.collect()
    learned = [layer.controller.learned for layer in layers]
    own = {id(table) for one in learned for table in (one.sums_XF, one.booked_2)}
    return [tensor for tensor in reachable_tensors(layers) if id(tensor) not in own]


def floats() -> int:
    """Bytes of all floating tensors of this process, scratch that is kept for the next call left out."""
    gc.collect()
    kept = {id(t) for t in scratch._buffers.values()}
    every = (t for t in gc.get_objects() if issubclass(type(t), Tensor) and id(t) not in kept)
    return sum(t.numel() * t.element_size() for t in every if t.is_floating_point())


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_a_call_is_reachable_from_its_layers(mode: str) -> None:
    layers, case = stack(MODES[mode]), case_of(40)
    with torch.no_grad():
        for layer in layers:
            forward(layer, case, leaves(case, []), training=False)
    assert held(layers) == []
    train(layers, case)
    assert all(
        layer.last_record is not None for layer in layers
    )  # read: what was still on the device is told
    assert held(layers) == []


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_what_a_recompute_needs_is_narrow_and_goes_with_the_step(kind: str) -> None:
    """Ids of 2 bytes; a replay lets go of them but for the last few calls, and the optimizer step of all."""
    layers, case = stack(MODES["sampled"]), case_of(40)
    leaf, outs = leaves(case, GRADS), []
    for _ in range(3):
        hidden = leaf["d_hidden"]
        for layer in layers:
            hidden = forward(layer, case, {**leaf, "d_hidden": hidden}, checkpoint=kind)
        outs.append(hidden)
    stored = [t for t in held(layers) if t.numel() > 8]
    assert {(t.dtype, t.shape) for t in stored} == {(torch.int16, case.ids.shape)}
    assert len(stored) == 3 * LAYERS
    for out in outs:
        out.backward(case.grad_out)
    del outs, out, hidden
    assert all(t.dtype == torch.int16 or t.numel() <= 8 for t in held(layers))
    layers[0].clock.advance()
    assert [len(layer.telemetry.drain()) for layer in layers] == [
        3
    ] * LAYERS  # read: figures that wait for a reader
    assert held(layers) == []


@pytest.mark.parametrize(
    ("mode", "steps"), [("sampled", 60), ("chunks", 40), pytest.param("sampled", 200, marks=pytest.mark.long)]
)
def test_many_steps_of_changing_size_hold_no_more_than_twenty(mode: str, steps: int) -> None:
    """Training plainly and with checkpoints, evaluation and no_grad in between."""
    layers = stack(MODES[mode])
    gen = torch.Generator().manual_seed(0)
    found = []
    for step in range(steps):
        case = case_of(int(torch.randint(0, 24, (), generator=gen)))
        if step % 4 < 2:
            train(layers, case, "non-reentrant" if step % 4 else None)
        else:
            with torch.no_grad():
                for layer in layers:
                    forward(layer, case, leaves(case, []), training=step % 4 == 2)
        layers[0].clock.advance()
        del case
        for layer in layers:
            layer.telemetry.drain()
        if step in (19, steps - 1):
            found.append(floats())
    assert found[1] <= found[0]


def test_scratch_is_as_large_as_the_largest_call_needs_and_can_be_given_back() -> None:
    scratch.release()
    sizes = []
    for tokens in (23, 5, 23, 17):
        run(case_of(tokens), exact())
        sizes.append(sum(t.numel() for t in scratch._buffers.values()))
    assert len(set(sizes)) == 1
    scratch.release()
    assert not scratch._buffers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", [False, True])
def test_no_result_is_a_view_of_something_larger(mode: str, mask: bool) -> None:
    case = case_of(40)
    real = torch.arange(40) < 30 if mask else None
    found = run(case, MODES[mode], mask=real).result
    with torch.no_grad():
        out = forward(build(case, MODES[mode]), case, leaves(case, []), training=False, mask=real)
    for name, tensor in {"evaluated": out, **dataclasses.asdict(found)}.items():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name


def block_outputs(model: Any, kind: str | None, training: bool) -> Any:
    hidden = torch.randn(2, 9, 32, requires_grad=training)
    for layer in model.model.layers:
        block = layer.mlp
        hidden = block(hidden) if kind is None else checkpoint(block, hidden, use_reentrant=REENTRANT[kind])
    return hidden


@pytest.mark.parametrize("kind", [None, "reentrant", "non-reentrant"])
def test_a_host_model_holds_its_parameters_and_no_more(kind: str | None) -> None:
    model = make_model("qwen3", num_hidden_layers=LAYERS)
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=0))
    block_outputs(model, kind, training=True).sum().backward()
    model.eval()
    with torch.no_grad():
        block_outputs(model, None, training=False)
    handle.step()
    model.zero_grad(set_to_none=True)
    layers = list(handle.layers.values())
    assert all(layer.last_record is not None for layer in layers)
    model_own = {id(t) for t in (*model.parameters(), *model.buffers())}
    assert [t for t in held(layers) if id(t) not in model_own] == []


@NEEDS_CUDA
def test_allocated_memory_does_not_grow_on_a_device() -> None:
    check_on_device("U26")
