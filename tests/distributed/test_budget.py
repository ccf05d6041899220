"""Byte budgets on several ranks: kept to, predicted closely, refused alike everywhere, and exact in any case."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.config import LRMoEConfig
from lrmoe.errors import InfeasibleError
from lrmoe.layer import release_scratch
from lrmoe.ops import cpu
from lrmoe.telemetry import CallRecord
from lrmoe.telemetry.tracking import StorageTracker
from tests.distributed.calls import bounds_of, even, spread
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, forward, leaves, pruning
from tests.reference import GRADS, Case, assert_result, make_case

pytestmark = pytest.mark.distributed

CASE = make_case(tokens=480, experts=8, top_k=3, hidden=128, width=64, dtype=torch.float32)
MODES: dict[str, LRMoEConfig] = {
    "exact": exact(),
    "overload": pruning(drop="overload", max_drop=0.4),
    "always": pruning(max_drop=0.3),
    "stash": exact(activations="stash"),
    "recompute": exact(activations="recompute", policy="megatron"),
    "full-router": pruning(max_drop=0.3, estimator="topk"),
    "in-forward": pruning(max_drop=0.3, score="alpha", select_in="forward"),
    "in-forward-by-phi": pruning(max_drop=0.3, score="alpha_phi", select_in="forward", estimator="topk"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needed:
    """What one rank was predicted to need and needed, or the budget that its error names."""

    predicted: int = 0
    needed: int = 0
    smallest: int = 0
    record: CallRecord | None = None


def call(case: Case, config: LRMoEConfig, sizes: list[int]) -> Needed:
    """Runs in a worker: one call under the tracker, or the refusal."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    mine = case.tokens(*bounds_of(sizes)[dist.get_rank()])
    leaf, layer, tracker = leaves(mine, GRADS, group), build(mine, config, group=group), StorageTracker()
    release_scratch()
    try:
        with tracker:
            forward(layer, mine, leaf).backward(mine.grad_out)
    except InfeasibleError as error:
        if error.smallest is None:
            raise
        return Needed(smallest=error.smallest)
    record = layer.last_record
    assert record is not None
    parameters = leaf["d_gate_up"].nbytes + leaf["d_down"].nbytes
    return Needed(predicted=record.peak_predicted, needed=tracker.peak + parameters, record=record)


def ask(pool: Pool, config: LRMoEConfig, budget: int, case: Case = CASE, sizes: Any = None) -> list[Needed]:
    sizes = even(case, pool.world_size) if sizes is None else sizes
    return pool.run(call, case, config.replace(layer_budget=budget), sizes, limit_s=60)


def smallest(pool: Pool, config: LRMoEConfig) -> int:
    found = {one.smallest for one in ask(pool, config, 1)}
    assert len(found) == 1, "the ranks disagree"
    least = found.pop()
    assert least > 0, "a refused budget names the smallest"
    return least


def check(ranks: list[Needed], budget: int) -> None:
    for rank, one in enumerate(ranks):
        assert one.needed <= one.predicted <= 1.02 * one.needed, rank
        assert one.predicted <= budget, rank
        assert one.record is not None
        assert 0.4 * one.needed < one.record.peak_measured <= one.needed, "the ledger books what is large"


