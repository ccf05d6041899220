"""The handle: clock, attaching, saving, figures, the way back; and what enabling prints."""

from __future__ import annotations

import copy
import gc
import io
import json
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lrmoe import CheckpointError, ConfigError, LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.integrations.transformers._enable import describe
from lrmoe.integrations.transformers._report import report
from lrmoe.integrations.transformers._summary import SummedTelemetry, figures
from lrmoe.telemetry import CallRecord, PhaseClock
from lrmoe.telemetry.layers import layer_figures
from lrmoe.telemetry.record import OpenCall
from tests.integrations.models import assert_same, make_model, make_tokens, run

EXACT = LRMoEConfig(max_drop=0)
WARMUP2 = LRMoEConfig(max_drop=0.4, warmup_steps=2)


def kept_shares(handle: lrmoe_hf.Handle) -> set[float]:
    return {round(record.kept_share, 2) for record in handle.telemetry.drain()}


def test_disable_restores_the_model() -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    model = copy.deepcopy(eager)
    configs = [layer.mlp.experts.config for layer in model.model.layers]
    before = set(vars(model.model.layers[0].mlp.experts))
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=0))
    handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    run(model, ids)
    handle.disable()
    handle.disable()
    assert [layer.mlp.experts.config for layer in model.model.layers] == configs
    assert set(vars(model.model.layers[0].mlp.experts)) == before
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert_same(run(model, ids), eager, ids)
    with pytest.raises(ConfigError, match="disabled"):
        handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_another_model_of_the_same_configuration_is_untouched() -> None:
    first, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    second = type(first)(first.config).double().train()
    assert second.config is first.config
    lrmoe_hf.enable(first, LRMoEConfig(max_drop=0.5, warmup_steps=0))
    experts = second.model.layers[0].mlp.experts
    assert experts.config._experts_implementation == "eager"
    assert_same(run(second, ids), second, ids)


def test_a_copied_or_pickled_model_is_not_enabled_and_exact() -> None:
    model, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    eager = copy.deepcopy(model)
    lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=0))
    copied = copy.deepcopy(model)
    assert_same(run(copied, ids), eager, ids)
    file = io.BytesIO()
    torch.save(model.model.layers[0].mlp.experts, file)
    file.seek(0)
    experts = torch.load(file, weights_only=False)
    assert experts._lrmoe.layer is None


def test_a_model_that_is_not_enabled_needs_no_clock() -> None:
    model, ids = make_model("qwen3", num_hidden_layers=1), make_tokens(batch=1, length=4)
    lrmoe_hf.register()
    model.set_experts_implementation("lrmoe")
    for _ in range(70):  # warnings are errors
        run(model, ids)


def test_state_dict_of_the_model_is_unchanged() -> None:
    model = make_model("qwen3")
    names = list(model.state_dict())
    lrmoe_hf.enable(model)
    assert list(model.state_dict()) == names


def test_attach_steps_the_clock_per_optimizer_step() -> None:
    model, ids = make_model("qwen3"), make_tokens()
    handle = lrmoe_hf.enable(model, WARMUP2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle.attach(optimizer)
    handle.attach(optimizer)
    seen = []
    for _ in range(4):
        for micro in ids.split(1):
            model(input_ids=micro, labels=micro).loss.backward()
        seen.append(kept_shares(handle))
        optimizer.step()
        optimizer.zero_grad()
    assert handle.clock.step == 4
    assert seen[0] == seen[1] == {1.0}
    assert all(max(shares) < 0.7 for shares in seen[2:])


def test_attach_refuses_what_is_no_optimizer_and_changes_nothing() -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, EXACT)
    wrongs: tuple[Any, ...] = (model, "adamw", torch.optim.SGD)
    for wrong in wrongs:
        with pytest.raises(
            ConfigError, match=rf"got a {type(wrong).__name__}; valid is a torch.optim.Optimizer"
        ):
            handle.attach(wrong)
    assert not handle.attached
    assert not handle.clock.expected


