"""U06: a recompute replays the first forward's routing and plan, even where its input came out otherwise."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.distributed.calls import bounds_of
from tests.distributed.pool import Pool
from tests.layer.harness import REENTRANT, build, exact, leaves, pruning
from tests.reference import GRADS, Case, make_case

CASE = make_case(tokens=32, experts=8, top_k=2, hidden=16, width=12, dtype=torch.bfloat16)
MODES = {
    "exact": exact(),
    "sampled": pruning(max_drop=0.5, replica_slots=0),
    "topk": pruning(max_drop=0.5, estimator="topk"),
}


def routed(hidden: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """A router whose choice depends on its input, as in a real block."""
    weights = torch.softmax(hidden.float() @ router, dim=-1)
    top = torch.topk(weights, 2, dim=-1)
    return top.indices, (top.values / top.values.sum(-1, keepdim=True)).to(hidden.dtype)


def block_grads(
    case: Case, config: Any, *, kind: str | None, noise: float, group: Any = None
) -> dict[str, Tensor]:
    """A block (router and experts) under checkpointing, whose recompute sees its input with noise added."""
    layer, leaf = build(case, config, group=group), leaves(case, GRADS, group)
    router = torch.randn(16, 8, generator=torch.Generator().manual_seed(7))
    passes = itertools.count()
    ids_seen: list[Tensor] = []

    def body(hidden: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        if next(passes) and noise:
            hidden = hidden + noise * torch.randn(
                hidden.shape, generator=torch.Generator().manual_seed(1)
            ).to(hidden)
        ids, weights = routed(hidden, router)
        ids_seen.append(ids)
        return layer(hidden, ids, weights, gate_up, down, training=True)

    inputs = leaf["d_hidden"], leaf["d_gate_up"], leaf["d_down"]
    out = body(*inputs) if kind is None else checkpoint(body, *inputs, use_reentrant=REENTRANT[kind])
    out.backward(case.grad_out)
    if kind is not None:
        assert len(ids_seen) == 2
    moved = len(ids_seen) == 2 and not torch.equal(*ids_seen)
    names = ("d_hidden", "d_gate_up", "d_down")
    grads = {n: grad for n in names if (grad := leaf[n].grad) is not None}
    assert layer.last_record is not None
    return {
        **grads,
        "moved": torch.tensor(moved),
        "micro_batches": torch.tensor(layer.last_record.micro_batch),
    }


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], noise: float) -> None:
    for n in ("d_hidden", "d_gate_up", "d_down"):
        if noise == 0:
            assert torch.equal(found[n], wanted[n]), n
        else:
            gap = (found[n].float() - wanted[n].float()).norm() / wanted[n].float().norm()
            assert float(gap) < 20 * noise, f"{n}: {float(gap):.3g}"


@pytest.mark.parametrize("noise", [0.0, 1e-3, 5e-2])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("mode", MODES)
def test_one_process(mode: str, kind: str, noise: float) -> None:
    wanted = block_grads(CASE, MODES[mode], kind=None, noise=0.0)
    found = block_grads(CASE, MODES[mode], kind=kind, noise=noise)
    assert_near(found, wanted, noise)
    assert bool(found["moved"]) or noise < 1e-2, (
        "the noise must have moved the router, or the case tests nothing"
    )


def rank_grads(config: Any, kind: str | None, noise: float) -> dict[str, Tensor]:
    part = CASE.tokens(*bounds_of([20, 12])[dist.get_rank()])
    return block_grads(part, config, kind=kind, noise=noise, group=dist.group.WORLD)


@pytest.mark.distributed
@pytest.mark.parametrize("noise", [0.0, 5e-2])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks(pool2: Pool, mode: str, kind: str, noise: float) -> None:
    wanted = pool2.run(rank_grads, MODES[mode], None, 0.0)
    for found, one in zip(pool2.run(rank_grads, MODES[mode], kind, noise), wanted, strict=True):
        assert_near(found, one, noise)


def deep(case: Case, config: Any, kind: str | None, order: str) -> list[Tensor]:
    """Three layers, two micro-batches; backward in the order given."""
    layers = [build(case, config, layer=i) for i in range(3)]
    leaf = leaves(case, GRADS)
    outs = []
    for _ in range(2):
        hidden = leaf["d_hidden"]
        for layer in layers:

            def body(hidden: Tensor, gate_up: Tensor, down: Tensor, layer: Any = layer) -> Tensor:
                return hidden + layer(hidden, case.ids, case.weights, gate_up, down, training=True)

            inputs = hidden, leaf["d_gate_up"], leaf["d_down"]
            hidden = (
                body(*inputs) if kind is None else checkpoint(body, *inputs, use_reentrant=REENTRANT[kind])
            )
        outs.append(hidden)
    for out in outs if order == "FFBB" else reversed(outs):
        out.backward(case.grad_out)
    return [leaf[n].grad for n in ("d_hidden", "d_gate_up", "d_down")]  # type: ignore[misc]


@pytest.mark.parametrize("order", ["FFBB", "reversed"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("mode", MODES)
def test_replays_are_matched_to_their_own_calls(mode: str, kind: str, order: str) -> None:
    """Several layers and micro-batches in flight: each replay finds its own first forward."""
    case = CASE.to(torch.float64)
    wanted = deep(case, MODES[mode], None, order)
    for found, one in zip(deep(case, MODES[mode], kind, order), wanted, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-12, atol=1e-12)


def test_replays_add_no_record_and_count_no_call() -> None:
    layer = build(CASE, pruning(max_drop=0.5))
    for micro_batch in range(3):
        leaf = leaves(CASE, GRADS)
        out = checkpoint(
            lambda h, w, g, d: layer(h, CASE.ids, w, g, d, training=True),
            *[leaf[n] for n in GRADS],
            use_reentrant=micro_batch % 2 == 0,
        )
        out.backward(CASE.grad_out)
        assert layer.last_record is not None
        assert layer.last_record.micro_batch == micro_batch


@pytest.mark.parametrize("mode", MODES)
def test_without_a_preserved_generator_it_is_right_or_refused(mode: str) -> None:
    """preserve_rng_state=False removes what a replay is matched by."""
    case = CASE.to(torch.float64)
    wanted = leaves(case, GRADS)
    layer = build(case, MODES[mode])
    layer(
        *[wanted["d_hidden"], case.ids, wanted["d_weights"], wanted["d_gate_up"], wanted["d_down"]],
        training=True,
    ).backward(case.grad_out)
    leaf = leaves(case, GRADS)
    layer = build(case, MODES[mode])
    out = checkpoint(
        lambda h, w, g, d: layer(h, case.ids, w, g, d, training=True),
        *[leaf[n] for n in GRADS],
        use_reentrant=True,
        preserve_rng_state=False,
    )
    try:
        out.backward(case.grad_out)
    except RuntimeError as error:
        assert "preserve_rng_state" in str(error)  # noqa: PT017 - either outcome is right, silence is not
    else:
        for n in GRADS:
            torch.testing.assert_close(leaf[n].grad, wanted[n].grad, rtol=1e-12, atol=1e-12)
