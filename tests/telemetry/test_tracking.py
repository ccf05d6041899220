"""The storage tracker against known allocations, and against torch's profiler."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lrmoe.telemetry.tracking import StorageTracker, profiled_peak
from tests.layer.harness import build, exact, pruning, run
from tests.reference import make_case


def test_known_allocations_are_counted_until_they_are_freed() -> None:
    tracker = StorageTracker()
    with tracker:
        first = torch.zeros(100)
        assert (tracker.current, tracker.peak) == (400, 400)
        second = first.double()
        assert tracker.current == 1200
        del first
        assert (tracker.current, tracker.peak) == (800, 1200)
    del second
    assert (tracker.current, tracker.peak) == (0, 1200)


def test_a_view_counts_with_its_storage_and_keeps_it() -> None:
    tracker = StorageTracker()
    with tracker:
        whole = torch.zeros(10, 10)
        part = whole[2:4].t()
        assert tracker.current == 400
        del whole
        assert tracker.current == 400
        del part
        assert tracker.current == 0


def test_memory_counts_once_where_an_array_lies_in_a_tensor() -> None:
    tracker = StorageTracker()
    with tracker:
        base = torch.empty(1000, dtype=torch.uint8)
        part = torch.from_numpy(base.numpy()[8:408]).view(torch.float32)
        beside = torch.from_numpy(np.zeros(100, dtype=np.uint8))
        part.zero_()
        assert tracker.current == 1100
        del base
        assert tracker.current == 1100, "the array keeps it"
        del part
        assert tracker.current == 100
        del beside
    assert tracker.current == 0


def test_what_existed_before_is_not_counted_also_when_written_viewed_or_freed() -> None:
    before, target = torch.zeros(100), torch.zeros(50)
    tracker = StorageTracker()
    with tracker:
        before.add_(1)
        half = before[:50]
        torch.mul(half, 2, out=target)
        assert tracker.peak == 0
        del before, half, target
        gc.collect()
    assert tracker.current == 0


def test_what_belongs_to_the_caller_can_be_taken_out() -> None:
    tracker = StorageTracker()
    with tracker:
        mine, yours = torch.zeros(10), torch.zeros(20)
        tracker.ignore([yours])
        assert tracker.current == 40
        yours.add_(mine[0])
        assert tracker.current == 40
        del yours
        assert tracker.current == 40
    del mine


def test_marks_start_a_new_peak() -> None:
    tracker = StorageTracker()
    with tracker:
        kept = torch.zeros(100)
        torch.zeros(1000).sum()
        assert tracker.peak == 4400 + 4
        assert tracker.mark() == 400
        torch.zeros(10)
        assert tracker.peak == 440
    del kept


def test_growing_output_buffers_and_host_data_count() -> None:
    tracker = StorageTracker()
    with tracker:
        out, rows = torch.empty(0), torch.ones(25)
        torch.add(rows, rows, out=out)
        assert tracker.current == 200
        ids = torch.from_numpy(np.arange(5))
        listed = torch.tensor([1, 2])
        assert tracker.current == 200 + 40 + 16
    del out, rows, ids, listed
    assert tracker.current == 0


def test_backward_is_followed_with_what_forward_saved() -> None:
    leaf = torch.ones(1000, requires_grad=True)
    tracker = StorageTracker()
    with tracker:
        out = leaf.exp()
    assert tracker.current == 4000
    tracker.mark()
    with tracker:
        out.backward(torch.ones(1000))
        assert leaf.grad is not None
        # The result of exp, the gradient that came in, and their product.
        assert tracker.peak == 12000
    del out
    assert tracker.current == 4000
    leaf.grad = None
    assert tracker.current == 0


def _custom(rows: Tensor) -> Tensor:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return (grad + 1) * 2

    return Double.apply(rows)


def test_a_function_of_our_own_is_followed_inside() -> None:
    leaf, grad = torch.ones(1000, requires_grad=True), torch.ones(1000)
    tracker = StorageTracker()
    with tracker:
        _custom(leaf).backward(grad)
    assert tracker.peak == 12000  # the output, and both steps of the backward
    assert tracker.current == 4000


def test_it_agrees_with_the_profiler_on_autograd() -> None:
    def step() -> None:
        x = torch.randn(300, 64, requires_grad=True)
        w = torch.randn(64, 64, requires_grad=True)
        hidden = torch.nn.functional.silu(x @ w)
        (hidden @ w).sum().backward()

    step()
    tracker = StorageTracker()
    with tracker:
        step()
    assert tracker.peak == profiled_peak(step)
    assert tracker.current == 0


def test_it_agrees_with_the_profiler_on_a_layer_call() -> None:
    case = make_case(tokens=600, experts=4, top_k=2, hidden=64, width=48)
    for config in (exact(), pruning(max_drop=0.5)):
        layer = build(case, config)
        run(case, config, layer=layer)
        tracker = StorageTracker()
        with tracker:
            run(case, config, layer=layer)
        profiled = profiled_peak(partial(run, case, config, layer=layer))
        # Only the profiler sees operators' own scratch, only the tracker what NumPy made: the kept pairs' numbers.
        by_numpy = 0 if config.max_drop == 0 else 8 * case.ids.numel() // 2
        assert 0 <= profiled + by_numpy - tracker.peak < 0.02 * tracker.peak
