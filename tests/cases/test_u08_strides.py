"""U08: expanded, transposed and sliced inputs and gradients give the same gradients as contiguous copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.layer.harness import build, exact, forward, leaves, pruning
from tests.reference import GRADS, Case, make_case

CASE = make_case(tokens=8, experts=4, top_k=2, hidden=16, width=6)

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda out: out.sum(),
    "mean": lambda out: out.mean(),
    "every second column": lambda out: out[:, ::2].sum(),
    "transposed": lambda out: (out.t() * torch.arange(8.0)).sum(),
    "one row": lambda out: out[3].sum(),
    "expanded gradient": lambda out: (out * torch.ones(1, dtype=out.dtype).expand_as(out)).sum(),
    "reshaped": lambda out: out.view(2, 4, 16).transpose(0, 1).reshape(-1).cumsum(0).sum(),
}
INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
    "flipped storage": lambda x: torch.stack([x, x], dim=2)[..., 1],
}
MODES = [exact(), pruning(max_drop=0.5), pruning(max_drop=0.5, estimator="topk", score="abs_grad")]


def gradients(
    case: Case, config: object, loss: Callable[[Tensor], Tensor], *, copied: bool
) -> dict[str, Tensor]:
    leaf = leaves(case, GRADS)
    out = forward(build(case, config), case, leaf)  # type: ignore[arg-type]
    if copied:
        seen = out.detach().clone().requires_grad_(True)
        (grad,) = torch.autograd.grad(loss(seen), seen)
        out.backward(grad.contiguous().clone())
    else:
        loss(out).backward()
    return {n: leaf[n].grad for n in GRADS}  # type: ignore[misc]


@pytest.mark.parametrize("config", MODES, ids=["exact", "sampled", "topk"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_with_strides(name: str, config: object) -> None:
    found = gradients(CASE, config, LOSSES[name], copied=False)
    wanted = gradients(CASE, config, LOSSES[name], copied=True)
    for n in GRADS:
        torch.testing.assert_close(found[n], wanted[n], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("config", MODES, ids=["exact", "sampled", "topk"])
def test_a_gradient_of_stride_zero_is_given_directly(config: object) -> None:
    leaf = leaves(CASE, GRADS)
    out = forward(build(CASE, config), CASE, leaf)  # type: ignore[arg-type]
    grad = torch.ones(1, dtype=torch.float64).expand_as(out)
    found = torch.autograd.grad(out, [leaf[n] for n in GRADS], grad)
    wanted = gradients(CASE, config, LOSSES["sum"], copied=True)
    for n, one in zip(GRADS, found, strict=True):
        torch.testing.assert_close(one, wanted[n], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("which", ["d_hidden", "d_weights", "d_gate_up", "d_down"])
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_with_strides(name: str, which: str) -> None:
    """Any of the four tensors as a strided view; hidden as a (B, S, H) batch seen flat is a case of it."""
    config = pruning(max_drop=0.5)
    plain = leaves(CASE, GRADS)
    forward(build(CASE, config), CASE, plain).backward(CASE.grad_out)
    leaf = leaves(CASE, GRADS)
    shaped = leaf[which].flatten(0, -2)
    view = INPUTS[name](shaped).unflatten(0, leaf[which].shape[:-1])
    assert torch.equal(view, leaf[which])
    forward(build(CASE, config), CASE, {**leaf, which: view}).backward(CASE.grad_out)
    for n in GRADS:
        torch.testing.assert_close(leaf[n].grad, plain[n].grad, rtol=1e-12, atol=1e-14)


def test_an_expanded_input_row_and_strided_ids() -> None:
    row = CASE.hidden[:1].clone().requires_grad_(True)
    ids = CASE.ids.t().contiguous().t()
    layer = build(CASE, exact())
    out = layer(row.expand(8, 16), ids, CASE.weights, CASE.gate_up, CASE.down, training=True)
    out.sum().backward()
    copy = CASE.hidden[:1].repeat(8, 1).requires_grad_(True)
    wanted = layer(copy, CASE.ids, CASE.weights, CASE.gate_up, CASE.down, training=True)
    wanted.sum().backward()
    torch.testing.assert_close(out, wanted)
    assert row.grad is not None
    assert copy.grad is not None
    torch.testing.assert_close(row.grad, copy.grad.sum(0, keepdim=True), rtol=1e-12, atol=1e-12)
