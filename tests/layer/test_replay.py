"""Matching a recompute to its first forward: kinds nested, generators seeded alike, forgotten calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lrmoe.errors import ReplayError
from lrmoe.layer import MoELayer, padding, replay
from tests.layer.harness import REENTRANT, build, forward, leaves, pruning, run
from tests.reference import GRADS, Case, make_case

CASE = make_case(tokens=16, experts=4)
CONFIG = pruning(max_drop=0.5)
KINDS = list(REENTRANT)


def body(layer: MoELayer, case: Case = CASE) -> Callable[..., Tensor]:
    return lambda h, w, g, d: layer(h, case.ids, w, g, d, training=True)


def assert_same(leaf: dict[str, Tensor], wanted: Any) -> None:
    for n in GRADS:
        torch.testing.assert_close(leaf[n].grad, getattr(wanted, n), rtol=1e-12, atol=1e-13)


@pytest.fixture(params=[True, False], ids=["checked at once", "checked when asked for"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of a recompute are compared before it, as on a CPU, or after it has been asked of a device."""
    monkeypatch.setattr(replay, "_at_once", lambda device: request.param)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", KINDS)
def test_nested_checkpoints_are_right(outer: str, inner: str) -> None:
    layer, leaf = build(CASE, CONFIG), leaves(CASE, GRADS)
    call = body(layer)
    out = checkpoint(
        lambda *a: checkpoint(call, *a, use_reentrant=REENTRANT[inner]),
        *[leaf[n] for n in GRADS],
        use_reentrant=REENTRANT[outer],
    )
    out.backward(CASE.grad_out)
    assert_same(leaf, run(CASE, CONFIG).result)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("kind", KINDS)
def test_two_forwards_in_flight_under_one_seed_are_refused(kind: str) -> None:
    """A generator seeded alike before both makes them look the same: neither may get the other's routing."""
    layer, outs = build(CASE, CONFIG), []
    for seed in (0, 5):
        case = make_case(tokens=16, experts=4, seed=seed)
        torch.manual_seed(0)
        leaf = leaves(case, GRADS)
        outs.append(checkpoint(body(layer, case), *[leaf[n] for n in GRADS], use_reentrant=REENTRANT[kind]))
    for out in outs:
        with pytest.raises(ReplayError, match="seed"):
            out.backward(CASE.grad_out)


@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_per_micro_batch_is_fine_when_backward_follows_at_once(kind: str) -> None:
    layer = build(CASE, CONFIG.replace(max_drop=0.0))
    for seed in (0, 5):
        case = make_case(tokens=16, experts=4, seed=seed)
        torch.manual_seed(0)
        leaf = leaves(case, GRADS)
        checkpoint(body(layer, case), *[leaf[n] for n in GRADS], use_reentrant=REENTRANT[kind]).backward(
            case.grad_out
        )
        assert_same(leaf, run(case, CONFIG.replace(max_drop=0.0)).result)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recompute_after_the_step_is_refused(kind: str) -> None:
    layer, leaf = build(CASE, CONFIG), leaves(CASE, GRADS)
    out = checkpoint(body(layer), *[leaf[n] for n in GRADS], use_reentrant=REENTRANT[kind])
    layer.clock.advance()
    with pytest.raises(ReplayError, match="optimizer step"):
        out.backward(CASE.grad_out)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_restored_in_the_recompute(kind: str) -> None:
    case = CASE.to(torch.float32)
    grads = []
    for under in (None, kind):
        layer, leaf = build(case, CONFIG), leaves(case, GRADS)
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(layer, case, leaf, checkpoint=under)
        assert out.dtype == torch.float32
        out.backward(case.grad_out)
        grads.append([grad for n in GRADS if (grad := leaf[n].grad) is not None])
        assert [g.dtype for g in grads[-1]] == [torch.float32] * len(GRADS)
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_saved_tensors_may_be_offloaded() -> None:
    layer, leaf = build(CASE, CONFIG), leaves(CASE, GRADS)
    with torch.autograd.graph.save_on_cpu():
        out = forward(layer, CASE, leaf)
    out.backward(CASE.grad_out)
    assert_same(leaf, run(CASE, CONFIG).result)


@pytest.mark.parametrize("kind", KINDS)
def test_a_retained_graph_recomputes_again(kind: str) -> None:
    layer, leaf = build(CASE, CONFIG), leaves(CASE, GRADS)
    out = checkpoint(body(layer), *[leaf[n] for n in GRADS], use_reentrant=REENTRANT[kind])
    out.backward(CASE.grad_out / 2, retain_graph=True)
    out.backward(CASE.grad_out / 2)
    assert_same(leaf, run(CASE, CONFIG).result)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("kind", KINDS)
def test_another_calls_routing_is_refused(kind: str) -> None:
    """Without a preserved generator a recompute can draw the token of another forward."""
    layer, outs = build(CASE, CONFIG), []
    for seed in (0, 5):
        case = make_case(tokens=16, experts=4, seed=seed)
        torch.manual_seed(seed)
        leaf = leaves(case, GRADS)
        outs.append(
            checkpoint(
                body(layer, case),
                *[leaf[n] for n in GRADS],
                use_reentrant=REENTRANT[kind],
                preserve_rng_state=False,
            )
        )
    torch.manual_seed(0)
    with pytest.raises(ReplayError, match="preserve_rng_state"):
        outs[1].backward(CASE.grad_out)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_need_not_be_marked_again_in_the_recompute(kind: str) -> None:
    mask = torch.arange(16) < 3

    def run_padded(checkpointed: bool) -> dict[str, Tensor]:
        layer, leaf = build(CASE, CONFIG), leaves(CASE, GRADS)
        inputs = [leaf[n] for n in GRADS]
        with padding(mask):
            call = body(layer)
            out = checkpoint(call, *inputs, use_reentrant=REENTRANT[kind]) if checkpointed else call(*inputs)
        out.backward(CASE.grad_out)
        return leaf

    plain, replayed = run_padded(False), run_padded(True)
    for name in GRADS:
        ours, theirs = plain[name].grad, replayed[name].grad
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs), name
