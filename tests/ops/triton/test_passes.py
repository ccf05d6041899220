"""What is handed to a kernel, and what is not: here everything is taken for a CUDA tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lrmoe import ops
from lrmoe.ops import fused
from lrmoe.ops.triton import passes
from tests.ops.triton.inputs import DEVICE, Poisoned, assert_close, normal, numbers
from tests.reference import ACTIVATIONS as PLAIN


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "usable", lambda *tensors: None)


@pytest.mark.usefixtures("taken")
def test_each_pass_runs_its_kernel() -> None:
    h, scale, index = normal(5, 12), normal(5, seed=1), numbers([4, 0, 2])
    phi, norm, dh = Poisoned(5, 6), torch.empty(5, device=DEVICE), Poisoned(5, 12)
    exact = PLAIN["silu"](h[:, :6].double()) * h[:, 6:].double()
    assert passes.gate(h, "silu", phi.inside, norm) is phi.inside
    assert_close(phi.inside, exact)
    assert_close(norm, exact.norm(dim=1))
    dot = passes.gate_backward(torch.ones_like(exact).float(), h, scale, "silu", dh.inside)
    assert dot is not None
    assert_close(dot, exact.sum(1))
    assert not dh.inside.isnan().any()
    for found, same in ((passes.norms(h), h.norm(dim=1)), (passes.sums(h), h.abs().sum(1))):
        assert found is not None
        assert_close(found, same.double())
    target = torch.empty(3, 12, device=DEVICE)
    assert passes.move(h, index, target, scatter=False) is target
    assert torch.equal(target, h[index])
    assert passes.move(target, index, h.zero_(), scatter=True) is h
    assert torch.equal(h[index], target)
    total = passes.combine(target, numbers([2, 0, 1]), numbers([2, 3]), scale[:3])
    assert total is not None
    assert_close(total[1], target[1].double() * float(scale[2]))


@pytest.mark.usefixtures("taken")
def test_ops_hand_their_work_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows on a GPU, but for the place they lie in."""
    calls: list[str] = []
    for name in ("gate", "gate_backward", "norms", "sums", "combine", "move"):
        work = getattr(passes, name)

        def named(*given: Any, name: str = name, work: Callable[..., Any] = work, **more: Any) -> Any:
            calls.append(name)
            return work(*given, **more)

        monkeypatch.setattr(passes, name, named)
    monkeypatch.setattr(fused, "cpu", passes)
    h, index, norm = normal(6, 10), numbers([5, 3, 0]), torch.empty(6, device=DEVICE)
    phi = ops.gated_activation(h, "gelu", norm_N=norm)
    assert_close(phi, PLAIN["gelu"](h[:, :5].double()) * h[:, 5:].double())
    assert_close(norm, phi.double().norm(dim=1))
    assert_close(ops.row_norms(h), h.double().norm(dim=1))
    assert_close(ops.abs_sums(h), h.double().abs().sum(1))
    assert torch.equal(ops.gather_rows(h, index), h[index])
    assert torch.equal(ops.place_rows(h.clone(), index, h[:3])[index], h[:3])
    assert_close(ops.combine(h, index, numbers([2, 2, 3]))[0], (h[5].double() + h[3].double()))
    dh, _, _ = ops.gated_activation_backward(phi.clone(), h, norm, "gelu")
    assert dh.shape == h.shape
    assert calls == ["gate", "norms", "sums", "move", "move", "combine", "gate_backward"]


def test_budgets_are_told_where_kernels_need_no_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not passes.fuses(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(
        passes, "usable", lambda tensor: None if tensor.dtype == torch.float32 else "no kernel"
    )
    assert passes.fuses(torch.device(DEVICE), torch.float32)
    assert not passes.fuses(torch.device(DEVICE), torch.float64)
    asked: list[torch.dtype] = []

    def fuses(device: torch.device, dtype: torch.dtype) -> bool:
        asked.append(dtype)
        return True

    monkeypatch.setattr(passes, "fuses", fuses)
    assert ops.fuses(torch.device("cuda"), torch.float32) is True
    assert asked == [torch.float32]
    assert ops.fuses(torch.device("cpu"), torch.float64) is False


def refused() -> dict[str, Callable[[], Tensor | None]]:
    h, half, index = normal(4, 8), normal(4, 4), numbers([0, 1, 2, 3])
    ones, wide = torch.ones(4, device=DEVICE), normal(4, 8, dtype=torch.float64)
    return {
        "activation": lambda: passes.gate(h, "relu", half, None),
        "other dtype": lambda: passes.gate(h, "silu", half.bfloat16(), None),
        "other shape": lambda: passes.gate(h, "silu", h, None),
        "norms of another dtype": lambda: passes.gate(h, "silu", half, ones.double()),
        "norms apart": lambda: passes.gate(h, "silu", half, torch.ones(8, device=DEVICE)[::2]),
        "scale of another dtype": lambda: passes.gate_backward(half, h, ones.bfloat16(), "silu", h),
        "gradient of another shape": lambda: passes.gate_backward(half, h, ones, "silu", half),
        "one dimension": lambda: passes.norms(h[0]),
        "one dimension, sums": lambda: passes.sums(h[0]),
        "floating index": lambda: passes.move(h, ones, h.clone(), scatter=False),
        "short target": lambda: passes.move(h, index, h[:3].clone(), scatter=False),
        "wide target": lambda: passes.move(h, index, wide, scatter=False),
        "index elsewhere": lambda: passes.move(h, index.to("meta"), h.clone(), scatter=False),
        "weights too few": lambda: passes.combine(h, index, index + 1, ones[:2]),
        "ends elsewhere": lambda: passes.combine(h, index, (index + 1).to("meta"), None),
    }


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("what", refused())
def test_what_no_kernel_serves_is_left_to_torch(what: str) -> None:
    assert refused()[what]() is None


def test_tensors_that_are_not_usable_are_left_to_torch() -> None:
    h, index = torch.ones(2, 4), torch.arange(2)
    assert passes.gate(h, "silu", h[:, :2].clone(), None) is None
    assert passes.gate_backward(h[:, :2].clone(), h, torch.ones(2), "silu", h.clone()) is None
    assert passes.norms(h) is passes.sums(h) is None
    assert passes.move(h, index, h.clone(), scatter=False) is None
    assert passes.combine(h, index, index + 1, None) is None
