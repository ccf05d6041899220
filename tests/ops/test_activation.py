"""The gated activation, its backward with late scaling, and the row norms, against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lrmoe.ops import abs_sums, gated_activation, gated_activation_backward, row_norms
from tests.reference import ACTIVATIONS, assert_within

pytestmark = pytest.mark.usefixtures("level")

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
KINDS = ["silu", "gelu", "gelu_tanh"]
ROWS = [0, 1, 7, 9]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_forward(h: Tensor, kind: str) -> Tensor:
    gate, up = h.chunk(2, dim=1)
    return ACTIVATIONS[kind](gate) * up


def plain_backward(dphi: Tensor, h: Tensor, scale: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    leaf = h.detach().clone().requires_grad_(True)
    phi = plain_forward(leaf, kind)
    scale_N1 = scale.to(h.dtype).unsqueeze(1)
    (dh,) = torch.autograd.grad(phi, leaf, dphi * scale_N1)
    return dh, phi.detach() * scale_N1, (dphi.to(scale.dtype) * phi.detach().to(scale.dtype)).sum(1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_forward(kind: str, dtype: torch.dtype, rows: int) -> None:
    h = normal(rows, 10, dtype=dtype)
    found = gated_activation(h, kind)
    assert_within(found, plain_forward(h.double(), kind), plain_forward(h, kind), "phi")
    out = torch.full((rows, 5), float("nan"), dtype=dtype)
    assert gated_activation(h, kind, out=out) is out
    assert torch.equal(out, found)


@pytest.mark.parametrize("width", [1, 63, 64, 130])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_gives_the_norms_of_what_it_wrote(dtype: torch.dtype, width: int) -> None:
    h, norm = normal(7, 2 * width, dtype=dtype), torch.full((7,), float("nan"))
    phi = gated_activation(h, "silu", norm_N=norm)
    assert torch.equal(phi, gated_activation(h, "silu"))
    torch.testing.assert_close(norm.double(), phi.double().norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_backward(kind: str, dtype: torch.dtype, rows: int) -> None:
    h, dphi = normal(rows, 10, dtype=dtype), normal(rows, 5, seed=1, dtype=dtype)
    scale = normal(rows, seed=2).abs().to(torch.promote_types(dtype, torch.float32))
    found = gated_activation_backward(dphi.clone(), h, scale, kind)
    exact = plain_backward(dphi.double(), h.double(), scale.double(), kind)
    plain = plain_backward(dphi, h, scale, kind)
    assert found[2].dtype == scale.dtype
    for name, one, truth, same in zip(("dh", "scaled phi", "dot"), found, exact, plain, strict=True):
        assert_within(one, truth, same, name)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_into_a_given_buffer_and_from_strided_input(kind: str) -> None:
    h, dphi, scale = normal(7, 10), normal(7, 5, seed=1), torch.ones(7, dtype=torch.float64)
    expected = gated_activation_backward(dphi.clone(), h, scale, kind)
    out = torch.full_like(h, float("nan"))
    strided = h.t().contiguous().t()
    found = gated_activation_backward(dphi.clone(), strided, scale, kind, out=out)
    assert found[0] is out
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [[], [4], [0, 6, 6, 1, 3, 2, 5]])
def test_backward_reads_rows_by_index(index: list[int], dtype: torch.dtype) -> None:
    h, dphi = normal(7, 10, dtype=dtype), normal(len(index), 5, seed=1, dtype=dtype)
    scale = normal(len(index), seed=2).abs().to(torch.promote_types(dtype, torch.float32))
    at = torch.tensor(index, dtype=torch.int64)
    expected = gated_activation_backward(dphi.clone(), h[at], scale, "silu")
    found = gated_activation_backward(dphi.clone(), h, scale, "silu", index_N=at)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for wrong in (-1, 7):
        with pytest.raises(IndexError):
            gated_activation_backward(
                normal(1, 5), h.double(), torch.ones(1).double(), "silu", index_N=at.new_tensor([wrong])
            )
        with pytest.raises(IndexError):
            gated_activation_backward(
                normal(1, 5).float(), h.float(), torch.ones(1), "silu", index_N=at.new_tensor([wrong])
            )


def test_a_row_of_scale_zero_gets_zero_gradient_but_its_dot() -> None:
    h, dphi = normal(3, 8), normal(3, 4, seed=1)
    dh, phi, dot = gated_activation_backward(dphi.clone(), h, torch.tensor([1.0, 0.0, 2.0]).double(), "silu")
    assert torch.equal(dh[1], torch.zeros(8, dtype=torch.float64))
    assert torch.equal(phi[1], torch.zeros(4, dtype=torch.float64))
    assert float(dot[1]) == pytest.approx(float((dphi[1] * plain_forward(h, "silu")[1]).sum()), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_fp32_of_fp32_arithmetic(dtype: torch.dtype) -> None:
    rows = normal(9, 33, dtype=dtype)
    for found, exact in (
        (row_norms(rows), rows.double().norm(dim=1)),
        (abs_sums(rows), rows.double().abs().sum(dim=1)),
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_norms_of_large_half_precision_rows_do_not_overflow() -> None:
    rows = torch.full((2, 64), 6e4, dtype=torch.float16)
    assert row_norms(rows).tolist() == pytest.approx([6e4 * 8] * 2, rel=1e-3)
    assert abs_sums(rows).tolist() == pytest.approx([6e4 * 64] * 2, rel=1e-3)


def test_norms_of_strided_and_empty_rows() -> None:
    rows = normal(6, 8)
    torch.testing.assert_close(row_norms(rows[:, ::2]), rows[:, ::2].norm(dim=1).float())
    torch.testing.assert_close(row_norms(rows[:1].expand(4, 8)), rows[:1].norm(dim=1).float().expand(4))
    assert row_norms(rows[:0]).shape == abs_sums(rows[:0]).shape == (0,)
