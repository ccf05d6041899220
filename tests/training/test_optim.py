from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lrmoe.training.config import OptimConfig
from lrmoe.training.optim import Optimizer, Parameters


def parameters(dtype: torch.dtype | None = None) -> tuple[nn.Linear, Parameters]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    found = Parameters(model, dtype, None)
    found.zero_grad()
    return model, found


def backward(model: nn.Linear, found: Parameters, scale: float = 1.0) -> torch.Tensor:
    x = torch.ones(4, 3, dtype=model.weight.dtype)
    loss = scale * model(x).float().square().mean()
    loss.backward()
    found.collect()
    return loss.detach()


def test_the_learning_rate_warms_up_and_falls_to_its_end() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    optimizer = Optimizer(parameters()[1], config, 104)
    assert [optimizer.learning_rate(s) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert optimizer.learning_rate(54) == pytest.approx(0.55)
    assert optimizer.learning_rate(104) == pytest.approx(0.1)
    assert optimizer.learning_rate(1000) == pytest.approx(0.1)


def test_gradients_are_views_of_one_buffer_and_the_norm_is_of_all() -> None:
    model, found = parameters()
    loss = backward(model, found)
    wanted = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    reduced = found.reduce(loss, 0.0)
    assert reduced.norm == pytest.approx(wanted, rel=1e-6)
    assert reduced.loss == pytest.approx(float(loss), rel=1e-6)
    found.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_clipping_scales_to_the_limit() -> None:
    model, found = parameters()
    loss = backward(model, found, scale=100.0)
    assert found.reduce(loss, 0.5).norm > 0.5
    assert found.reduce(loss, 0.0).norm == pytest.approx(0.5, rel=1e-5)


def test_only_matrices_decay() -> None:
    model, found = parameters()
    before = model.weight.detach().clone(), model.bias.detach().clone()
    Optimizer(found, OptimConfig(lr=0.1, warmup_steps=0, weight_decay=0.5), 10).step(0)
    torch.testing.assert_close(model.weight.detach(), before[0] * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias.detach(), before[1])


def test_low_precision_gradients_add_up_in_float32() -> None:
    model, found = parameters(torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16
    for _ in range(2):
        backward(model, found)
        assert model.weight.grad is None
    master = next(e.master for e in found.entries if e.name == "weight")
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    assert float(master.grad.abs().sum()) > 0