def test_attach_refuses_a_second_optimizer_and_forgets_a_dead_one() -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, EXACT)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle.attach(optimizer)
    other = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match="another optimizer"):
        handle.attach(other)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    handle.attach(other)


def test_the_model_keeps_its_handle_and_lets_it_go() -> None:
    model, ids = make_model("qwen3"), make_tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    lrmoe_hf.enable(model, WARMUP2).attach(optimizer)
    gc.collect()
    run(model, ids)
    optimizer.step()
    handle = lrmoe_hf._handle.find_handle(model)
    assert handle is not None
    assert handle.clock.step == 1
    gone = weakref.ref(model)
    del model, handle, optimizer
    gc.collect()
    assert gone() is None


def test_a_forgotten_clock_warns_once_and_calls_count() -> None:
    model, ids = make_model("qwen3", num_hidden_layers=1), make_tokens(batch=1, length=4)
    handle = lrmoe_hf.enable(model, WARMUP2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(70):
            run(model, ids)
    assert len([w for w in caught if "handle.step()" in str(w.message)]) == 1
    records = handle.telemetry.drain()
    assert records[0].drop_reason == "warmup"
    assert records[-1].kept_share < 0.7


def test_an_attached_handle_waits_for_the_end_of_a_long_step() -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    ids = make_tokens(batch=1, length=4)
    handle = lrmoe_hf.enable(model, WARMUP2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle.attach(optimizer)
    for _ in range(2):
        for _ in range(128):  # micro-batches of one step; warnings are errors
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.summary()["drop_reasons"] == {"warmup": 256}
    run(model, ids)
    assert handle.summary()["drop_reasons"] == {"warmup": 256, "always": 1}


@pytest.mark.filterwarnings("ignore:lrmoe. gradients flow")  # which the layer says by itself
def test_steps_without_a_training_call_warn_once() -> None:
    model, ids = make_model("qwen3"), make_tokens()
    handle = lrmoe_hf.enable(model, WARMUP2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle.attach(optimizer)
    optimizer.step()  # once is no harm: some prepare the optimizer's state
    run(model, ids)
    optimizer.step()
    model.eval()
    run(model, ids)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"without a training call.*model\.train\(\)"):
        optimizer.step()
    model.train()
    run(model, ids)
    for _ in range(5):  # warnings are errors
        optimizer.step()
    assert handle.clock.step == 9


def test_state_survives_json_and_a_new_handle() -> None:
    model, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = LRMoEConfig(max_drop=0.4, warmup_steps=1)
    handle = lrmoe_hf.enable(model, config)
    handle.attach(optimizer)
    for _ in range(3):
        run(model, ids)
        optimizer.step()
    saved, weights = json.loads(json.dumps(handle.state_dict())), copy.deepcopy(model.state_dict())
    expected = run(model, ids)

    resumed = make_model("qwen3", dtype=torch.float64, seed=5)
    resumed.load_state_dict(weights)
    other = lrmoe_hf.enable(resumed, config)
    other.load_state_dict(saved)
    assert other.clock.step == 3
    actual = run(resumed, ids)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"version": 7}, "version 7"),
        ({"layers": {"elsewhere": {}}}, "elsewhere"),
        ({"version": None}, "version None"),
    ],
)
def test_bad_state_is_refused_and_changes_nothing(damage: dict[str, object], message: str) -> None:
    handle = lrmoe_hf.enable(make_model("qwen3"), EXACT)
    state = handle.state_dict()
    with pytest.raises(CheckpointError, match=message):
        handle.load_state_dict({**state, "step": 9, **damage})
    assert handle.state_dict() == state


def test_summary_counts_drained_and_undrained_calls() -> None:
    model, ids = make_model("qwen3"), make_tokens()
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=1))
    run(model, ids)
    handle.telemetry.drain()
    handle.step()
    run(model, ids)
    for _ in range(2):  # reading does not change it
        summary = handle.summary()
        assert summary["calls"] == 4
        assert summary["drop_reasons"] == {"warmup": 2, "always": 2}
        assert summary["kept_share"] == pytest.approx(0.75)
    json.dumps(summary)


