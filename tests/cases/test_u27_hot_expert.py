"""U27: routing of any shape meets the memory bound, in chunks of rows; what cannot is refused before it allocates."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.errors import InfeasibleError
from lrmoe.layer import release_scratch
from lrmoe.layer.routing import sort_pairs
from lrmoe.telemetry.tracking import StorageTracker
from tests.cases.on_device import NEEDS_CUDA, check_on_device
from tests.layer.harness import Run, build, exact, forward, leaves, pruning
from tests.layer.harness import run as run_layer
from tests.reference import GRADS, Case, assert_result, make_case

BASE = make_case(tokens=1024, experts=8, top_k=2, hidden=32, width=24, dtype=torch.float32)
PARAMETERS = sum(t.nbytes for t in (BASE.gate_up, BASE.down))
FEW = settings(deadline=None, max_examples=6, derandomize=True)


def routed(share: float, expert: int, seed: int) -> Case:
    """So much of all pairs goes to one expert, also twice for one token; the others as they fall."""
    dice = torch.rand(BASE.ids.shape, generator=torch.Generator().manual_seed(seed))
    ids = torch.where(dice < share, expert, torch.arange(BASE.ids.numel()).view(BASE.ids.shape) % 8)
    return dataclasses.replace(BASE, ids=ids)


def tracked(case: Case, config: LRMoEConfig) -> tuple[int, Run]:
    """Most bytes that tensors of the call held at once beside its inputs, as an observer of torch saw them."""
    release_scratch()
    layer, leaf = build(case, config), leaves(case, GRADS)
    tracker = StorageTracker()
    with tracker:
        out = forward(layer, case, leaf)
        out.backward(case.grad_out)
    assert layer.last_record is not None
    return tracker.peak, Run(result=run_layer(case, exact()).result, last_record=layer.last_record)


EVEN = routed(0.0, 0, 0)
LOOSE, _ = tracked(EVEN, exact(layer_budget="1GiB", activations="recompute"))


@FEW
@given(share=st.sampled_from([0.3, 0.9, 1.0]), expert=st.integers(0, 7), seed=st.integers(0, 99))
def test_any_routing_fits_what_a_balanced_call_needs(share: float, expert: int, seed: int) -> None:
    """A hot expert's rows run in parts where all at once would need more."""
    case, budget = routed(share, expert, seed), LOOSE + PARAMETERS
    peak, found = tracked(case, exact(layer_budget=budget))
    assert peak <= LOOSE
    assert found.record.peak_predicted <= budget
    assert_result(run_layer(case, exact(layer_budget=budget)).result, case)


@pytest.mark.parametrize("config", [exact(), pruning(max_drop=0.5)], ids=["exact", "sampled"])
def test_without_a_budget_a_hot_expert_costs_the_scratch_of_its_rows_and_no_maps(config: LRMoEConfig) -> None:
    hot, even = (tracked(case, config)[0] for case in (routed(1.0, 0, 0), EVEN))
    rows = BASE.ids.numel()
    intermediates = rows * (4 * 32 + 8 * 24) * 4  # gathered rows, both projections' outputs, their gradients
    assert hot - even < intermediates
    assert hot < even + PARAMETERS + intermediates


@pytest.mark.parametrize(("tokens", "experts", "slots"), [(4096, 128, 8), (20_000, 8, 2), (512, 1024, 4)])
def test_counting_needs_memory_of_pairs_and_experts_and_not_of_their_product(
    tokens: int, experts: int, slots: int
) -> None:
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(0, experts, (tokens, slots), generator=gen)
    tracker = StorageTracker()
    with tracker:
        order, counts_E = sort_pairs(ids, experts)
    assert counts_E.sum() == order.numel() == ids.numel()
    one_hot = tokens * slots * experts * 8
    assert tracker.peak <= 40 * ids.numel() + 64 * experts < one_hot


@FEW
@given(share=st.sampled_from([0.0, 1.0]), budget=st.sampled_from([1, 1000, PARAMETERS]))
def test_a_call_that_cannot_fit_is_refused_with_numbers_before_it_allocates(
    share: float, budget: int
) -> None:
    case = routed(share, 3, 0)
    layer, leaf = build(case, exact(layer_budget=budget)), leaves(case, GRADS)
    tracker = StorageTracker()
    with tracker, pytest.raises(InfeasibleError, match="layer_budget") as caught:
        forward(layer, case, leaf)
    ids_and_counts = 40 * case.ids.numel()
    assert tracker.peak <= ids_and_counts < case.hidden.nbytes
    assert caught.value.smallest is not None
    assert caught.value.smallest > budget
    assert len(re.findall(r"\d", str(caught.value))) > 3
    smallest: Tensor = run_layer(case, exact(layer_budget=caught.value.smallest)).result.out
    torch.testing.assert_close(smallest, run_layer(case, exact()).result.out, rtol=1e-5, atol=1e-5)


@NEEDS_CUDA
def test_a_hot_expert_needs_no_more_than_a_balanced_call_on_a_device() -> None:
    check_on_device("U27")
