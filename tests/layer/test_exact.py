"""With nothing dropped, outputs and all gradients equal the float64 loop over experts, on one device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lrmoe.config import LRMoEConfig
from tests.layer.harness import build, exact, forward, leaves, pruning, run
from tests.reference import GRADS, assert_result, make_case, plain_loop

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("checkpoint", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(dtype: torch.dtype, activations: str, checkpoint: str | None) -> None:
    case = make_case(tokens=40, experts=8, top_k=3, dtype=dtype)
    found = run(case, exact(activations=activations), checkpoint=checkpoint)
    assert found.result.out.dtype == dtype
    assert_result(found.result, case)
    assert found.record.kept == found.record.pairs == 120
    assert found.record.drop_reason == "off"


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_activation(dtype: torch.dtype, activation: str) -> None:
    case = make_case(activation=activation, dtype=dtype, seed=3)
    assert_result(run(case, exact()).result, case)


@pytest.mark.parametrize("policy", ["lrmoe", "megatron"])
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
@pytest.mark.parametrize("router_grad", ["full", "retained"])
def test_max_drop_zero_is_exact_whatever_else_is_set(policy: str, estimator: str, router_grad: str) -> None:
    case = make_case()
    config = exact(policy=policy, estimator=estimator, router_grad=router_grad, score="alpha_grad")
    assert_result(run(case, config).result, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_weights_may_be_wider_than_the_rows(dtype: torch.dtype) -> None:
    case = make_case(seed=5)
    mixed = dataclasses.replace(case.to(dtype), weights=case.weights.float())
    found = run(mixed, exact())
    assert found.result.d_weights is not None
    assert found.result.d_weights.dtype == torch.float32
    assert found.result.out.dtype == dtype
    assert_result(found.result, mixed)


def test_wide_routing_weights_are_applied_in_their_own_dtype() -> None:
    """Two pairs of one expert cancel but for 2^-9 of a weight, which bf16 cannot tell from 1."""
    case = make_case(tokens=6, experts=2, top_k=2)
    ids = torch.zeros(6, 2, dtype=torch.int64)
    weights = torch.tensor([[1 + 2**-9, -1.0]]).repeat(6, 1)
    case = dataclasses.replace(case.to(torch.bfloat16), ids=ids, weights=weights)
    found = run(case, exact()).result
    truth = plain_loop(case, dtype=torch.float64)
    torch.testing.assert_close(found.out.double(), truth.out, rtol=0.03, atol=1e-5)
    assert float(truth.out.abs().max()) > 1e-4


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 4), (7, 3, 1), (64, 2, 2)])
def test_odd_sizes(shape: tuple[int, int, int]) -> None:
    tokens, experts, top_k = shape
    case = make_case(tokens=tokens, experts=experts, top_k=top_k, hidden=5, width=3)
    assert_result(run(case, exact()).result, case)


def test_no_token_at_all() -> None:
    case = make_case(tokens=0)
    found = run(case, pruning())
    assert found.result.out.shape == (0, 16)
    assert_result(found.result, case)
    assert found.record.pairs == found.record.kept == 0


def test_ids_that_name_no_expert_carry_nothing() -> None:
    case = make_case(tokens=12, experts=4, top_k=3)
    ids = case.ids.clone()
    ids[0, 1], ids[3, 0], ids[5] = -1, 4, torch.tensor([-7, 2**40, -(2**63)])
    case = dataclasses.replace(case, ids=ids)
    found = run(case, exact())
    assert_result(found.result, case)
    assert found.record.pairs == 12 * 3 - 5
    assert torch.equal(found.result.out[5], torch.zeros(16, dtype=torch.float64))
    assert found.result.d_weights is not None
    assert torch.equal(found.result.d_weights[5], torch.zeros(3, dtype=torch.float64))


def test_nothing_routed_anywhere() -> None:
    case = dataclasses.replace(make_case(), ids=torch.full((24, 2), -1))
    found = run(case, pruning())
    assert_result(found.result, case)
    assert found.record.pairs == 0


def test_one_expert_twice_for_one_token() -> None:
    case = make_case(tokens=10, experts=3, top_k=3)
    ids = case.ids.clone()
    ids[0], ids[4] = torch.tensor([1, 1, 1]), torch.tensor([2, 0, 2])
    case = dataclasses.replace(case, ids=ids)
    found = run(case, exact())
    assert_result(found.result, case)
    assert found.record.pairs == 30


def test_int32_ids_serve_or_are_refused_by_name() -> None:
    case = make_case()
    narrow = dataclasses.replace(case, ids=case.ids.int())
    assert_result(run(narrow, exact()).result, case)


@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gradcheck(activations: str, activation: str) -> None:
    case = make_case(tokens=6, experts=3, hidden=4, width=3, activation=activation)
    layer = build(case, exact(activations=activations), step=1)
    leaf = leaves(case, GRADS)

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        return forward(layer, case, dict(zip(GRADS, inputs, strict=True)))

    assert torch.autograd.gradcheck(call, [leaf[n] for n in GRADS])


def test_forward_values_never_depend_on_pruning() -> None:
    case = make_case(dtype=torch.float32)
    kept_all = run(case, exact()).result.out
    for config in (pruning(max_drop=0.5), pruning(max_drop=0.9, estimator="topk"), LRMoEConfig()):
        assert torch.equal(run(case, config).result.out, kept_all)
    with pytest.warns(UserWarning, match="evaluation mode"):
        evaluated = run(case, pruning(max_drop=0.5), training=False).result.out
    assert torch.equal(evaluated, kept_all)


def test_fp16_gradients_stay_finite_where_the_plain_loops_do() -> None:
    """Small routing weights over large gradients: the product with the weights must not overflow before scaling."""
    case = make_case(tokens=64, experts=4, hidden=32, width=16, dtype=torch.float16)
    case = dataclasses.replace(
        case, weights=torch.full_like(case.weights, 0.02), grad_out=torch.full_like(case.grad_out, 6000.0)
    )
    case.weights[0] = 0
    found = run(case, exact()).result
    wanted = plain_loop(case)
    for name in GRADS:  # a routing weight's own gradient can be too large for fp16, in the plain loop as here
        finite = getattr(wanted, name).isfinite()
        assert bool(getattr(found, name)[finite].isfinite().all()), name
    ours, theirs = found.d_gate_up, wanted.d_gate_up
    assert ours is not None
    assert theirs is not None
    error = (ours.double() - theirs.double()).abs().max()
    assert float(error) <= 4e-3 * float(theirs.abs().max())


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-4])
def test_small_fp16_gradients_are_as_precise_as_the_plain_loops(scale: float) -> None:
    """Their product with a small routing weight is subnormal: it must not be what the weight's gradient is made of."""
    case = make_case(tokens=64, experts=4, hidden=32, width=16, dtype=torch.float16)
    weights = torch.full_like(case.weights, 0.01, dtype=torch.float32)
    case = dataclasses.replace(case, weights=weights, grad_out=case.grad_out * scale)
    found = run(case, exact()).result
    truth, plain = plain_loop(case, dtype=torch.float64), plain_loop(case)
    ours, exactly, loops = found.d_weights, truth.d_weights, plain.d_weights
    assert ours is not None
    assert exactly is not None
    assert loops is not None
    error, limit = ((one.double() - exactly).norm() for one in (ours, loops))
    assert float(error) <= 2 * float(limit) + 1e-3 * float(exactly.norm())


def test_a_default_device_changes_nothing() -> None:
    case = make_case(tokens=8, experts=4)
    wanted = run(case, pruning(max_drop=0.5)).result
    with torch.device("meta"):
        found = run(case, pruning(max_drop=0.5)).result
    assert found.d_down is not None
    assert wanted.d_down is not None
    assert torch.equal(found.d_down, wanted.d_down)