def test_figures_are_means_and_worst_layers_under_the_names_of_a_training_run() -> None:
    model, ids = make_model("qwen3"), make_tokens()
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=0, check_every=1))
    run(model, ids)
    records = handle.telemetry.records
    found = handle.figures()
    line = layer_figures([records])
    assert found.keys() == {name for name in line if name != "lrmoe/drop_reason"}
    checked = {"lrmoe/check_cosine", "lrmoe/check_relative_error", "lrmoe/check_layer"}
    means = {name for name in found if not name.endswith("_worst")} - checked
    assert {f"{name}_worst" for name in means} | means | checked == found.keys()
    energies = [record.dropped_energy for record in records]
    assert found["lrmoe/kept_share"] == found["lrmoe/kept_share_worst"] == pytest.approx(0.5)
    assert found["lrmoe/dropped_energy"] == pytest.approx(sum(energies) / 2)
    assert found["lrmoe/dropped_energy_worst"] == pytest.approx(max(energies))
    assert 0 < found["lrmoe/check_cosine"] < 1
    assert handle.figures() == {}


def test_the_dropped_energy_is_looked_at_where_nobody_reads_the_records(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, ids = make_model("qwen3"), make_tokens()
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=0, estimator="topk"))
    for step in range(50):
        assert caplog.messages == []
        if step >= 40:
            run(model, ids)
        else:
            handle.telemetry.calls += 1  # as if it had trained
        handle.step()
    assert len([text for text in caplog.messages if "estimator='topk'" in text]) == len(handle.layers)


def test_the_summary_and_its_lines_tell_what_the_checks_found() -> None:
    model, ids = make_model("qwen3"), make_tokens()
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=0, check_every=1))
    for _ in range(2):
        run(model, ids)
        handle.step()
    checked = [record for record in handle.telemetry.records if record.check_cosine is not None]
    cosines = [record.check_cosine for record in checked if record.check_cosine is not None]
    errors = [record.check_relative_error for record in checked if record.check_relative_error is not None]
    assert len(cosines) == len(errors) == 2
    found = handle.summary()["check"]
    assert found["calls"] == 2
    assert found["cosine"] == pytest.approx(sum(cosines) / 2)
    assert found["cosine_worst"] == min(cosines) < 1
    assert found["relative_error"] == pytest.approx(sum(errors) / 2)
    line = f"pruned gradient beside the exact one: cosine {found['cosine']:.3f}, {min(cosines):.3f} at least, relative"
    assert line in str(handle)


def test_without_checks_the_summary_is_silent_about_them() -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=0))
    run(model, make_tokens())
    assert "check" not in handle.summary()
    assert "exact one" not in str(handle)


def test_worst_layers_keep_least_and_peak_highest() -> None:
    telemetry = SummedTelemetry()
    for layer, kept in enumerate((4, 1)):
        call = open_call(0)
        call.record.layer, call.record.pairs, call.record.kept = layer, 4, kept
        call.record.backward_load_R = [kept]
        telemetry.add(call)
    found = figures(telemetry.drain())
    assert (found["lrmoe/kept_share"], found["lrmoe/kept_share_worst"]) == (0.625, 0.25)
    assert (found["lrmoe/backward_peak"], found["lrmoe/backward_peak_worst"]) == (0.625, 1.0)


