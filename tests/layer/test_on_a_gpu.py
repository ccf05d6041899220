"""The layer as it works on a GPU: no operand lies elsewhere, and nothing waits that need not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lrmoe.layer import MoELayer, experts, selection
from lrmoe.layer.learned import score_sums
from lrmoe.ops import triton as kernels
from tests.layer.harness import build, pruning
from tests.layer.pretend import CUDA, Pretend, pretending
from tests.reference import Case, make_case

CASE = make_case(tokens=20, experts=4, top_k=2, hidden=16, width=16, seed=3, dtype=torch.float32)
NAMES = ("hidden", "weights", "gate_up", "down")


def step(layer: MoELayer, case: Case) -> list[Tensor]:
    """One forward and backward: output and gradients."""
    leaves = [getattr(case, name).detach().requires_grad_() for name in NAMES]
    out = layer(leaves[0], case.ids, *leaves[1:], training=True)
    grads = torch.autograd.grad(out, leaves, case.grad_out)
    return [out.detach(), *grads]


def moved(case: Case) -> Case:
    """The same case where the mode says that it lies on a GPU."""
    tensors: dict[str, Any] = {k: v.to(CUDA) for k, v in vars(case).items() if isinstance(v, Tensor)}
    return dataclasses.replace(case, **tensors)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_drop": 0.0},
        {"estimator": "sampled"},
        {"estimator": "topk"},
        {"score": "random", "estimator": "topk"},
        {"score": "abs_grad"},
        {"score": "alpha", "select_in": "forward"},
        {"score": "alpha_phi", "select_in": "forward"},
        {"router_grad": "full"},
        {"activations": "recompute"},
        {"observe": True},
        {"check_every": 1},
        {"layer_budget": 40_000},
    ],
    ids=str,
)
def test_a_step_is_that_of_a_cpu(fields: dict[str, Any]) -> None:
    config = pruning(**{"max_drop": 0.5, **fields})
    layer = build(CASE, config)
    wanted = [step(layer, CASE) for _ in range(2)]
    with pretending() as there, kernels.off():
        case, layer = moved(CASE), build(CASE, config)
        found = [step(layer, case) for _ in range(2)]
        assert all(there.there(tensor) for tensor in found[1])
        assert len(layer.telemetry.drain()) == 2
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def waits_of_a_later_step(**fields: Any) -> set[tuple[str, str]]:
    """What a step waits for beside the counts, once the first ones are over."""
    with pretending() as there:
        layer, case = build(CASE, pruning(**fields)), moved(CASE)
        for _ in range(2):
            step(layer, case)
            there.waits.clear()
        step(layer, case)
        return set(there.waits)


def test_nothing_waits_but_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if not kernels.interpreted():
        pytest.skip("tensors of the CPU, which the interpreter takes")
    assert waits_of_a_later_step(max_drop=0.5) == set()
    monkeypatch.setattr(selection, "SELECT_ROWS", 0)
    found = waits_of_a_later_step(max_drop=0.5)
    assert found == {("__bool__", "selection.py:_inclusion")}, "many rows are chosen from in rounds"


def test_the_mode_notices() -> None:
    with pretending() as there:
        assert isinstance(there, Pretend)
        far, near = torch.ones(3, device=CUDA), torch.ones(3)
        assert (far + 1).is_cuda
        assert not near.is_cuda
        assert far[:2].device == CUDA == far.new_zeros(2).device
        with pytest.raises(RuntimeError, match=r"tensors on a GPU and on the host \[\(3,\)\]"):
            far + near
        with pytest.raises(TypeError, match="numpy of a tensor on a GPU"):
            far.numpy()
        far.copy_(near, non_blocking=True)
        assert not there.waits
        far.sum().item()
        far.cpu()
        assert set(there.waits) == {("item", ""), ("copy to cpu", "")}
        assert not far.cpu().is_cuda


@pytest.mark.parametrize("fields", [{}, {"score": "alpha", "select_in": "forward"}], ids=str)
def test_a_recompute_is_that_of_a_cpu(fields: dict[str, Any]) -> None:
    def run(layer: MoELayer, case: Case) -> tuple[Tensor, ...]:
        leaves = [getattr(case, name).detach().requires_grad_() for name in NAMES]

        def forward(x: Tensor, *rest: Tensor) -> Tensor:
            return layer(x, case.ids, *rest, training=True)

        out = checkpoint(forward, *leaves, use_reentrant=False)
        return torch.autograd.grad(out, leaves, case.grad_out)

    config = pruning(**{"max_drop": 0.5, **fields})
    torch.manual_seed(1)
    wanted = run(build(CASE, config), CASE)
    with pretending(), kernels.off():
        torch.manual_seed(1)
        found = run(build(CASE, config), moved(CASE))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_drop", [0.0, 0.5])
def test_products_bring_their_memory(monkeypatch: pytest.MonkeyPatch, max_drop: float) -> None:
    """Torch's grouped product takes no destination on CUDA: one would cost a copy, and the memory twice."""
    given: list[bool] = []
    for name in ("grouped_mm", "grouped_mm_input", "grouped_mm_weight"):
        usual = getattr(experts, name)

        def noting(*args: Any, usual: Any = usual, **kwargs: Any) -> Tensor:
            given.append(kwargs["out"] is not None)
            found: Tensor = usual(*args, **kwargs)
            return found

        monkeypatch.setattr(experts, name, noting)
    layer = build(CASE, pruning(max_drop=max_drop))
    step(layer, CASE)
    assert given == [True] * 6, "on a CPU scratch is kept from call to call"
    given.clear()
    with pretending(), kernels.off():
        step(layer, moved(CASE))
    assert given == [False] * 6


def test_sums_of_scores_do_not_depend_on_the_order_of_additions() -> None:
    """A GPU adds in no order: totals by size are whole numbers there, and agree with a CPU's."""
    generator = torch.Generator().manual_seed(4)
    counts = torch.tensor([700, 0, 1, 299])
    scores = torch.rand(1000, generator=generator).pow(6)
    wanted = score_sums(scores, counts)
    orders = [
        torch.arange(1000),
        torch.cat([torch.randperm(700, generator=generator), torch.arange(700, 1000)]),
    ]
    with pretending():
        found = [score_sums(scores[order].to(CUDA), counts.to(CUDA)).cpu() for order in orders]
    assert torch.equal(found[0][:, 3:], found[1][:, 3:])
    for one in found:
        torch.testing.assert_close(one, wanted, rtol=1e-6, atol=1e-7)


def test_gradients_that_products_bring_are_counted() -> None:
    def counted(layer: MoELayer, case: Case) -> int:
        step(layer, case)
        (record,) = layer.telemetry.drain()
        return record.mem["grads"]

    config = pruning(max_drop=0.5)
    wanted = counted(build(CASE, config), CASE)
    assert wanted == CASE.gate_up.nbytes + CASE.down.nbytes
    with pretending(), kernels.off():
        assert counted(build(CASE, config), moved(CASE)) == wanted
