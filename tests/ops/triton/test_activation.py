"""The fused activation kernels, against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lrmoe.ops import ACTIVATIONS
from lrmoe.ops.triton.activation import gated_activation, gated_activation_backward
from tests.ops.triton.inputs import DEVICE, DTYPES, Poisoned, assert_close, normal
from tests.reference import ACTIVATIONS as PLAIN

KINDS = ["silu", "gelu", "gelu_tanh"]
ROWS = [0, 1, 7, 9]


def forward(h: Tensor, kind: str) -> Tensor:
    gate, up = h.double().chunk(2, dim=1)
    return PLAIN[kind](gate) * up


def backward(dphi: Tensor, h: Tensor, scale: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    leaf = h.double().detach().requires_grad_(True)
    phi = forward(leaf, kind)
    (dh,) = torch.autograd.grad(phi, leaf, dphi.double() * scale.double()[:, None])
    return dh, phi.detach() * scale.double()[:, None], (dphi.double() * phi.detach()).sum(1)


def test_every_activation_of_the_layer_has_a_kernel() -> None:
    for kind in ACTIVATIONS:
        h = normal(2, 6)
        assert_close(gated_activation(h, kind), forward(h, kind), kind)
    with pytest.raises(Exception, match="silu, gelu or gelu_tanh"):
        gated_activation(normal(2, 6), "relu")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_norms(kind: str, dtype: torch.dtype, rows: int) -> None:
    h = 3 * normal(rows, 70, dtype=dtype)
    phi, norm = Poisoned(rows, 35, dtype), torch.full((rows + 2,), float("nan"), device=DEVICE)
    assert gated_activation(h, kind, out=phi.inside, norm_N=norm[1 : rows + 1]) is phi.inside
    assert_close(phi.inside, forward(h, kind), "phi")
    assert phi.untouched()
    torch.testing.assert_close(
        norm[1 : rows + 1].double(), phi.inside.double().norm(dim=1), rtol=1e-6, atol=0
    )
    assert norm.isnan().sum() == 2
    assert torch.equal(gated_activation(h, kind), phi.inside)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_backward(kind: str, dtype: torch.dtype, rows: int) -> None:
    h, dphi = 3 * normal(rows, 70, dtype=dtype), normal(rows, 35, seed=1, dtype=dtype)
    scale, out = normal(rows, seed=2), Poisoned(rows, 70, dtype)
    exact = backward(dphi, h, scale, kind)
    spent = dphi.clone()
    dh, phi, dot = gated_activation_backward(spent, h, scale, kind, out=out.inside)
    assert dh is out.inside
    assert out.untouched()
    assert phi.data_ptr() == spent.data_ptr()
    assert dot.dtype == torch.float32
    assert_close(dh, exact[0], "dh")
    # phi is rounded before it is scaled, as forward rounded it: one more unit, and in the dot one per term.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(phi.double(), exact[1], rtol=2 * max(unit, 1e-5), atol=1e-5)
    terms = (dphi.double() * forward(h, kind)).abs().sum(1)
    assert bool(((dot.double() - exact[2]).abs() <= max(unit, 1e-5) * terms).all())


def test_dot_is_that_of_phi_as_forward_rounded_it() -> None:
    h, dphi = normal(7, 40, dtype=torch.bfloat16), normal(7, 20, seed=1, dtype=torch.bfloat16)
    phi = gated_activation(h, "silu")
    _, scaled, dot = gated_activation_backward(dphi.clone(), h, torch.ones(7, device=DEVICE), "silu")
    assert torch.equal(scaled, phi)
    torch.testing.assert_close(dot.double(), (dphi.double() * phi.double()).sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_wide_rows_and_strided_rows(kind: str) -> None:
    h, dphi, scale = normal(3, 2400), normal(3, 1200, seed=1), normal(3, seed=2)
    exact = backward(dphi, h, scale, kind)
    strided, late = h.t().contiguous().t(), dphi.t().contiguous().t()
    assert_close(gated_activation(strided, kind), forward(h, kind))
    found = gated_activation_backward(late, strided, scale, kind)
    for name, one, truth in zip(("dh", "phi", "dot"), found, exact, strict=True):
        assert_close(one, truth, name)


def test_a_row_of_scale_zero_gets_zero_gradient_but_its_dot() -> None:
    h, dphi = normal(3, 8), normal(3, 4, seed=1)
    scale = torch.tensor([1.0, 0.0, 2.0], device=DEVICE)
    dh, phi, dot = gated_activation_backward(dphi.clone(), h, scale, "silu")
    assert not dh[1].any()
    assert not phi[1].any()
    assert float(dot[1]) == pytest.approx(float((dphi[1].double() * forward(h, "silu")[1]).sum()), rel=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_large_gates_saturate_as_torch_does(kind: str) -> None:
    gate = torch.tensor([-1e4, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0, 1e4], device=DEVICE)[:, None]
    h = torch.cat([gate, torch.ones_like(gate)], dim=1)
    assert_close(gated_activation(h, kind), PLAIN[kind](gate))
    found = gated_activation_backward(torch.ones_like(gate), h, torch.ones(9, device=DEVICE), kind)
    exact = backward(torch.ones_like(gate), h, torch.ones(9, device=DEVICE), kind)
    for one, truth in zip(found, exact, strict=True):
        assert_close(one, truth)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    h, norm = normal(3, 40), torch.empty(3, device=DEVICE)
    h[1, 30] = bad
    phi = gated_activation(h, "silu", norm_N=norm)
    assert phi.isfinite().sum(dim=1).tolist() == [20, 19, 20]
    assert norm.isfinite().tolist() == [True, False, True]
    dh, _, dot = gated_activation_backward(normal(3, 20, seed=1), h, torch.ones(3, device=DEVICE), "silu")
    assert dh[[0, 2]].isfinite().all()
    assert not dh[1].isfinite().all()
    assert dot.isfinite().tolist() == [True, False, True]


def test_a_row_is_the_same_whatever_lies_beside_it() -> None:
    h, dphi, scale = normal(40, 200), normal(40, 100, seed=1), normal(40, seed=2)
    assert torch.equal(gated_activation(h, "gelu")[33:34], gated_activation(h[33:34], "gelu"))
    whole = gated_activation_backward(dphi.clone(), h, scale, "gelu")
    alone = gated_activation_backward(dphi[33:34].clone(), h[33:34], scale[33:34], "gelu")
    for one, other in zip(whole, alone, strict=True):
        assert torch.equal(one[33:34], other)