def test_observe_is_exact_and_tells_by_share_what_pruning_saves() -> None:
    eager, ids = make_model("qwen3", dtype=torch.float64), make_tokens()
    model = copy.deepcopy(eager)
    handle = lrmoe_hf.enable(model, LRMoEConfig(observe=True, warmup_steps=0, max_drop=0.4))
    for _ in range(2):
        assert_same(run(model, ids), eager, ids)
    summary, records = handle.summary(), handle.telemetry.records
    assert summary["kept_share"] == 1
    assert summary["drop_reasons"] == {"observe": 4}
    assert list(summary["observed"]) == ["0.1", "0.3", "0.4", "0.5"]
    pairs = 2 * ids.numel()
    for share, saved in summary["observed"].items():
        dropped = int(float(share) * pairs)
        assert saved.keys() == {"backward_peak", "rows_saved", "bytes_saved", "added_variance"}
        assert saved["rows_saved"] == 4 * dropped
        assert saved["bytes_saved"] == 0  # one rank sends nothing
        assert saved["backward_peak"] == pytest.approx(1 - dropped / pairs)
        variance = sum(record.observed[f"variance_added_{share}"] for record in records)
        assert saved["added_variance"] == pytest.approx(variance / sum(record.energy for record in records))
    json.dumps(summary)
    text = handle.report()
    assert f"max_drop=0.4: {4 * int(0.4 * pairs)} rows and 0 bytes less," in text


def test_printing_the_handle_tells_what_happened() -> None:
    model, ids = make_model("qwen3"), make_tokens()
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=1))
    assert "0 training calls of 2 MoE layers; is the model in training mode" in str(handle)
    run(model, ids)
    handle.step()
    run(model, ids)
    text = str(handle)
    assert text == handle.report()
    lines = text.splitlines()
    assert lines[0] == "lrmoe after 1 optimizer steps: 4 training calls of 2 MoE layers (2 warmup, 2 always)"
    assert lines[1] == "backward kept 75.0% of the (token, expert) pairs"
    assert len(lines) == 4


def test_report_names_the_busiest_rank_and_broken_scores() -> None:
    summary = {
        "step": 3, "layers": 1, "calls": 3, "drop_reasons": {"observe": 3}, "kept_share": 1.0, "forward_peak": 1.5,
        "backward_peak": 1.5, "dropped_energy": 0.0, "added_variance": 0.0, "moe_layer_ms": 2.0,
        "wire_bytes": 2_500_000, "wire_bytes_row_per_pair": 4_000_000, "replicas": 3.5, "buffer_peak_bytes": 999,
        "nonfinite_scores": 2,
        "observed": {"0.3": {"backward_peak": 1.05, "rows_saved": 30, "bytes_saved": 1999, "added_variance": 0.125}},
    }  # fmt: skip
    busiest = "busiest rank 1.50 -> 1.50 of the mean load, 3.5 copies of experts a call"
    assert report(summary, ranks=2).splitlines()[1:] == [
        f"backward kept 100.0% of the (token, expert) pairs; {busiest}",
        "left out 0.0% of the scores' energy, added variance 0.0% of it",
        "this rank: 2.00 ms a call, 2.5 MB sent (4 MB with one row per pair), at most 999 bytes of token buffers",
        "2 scores were not finite: look at the loss",
        "had backward left pairs out (rows and bytes of this rank):",
        "  max_drop=0.3: busiest rank 1.05 of the mean load, 30 rows and 2 kB less, added variance 12.5%",
    ]


