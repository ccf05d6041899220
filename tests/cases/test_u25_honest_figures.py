"""U25: what was left out is not counted as done, forward and backward apart; the kept share stands beside speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.planning import ExpertShape, Problem, Topology, get_policy
from lrmoe.planning.cost import predict_layer
from lrmoe.planning.hardware import get_hardware
from lrmoe.report.tables import FIGURES
from lrmoe.telemetry import CallRecord
from lrmoe.training.metrics import StepMetrics
from lrmoe.training.totals import Totals
from tests.integrations.models import make_model, make_tokens
from tests.layer.harness import build, exact, forward, leaves, pruning, run
from tests.reference import GRADS, Case, make_case

FEW = settings(deadline=None, max_examples=25, derandomize=True)
KEEP_30 = {
    "sampled": pruning(max_drop=0.7, activations="stash"),
    "topk": pruning(max_drop=0.7, estimator="topk", activations="stash"),
    "recompute": pruning(max_drop=0.7, activations="recompute"),
    "forward": pruning(max_drop=0.7, select_in="forward", score="alpha", activations="stash"),
    "exact": exact(activations="stash"),
}


def executed(
    case: Case, config: LRMoEConfig, mask: torch.Tensor | None = None
) -> tuple[int, int, CallRecord]:
    """FLOP of the matrix products of forward and of backward as torch counts them, and the call's record."""
    layer, leaf = build(case, config), leaves(case, GRADS)
    with FlopCounterMode(display=False) as there:
        out = forward(layer, case, leaf, mask=mask)
    with FlopCounterMode(display=False) as back:
        out.backward(case.grad_out)
    assert layer.last_record is not None
    return there.get_total_flops(), back.get_total_flops(), layer.last_record


@pytest.mark.parametrize("mode", KEEP_30)
@FEW
@given(
    tokens=st.integers(1, 40),
    experts=st.sampled_from([1, 4, 8]),
    seed=st.integers(0, 99),
    missing=st.booleans(),
    padded=st.booleans(),
)
def test_recorded_rows_are_the_rows_that_were_multiplied(
    mode: str, tokens: int, experts: int, seed: int, missing: bool, padded: bool
) -> None:
    case = make_case(tokens=tokens, experts=experts, top_k=min(experts, 2), seed=seed)
    if missing:
        case = dataclasses.replace(case, ids=case.ids.masked_fill(case.ids == 0, -1))
    mask = torch.arange(tokens) % 3 > 0 if padded else None
    there, back, record = executed(case, KEEP_30[mode], mask)
    row = 2 * 16 * 12  # FLOP of a row through one hidden x width matrix
    assert there == 3 * row * record.rows_forward_local
    again = 2 * row * record.rows_backward_local * (mode == "recompute")
    assert back == 6 * row * record.rows_backward_local + again
    assert record.rows_forward_local == record.pairs
    assert record.rows_backward_local == record.kept == sum(record.quota_E)
    assert record.kept_share == (record.kept / record.pairs if record.pairs else 1.0)


@pytest.mark.parametrize("drop", [0.0, 0.3, 0.7])
def test_the_kept_share_is_that_of_pairs_and_the_peaks_are_apart(drop: float) -> None:
    record = run(make_case(tokens=100, experts=4), pruning(max_drop=drop)).record
    assert record.kept == 200 - int(drop * 200)
    told = record.as_dict()
    assert told["kept_share"] == pytest.approx(1 - drop)
    assert told["forward_peak"] == 1.0
    assert told["backward_peak"] == pytest.approx(1 - drop), (
        "of the complete call's mean, not of what is left"
    )


def test_padding_is_no_work() -> None:
    """Maps padded to a size would look balanced: padded positions are in no count."""
    case, mask = make_case(tokens=64, experts=4), torch.arange(64) < 10
    record = run(case, pruning(max_drop=0.7), mask=mask).record
    assert record.pairs == sum(record.counts_E) == 20
    assert record.kept == 6
    assert max(record.counts_E) * 4 > record.pairs, "what is skewed shows"


def beside(figures: Mapping[str, Any]) -> bool:
    """Whether every figure of time or speed has the kept share beside it."""
    timed = [
        name for name in figures if name.endswith(("_per_s", "_ms", "_time_s")) or name.startswith("ms_")
    ]
    return bool(timed) and "kept_share" in figures


def test_wherever_speed_is_told_the_kept_share_is_told_too() -> None:
    record = run(make_case(tokens=100, experts=4), pruning(max_drop=0.7)).record
    assert beside(record.as_dict())
    metrics = StepMetrics(
        step=0,
        loss=1.0,
        lr=0.1,
        grad_norm=1.0,
        skipped=False,
        tokens=100,
        step_ms=10.0,
        records=[record],
        records_by_rank=[[record]],
    )
    assert beside(metrics.as_dict())
    assert metrics.as_dict()["tokens_per_s"] == 10_000, "tokens of the data, whatever was left out"
    assert metrics.kept_share == pytest.approx(0.3)
    totals = Totals()
    totals.add(metrics)
    assert beside(totals.summary())
    assert totals.summary()["kept_share"] == pytest.approx(0.3)
    shown = [name for _, name, _ in FIGURES]
    assert {"tokens_per_s", "kept_share"} <= set(shown)


def test_the_summary_of_a_host_model_tells_it() -> None:
    model, ids = make_model("qwen3"), make_tokens()
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.7, warmup_steps=0))
    model(input_ids=ids, labels=ids).loss.backward()
    handle.step()
    found = handle.summary()
    assert beside(found)
    assert found["kept_share"] == pytest.approx(0.3, abs=0.03)
    assert f"kept {found['kept_share']:.1%}" in str(handle)


@pytest.mark.parametrize("drop", [0.3, 0.7])
def test_predicted_times_count_what_each_pass_runs(drop: float) -> None:
    """Leaving pairs out of backward makes its predicted compute shorter, and forward's not at all."""
    shape, counts = ExpertShape(hidden=2048, width=768, element_bytes=2), [[4096, 1024], [2048, 8192]]
    times = {}
    for share in (0.0, drop):
        problem = Problem(counts_RE=np.array(counts), topology=Topology(ranks=2, experts=2), max_drop=share)
        times[share] = predict_layer(shape, get_hardware("h100"), get_policy("lrmoe")(problem))
    assert times[drop].forward["experts"] == times[0.0].forward["experts"]
    assert times[drop].backward["experts_backward"] < times[0.0].backward["experts_backward"]
