"""What a call reports, against the reference: energy, added variance, memory, and what observation predicts."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from tests.layer.harness import build, exact, forward, kept, leaves, pruning, run
from tests.reference import GRADS, inclusion_TK, make_case, scores

CASE = make_case(tokens=50, experts=4, top_k=2, seed=3)


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_dropped_energy_is_the_dropped_pairs_share_of_squared_scores(estimator: str) -> None:
    config = pruning(max_drop=0.4, estimator=estimator)
    energy = scores(CASE).square()
    dropped = energy[kept(CASE, config) < 1e-9].sum()
    found = run(CASE, config).record
    assert found.energy == pytest.approx(float(energy.sum()), rel=1e-5)
    assert found.dropped_energy == pytest.approx(float(dropped / energy.sum()), rel=1e-5)


def test_added_variance_is_the_sum_over_all_candidates() -> None:
    config = pruning(max_drop=0.4)
    found = run(CASE, config)
    pi = inclusion_TK(scores(CASE), CASE.ids, found.quota_E)
    energy = scores(CASE).square()
    wanted = float(((1 / pi - 1) * energy).sum() / energy.sum())
    assert found.record.added_variance == pytest.approx(wanted, rel=1e-3)
    assert run(CASE, pruning(max_drop=0.4, estimator="topk")).record.added_variance == 0.0


def test_observation_predicts_what_a_pruned_run_then_reports() -> None:
    observed = run(CASE, pruning(max_drop=0.9, observe=True)).record.observed
    for drop in (0.1, 0.3, 0.5):
        pruned = run(CASE, pruning(max_drop=drop)).record
        assert observed[f"backward_peak_{drop}"] == pytest.approx(pruned.backward_peak)
        assert observed[f"variance_added_{drop}"] == pytest.approx(pruned.variance_added, rel=1e-6)
        assert observed[f"rows_saved_{drop}"] == 100 - pruned.rows_backward_local
        assert observed[f"bytes_saved_{drop}"] == 0, "one rank sends nothing"


def test_observation_changes_no_number_bitwise() -> None:
    plain, observed = run(CASE, exact()).result, run(CASE, pruning(max_drop=0.5, observe=True)).result
    for name in ("out", *GRADS):
        assert torch.equal(getattr(plain, name), getattr(observed, name)), name


def test_the_stash_is_measured_and_recompute_has_none() -> None:
    stash = run(CASE, pruning(max_drop=0.4, activations="stash")).record.mem
    none = run(CASE, pruning(max_drop=0.4, activations="recompute")).record.mem
    rows = 100 * 2 * 12 * 8
    assert rows <= stash["stash"] <= rows + 100 * 8
    assert none["stash"] <= 100 * 8
    assert stash["grads"] == (CASE.gate_up.numel() + CASE.down.numel()) * 8
    assert stash["weights"] == (CASE.gate_up.numel() + CASE.down.numel()) * 8


def test_records_are_json() -> None:
    for config in (exact(), pruning(max_drop=0.4), pruning(observe=True)):
        flat = run(CASE, config).record.as_dict()
        assert json.loads(json.dumps(flat)) == flat


def test_telemetry_has_one_record_per_training_call_with_a_backward() -> None:
    layer = build(CASE, pruning())
    for _ in range(3):
        run(CASE, pruning(), layer=layer)
    with torch.no_grad():
        forward(layer, CASE, leaves(CASE, []), training=False)
    with pytest.warns(UserWarning, match="evaluation mode"):
        run(CASE, pruning(), layer=layer, training=False)
    forward(layer, CASE, leaves(CASE, GRADS))
    found = layer.telemetry.drain()
    assert [r.micro_batch for r in found] == [0, 1, 2]
    assert layer.telemetry.drain() == []


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_a_checkpointed_call_is_recorded_once(checkpoint: str) -> None:
    layer = build(CASE, pruning(max_drop=0.4))
    for _ in range(2):
        run(CASE, pruning(max_drop=0.4), layer=layer, checkpoint=checkpoint)
    found = layer.telemetry.drain()
    assert [r.micro_batch for r in found] == [0, 1]
    assert [r.kept for r in found] == [60, 60]
    assert [r.rows_backward_local for r in found] == [60, 60]


def test_a_clock_that_nobody_advances_warns_once_and_calls_serve_as_steps() -> None:
    case = make_case(tokens=4, experts=2)
    config = pruning(max_drop=0.5, warmup_steps=100)
    layer = build(case, config)
    for _ in range(64):
        run(case, config, layer=layer)
    with pytest.warns(UserWarning, match=r"handle\.step\(\)"):
        run(case, config, layer=layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(45):
            found = run(case, config, layer=layer)
    assert found.record.step == 109
    assert found.record.drop_reason == "always"


def test_a_clock_that_runs_never_warns_however_many_micro_batches() -> None:
    case = make_case(tokens=4, experts=2)
    layer = build(case, pruning(), step=1)
    for _ in range(100):
        found = run(case, pruning(), layer=layer)
    assert (found.record.step, found.record.micro_batch) == (1, 99)


def test_a_second_backward_through_a_retained_graph_is_not_recorded() -> None:
    layer, leaf = build(CASE, pruning(max_drop=0.5)), leaves(CASE, GRADS)
    out = forward(layer, CASE, leaf)
    out.backward(CASE.grad_out, retain_graph=True)
    once, history = layer.last_record, layer.state_dict()["score_sums"]
    assert once is not None
    memory = dict(once.mem)
    out.backward(CASE.grad_out)
    assert len(layer.telemetry.records) == 1
    assert layer.last_record is not None
    assert layer.last_record.mem == memory
    assert layer.state_dict()["score_sums"] == history