def test_a_configuration_of_another_kind_is_refused() -> None:
    model = make_model("qwen3")
    wrongs: tuple[Any, ...] = ({"max_drop": 0.3}, 0.3)
    for wrong in wrongs:
        with pytest.raises(
            ConfigError, match=rf"config: got a {type(wrong).__name__}; valid is an LRMoEConfig"
        ):
            lrmoe_hf.enable(model, wrong)
    assert not hasattr(model.model.layers[0].mlp.experts, "_lrmoe")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (EXACT, "backward keeps every (token, expert) pair; max_drop=0 is exact"),
        (
            LRMoEConfig(max_drop=0.3, warmup_steps=7),
            "backward keeps 70% of the (token, expert) pairs after 7 optimizer steps; max_drop=0 is exact",
        ),
        (
            LRMoEConfig(warmup_steps=0),
            "backward keeps 70% of the (token, expert) pairs from the first optimizer step; max_drop=0 is exact",
        ),
        (
            LRMoEConfig(drop="overload", max_drop=0.125),
            "backward keeps at least 87.5% of the (token, expert) pairs after 20 optimizer steps; max_drop=0 is exact",
        ),
        (
            LRMoEConfig(cooldown_steps=10, total_steps=100),
            "backward keeps 70% of the (token, expert) pairs after 20 optimizer steps until 90; max_drop=0 is exact",
        ),
        (
            LRMoEConfig(observe=True),
            "observing; backward is exact; print(handle), or the end of `lrmoe train`, tells what pruning would save",
        ),
    ],
)
def test_enable_prints_one_line(config: LRMoEConfig, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = make_model("qwen3")
    capfd.readouterr()
    lrmoe_hf.enable(model, config)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"lrmoe: 2 MoE layers: {line}\n"


def test_the_line_names_ranks_where_there_are_several() -> None:
    assert describe(EXACT, 1, 8).startswith("1 MoE layer over 8 ranks: ")


def test_group_without_shard_experts_is_refused() -> None:
    class TwoRanks:
        def size(self) -> int:
            return 2

    with pytest.raises(ConfigError, match="shard_experts"):
        lrmoe_hf.enable(make_model("qwen3"), group=TwoRanks())  # type: ignore[arg-type]


def test_parameters_split_into_experts_and_dense() -> None:
    model = make_model("glm4")
    experts, dense = list(lrmoe_hf.expert_parameters(model)), list(lrmoe_hf.dense_parameters(model))
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)] for p in experts} == {
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.down_proj",
    }
    assert len(experts) + len(dense) == len(list(model.parameters()))
    model.tied = nn.ModuleList([model.model.layers[1].mlp.experts])
    assert len(list(lrmoe_hf.expert_parameters(model))) == 2


def test_calls_that_nobody_drained_still_count_in_the_totals() -> None:
    telemetry = SummedTelemetry(limit=2)
    for step in range(5):
        telemetry.add(open_call(step))
    assert telemetry.totals().summary()["calls"] == 5
    assert [record.step for record in telemetry.drain()] == [3, 4]
    assert telemetry.totals().summary()["calls"] == 5


def open_call(step: int) -> OpenCall:
    record = CallRecord(
        step=step, micro_batch=0, layer=0, world_size=1, tokens=1, pairs=1, kept=1, drop_reason="off",
        counts_E=[1], quota_E=[1], forward_load_R=[1], backward_load_R=[1],
    )  # fmt: skip
    return OpenCall(record=record, clock=PhaseClock(torch.device("cpu")))


@pytest.mark.parametrize("change", [{"score_sums": [[1.0]]}, "missing"])
def test_a_state_that_does_not_fit_changes_nothing(change: object) -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, LRMoEConfig(warmup_steps=0))
    run(model, make_tokens())
    handle.step()
    before = handle.state_dict()
    broken = copy.deepcopy(before)
    last = list(broken["layers"])[-1]
    if isinstance(change, dict):
        broken["layers"][last].update(change)
    else:
        del broken["layers"][last]["calls"]
    next(iter(broken["layers"].values()))["calls"] = 99
    with pytest.raises(CheckpointError, match="does not fit"):
        handle.load_state_dict(broken)
    assert handle.state_dict() == before


def test_the_summary_tells_how_much_could_be_dropped() -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, LRMoEConfig(warmup_steps=1, drop="auto", max_added_variance=0.05))
    for _ in range(4):
        run(model, make_tokens())
        handle.step()
    summary = handle.summary()
    assert summary["drop_reasons"]["warmup"] == len(handle.layers)
    assert summary["control"]["variance_predicted"] <= 0.06
    assert 0 < summary["control"]["auto_time"] < 1
    assert "calls" not in summary["control"]
    assert "backward keeps at least 70%" in describe(handle.config, 1, 1)