@pytest.mark.parametrize("mode", MODES)
def test_a_budget_is_kept_to_and_predicted_from_the_smallest_on(pool4: Pool, mode: str) -> None:
    config = MODES[mode]
    least = smallest(pool4, config)
    most = max(one.predicted for one in ask(pool4, config, 2**60))
    assert least < 0.8 * most
    for budget in (least, (least + most) // 2):
        check(ask(pool4, config, budget), budget)
    assert all(one.smallest == least for one in ask(pool4, config, least - 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_predicted_too(pool4: Pool, dtype: torch.dtype) -> None:
    case = CASE.to(dtype)
    for budget in (2**60, max(one.predicted for one in ask(pool4, exact(), 2**60, case)) // 2):
        check(ask(pool4, exact(), budget, case), budget)


def call_in_parts_of_the_ranks(
    case: Case, config: LRMoEConfig, sizes: list[int], compiled: list[bool]
) -> Needed:
    """Runs in a worker: the same, with compiled passes on some of the ranks."""
    with cpu.limited(len(cpu.LEVELS) - 1 if compiled[dist.get_rank()] else None):
        return call(case, config, sizes)


@pytest.mark.parametrize("compiled", [[False] * 4, [True, True, False, True]])
def test_ranks_without_compiled_passes_are_predicted_too(pool4: Pool, compiled: list[bool]) -> None:
    """All ranks predict, and plan, as the one without does."""
    case, sizes = CASE.to(torch.bfloat16), even(CASE, 4)
    config = exact(layer_budget=2**60)
    ranks = pool4.run(call_in_parts_of_the_ranks, case, config, sizes, compiled, limit_s=60)
    plain = pool4.run(call_in_parts_of_the_ranks, case, config, sizes, [False] * 4, limit_s=60)
    assert [one.predicted for one in ranks] == [one.predicted for one in plain]
    for served, one in zip(compiled, ranks, strict=True):
        assert one.needed <= one.predicted
        assert served or one.predicted <= 1.02 * one.needed


def test_uneven_sources_and_ranks_without_tokens(pool4: Pool) -> None:
    sizes = [0, 280, 200, 0]
    for config in (MODES["exact"], MODES["overload"]):
        most = max(one.predicted for one in ask(pool4, config, 2**60, CASE, sizes))
        check(ask(pool4, config, most // 2, CASE, sizes), most // 2)


def test_a_lean_wire_stays_within_its_budget(pool4: Pool) -> None:
    config = exact(lean_wire=True)
    most = max(one.predicted for one in ask(pool4, config, 2**60))
    for one in ask(pool4, config, most // 2):
        assert one.smallest == 0
        assert one.needed <= one.predicted <= most // 2


@pytest.mark.parametrize(
    ("dtype", "width", "skew", "config", "budget"),
    [
        (torch.float32, 128, 2.0, pruning(max_drop=0.4, lean_wire=True), 2_748_229),
        (torch.bfloat16, 96, 3.0, exact(policy="ultraep", replica_slots=4, lean_wire=True), 835_892),
    ],
    ids=["pruned", "copies"],
)
def test_a_lean_wire_in_parts_needs_no_more_than_was_predicted(
    pool2: Pool, dtype: torch.dtype, width: int, skew: float, config: LRMoEConfig, budget: int
) -> None:
    """Narrow rows, so that every vector beside them shows."""
    tokens = 1024 if dtype == torch.float32 else 512
    case = make_case(
        tokens=tokens, experts=8, top_k=4, hidden=32, width=width, dtype=torch.float32, skew=skew
    ).to(dtype)
    for one in ask(pool2, config, budget, case):
        assert one.record is not None
        assert one.record.chunks > 1
        assert one.needed <= one.predicted <= budget


@pytest.mark.parametrize("score", ["alpha", "alpha_phi"])
def test_a_lean_wire_with_the_kept_set_fixed_in_forward_stays_within_it_too(pool4: Pool, score: str) -> None:
    config = pruning(max_drop=0.3, score=score, select_in="forward", lean_wire=True)
    most = max(one.predicted for one in ask(pool4, config, 2**60))
    for budget in (most, most // 2):
        for one in ask(pool4, config, budget):
            assert one.smallest == 0
            assert one.needed <= one.predicted <= budget


def test_means_rise_as_the_budget_falls(pool4: Pool) -> None:
    config = MODES["exact"]
    least = smallest(pool4, config)
    most = max(one.predicted for one in ask(pool4, config, 2**60))
    loose, tight = (ask(pool4, config, budget)[0].record for budget in (most, least))
    assert loose is not None
    assert tight is not None
    assert (loose.chunks, loose.recomputed) == (1, False)
    assert tight.chunks > 8
    assert tight.recomputed


@pytest.mark.parametrize("share", [1.0, 1.3, 2.0])
def test_a_call_in_a_budget_is_as_exact_as_one_without(pool2: Pool, share: float) -> None:
    case = make_case(tokens=60, experts=4, top_k=2, hidden=48, width=32, dtype=torch.float64)
    least = {one.smallest for one in ask(pool2, exact(), 1, case)}.pop()
    found = spread(pool2, case, exact(layer_budget=int(share * least)))
    assert found.records[0].chunks > 1
    assert_result(found.result, case)


def test_the_error_comes_before_compute_and_names_the_numbers(pool2: Pool) -> None:
    outcomes = pool2.outcomes(_refused, CASE, exact(layer_budget=1), even(CASE, 2))
    texts = {str(one.error) for one in outcomes}
    assert len(texts) == 1
    assert re.search(r"rank \d needs \d+ bytes as planned and \d+ with every means", texts.pop())
    pool2.stop()


def _refused(case: Case, config: LRMoEConfig, sizes: list[int]) -> None:
    mine = case.tokens(*bounds_of(sizes)[dist.get_rank()])
    forward(build(mine, config, group=dist.group.WORLD), mine, leaves(mine, GRADS, dist.group.WORLD))
