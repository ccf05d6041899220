"""Sources, settings and summaries: folding, throughput under pressure, what does not fit together."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from lrmoe.errors import ConfigError
from lrmoe.planning.problem import Topology
from lrmoe.simulate.cluster import Calls, simulate
from lrmoe.simulate.measure import CallFigures
from lrmoe.simulate.run import Settings, experts_for, run
from lrmoe.simulate.scenario import Allowance, Layer, make_systems
from lrmoe.simulate.sources import enlarge, fold, from_generator, from_trace
from lrmoe.simulate.summary import capacity_rows, effective, system_summary, throughput
from lrmoe.telemetry.traces import Trace


def trace(calls: int = 6, ranks: int = 4, experts: int = 8) -> Trace:
    counts = np.random.default_rng(0).integers(0, 100, (calls, ranks, experts))
    step = np.arange(calls) // 2
    return Trace(
        step_C=step,
        micro_batch_C=np.zeros_like(step),
        layer_C=np.arange(calls) % 2,
        counts_CRE=counts,
        about={"top_k": 2},
    )


def figures(rows: int, extra_rows: float = 0.0) -> CallFigures:
    values: dict[str, Any] = dict.fromkeys((f.name for f in dataclasses.fields(CallFigures)), 0)
    return CallFigures(**{**values, "backward_rows": rows, "extra_rows": extra_rows})


def test_ranks_of_a_trace_are_put_together() -> None:
    counts = np.arange(2 * 4 * 8).reshape(2, 4, 8)
    folded = fold(counts, 2)
    assert np.array_equal(folded[:, 1], counts[:, 2] + counts[:, 3])
    assert np.array_equal(fold(counts, 4), counts)
    for ranks in (3, 8, 0):
        with pytest.raises(ConfigError, match=f"ranks={ranks}: the trace has 4 source ranks and 8 experts"):
            fold(counts, ranks)


def test_a_trace_without_stated_sizes_takes_those_asked_for() -> None:
    found = dataclasses.replace(trace(ranks=3, experts=7), sized=False)
    larger = enlarge(found, (4, 2), (8,))
    assert larger.counts_CRE.shape == (6, 4, 8)
    assert np.array_equal(larger.counts_CRE[:, :3, :7], found.counts_CRE)
    assert larger.counts_CRE.sum() == found.counts_CRE.sum()
    assert enlarge(found, (2,), ()) is found
    assert enlarge(trace(), (8,), (16,)).counts_CRE.shape == (6, 4, 8), "its sizes are stated"
    with pytest.raises(ConfigError, match="counts of calls; at most"):
        enlarge(found, (65536,), (65536,))


def test_every_layer_of_a_trace_is_a_sequence() -> None:
    found = from_trace(trace(), 4, skip=1, steps=1)
    assert [(s.name, len(s.counts), s.skip) for s in found] == [("layer 0", 2, 1), ("layer 1", 2, 1)]
    assert np.array_equal(found[1].counts[0], trace().counts_CRE[1])
    with pytest.raises(ConfigError, match="skip=3: layer 0 of the trace has 3 calls"):
        from_trace(trace(), 4, skip=3)


def test_every_seed_of_a_generator_is_a_sequence() -> None:
    sizes = {"ranks": 2, "experts": 8, "top_k": 2, "tokens": 64}
    found = from_generator("zipf", seeds=(3, 4), steps=2, skip=1, options={"exponent": 1.2}, **sizes)
    assert [(s.name, len(s.counts), s.skip) for s in found] == [("seed 3", 3, 1), ("seed 4", 3, 1)]
    assert not np.array_equal(found[0].counts[0], found[1].counts[0])


def test_effective_throughput() -> None:
    assert effective(10, 5) == effective(10, 10) == 1.0
    assert effective(10, 40) == 0.25
    assert effective(-5, 10) == 0.0
    calls = [figures(100), figures(50)]
    assert throughput(calls, 100, 4) == pytest.approx((100 / 400 + 100 / 200) / 2)
    assert throughput([figures(50, extra_rows=60)], 100, 2) == pytest.approx(0.4), "replicas take room"
    assert throughput([figures(2000)], 100, 20, planned_at=20) == pytest.approx(0.05)


def test_capacity_gives_fixed_ownership_forty_percent() -> None:
    calls = [figures(250), figures(180), figures(320)]
    capacity = capacity_rows(calls)
    assert throughput(calls, capacity, 20) == pytest.approx(0.4, abs=1e-9)
    planned = [figures(20 * c.backward_rows) for c in calls]
    assert capacity_rows(planned, 20) == pytest.approx(capacity, rel=1e-9)


def test_a_summary_has_means_worst_calls_and_what_did_not_fit() -> None:
    sequence = Calls(name="", counts=[np.array([[4, 0], [4, 0]]), np.array([[2, 2], [2, 2]])])
    outcome = simulate(
        make_systems(["megatron"], 0), [sequence], Topology(ranks=2, experts=2), Layer(), Allowance(slots=0)
    )[0]
    found = system_summary(outcome, Layer().expert_bytes + 6 * Layer().row_bytes)
    assert (found["forward_peak"], found["forward_peak_worst"], found["calls"]) == (1.5, 2.0, 2)
    assert found["over_budget_calls"] == 1
    missed = dataclasses.replace(outcome, calls=(), infeasible=("too much",))
    assert system_summary(missed) == {"calls": 0, "infeasible_calls": 1, "infeasible": "too much"}


def test_a_run_over_several_clusters() -> None:
    told: list[tuple[int, int]] = []
    settings = Settings(
        systems=("megatron", "ultraep"), ranks=(4, 16), experts=(16, 32), tokens=8192, top_k=2
    )
    summary = run(settings, lambda text, done, total: told.append((done, total)))
    assert told == [(i + 1, 4) for i in range(4)]
    assert [(s["ranks"], s["experts"], s["nodes"]) for s in summary["scenarios"]] == [(4, 16, 1), (16, 32, 2)]
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    for scenario in summary["scenarios"]:
        assert scenario["systems"]["megatron"]["throughput"]["20"] == pytest.approx(0.4)
        assert scenario["systems"]["ultraep"]["throughput"]["20"] > 0.4
        assert scenario["mean_rows"] == 16384


def test_a_run_on_a_trace() -> None:
    summary = run(Settings(systems=("megatron",), trace=trace(), ranks=(4, 2)))
    assert [s["ranks"] for s in summary["scenarios"]] == [4, 2]
    assert summary["scenarios"][0]["systems"]["megatron"]["calls"] == 6
    assert summary["settings"]["top_k"] == 2, "the trace says it"


def test_sizes_of_a_trace_count_unless_a_model_is_named() -> None:
    named = dataclasses.replace(trace(), about={"top_k": 2, "hidden": 32, "width": 16, "model": "tiny"})
    layer = Settings(trace=named).layer
    assert (layer.shape.hidden, layer.shape.width, layer.top_k) == (32, 16, 2)
    layer = Settings(trace=named, model="Mixtral-8x7B").layer
    assert (layer.shape.hidden, layer.shape.width, layer.top_k) == (4096, 14336, 2)
    odd = dataclasses.replace(trace(), about={"top_k": "many", "hidden": -1})
    assert (Settings(trace=odd).layer.shape.hidden, Settings(trace=odd).layer.top_k) == (2048, 8)


def test_systems_that_never_moved_an_expert_are_named() -> None:
    short: dict[str, Any] = {
        "systems": ("megatron", "smartmoe", "symi", "ultraep"),
        "ranks": (4,),
        "experts": (16,),
        "tokens": 512,
    }
    at_home = [run(Settings(**short, skip=skip, steps=1))["scenarios"][0]["at_home"] for skip in (2, None)]
    assert at_home == [{"smartmoe": "every 10 calls"}, {}]
    alone = Settings(systems=("smartmoe",), ranks=(1,), experts=(8,), tokens=64, allowance=Allowance(slots=0))
    assert run(alone)["scenarios"][0]["at_home"] == {}


def test_settings_say_where_the_calls_are_from() -> None:
    made = run(Settings(systems=("megatron",), ranks=(2,), experts=(8,), top_k=2, tokens=16))["settings"]
    assert (made["steps"], made["skip"], made.get("trace")) == (4, 12, None)
    read = run(Settings(systems=("megatron",), trace=trace(), trace_file="runs/x", skip=1))["settings"]
    assert (read["steps"], read["skip"], read["trace"]) == (None, 1, "runs/x")


def test_experts_by_ranks() -> None:
    assert [experts_for(r) for r in (8, 32, 64, 256, 1024)] == [128, 128, 256, 512, 1024]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"skip": -1}, "skip=-1: must be at least 0"),
        ({"seeds": (-1,)}, "seed=-1: must be at least 0"),
        ({"ranks": (0,)}, r"ranks=0: must lie in \[1, 4096\]"),
        ({"ranks": (8, 8)}, r"ranks=\[8, 8\]: each once"),
        ({"ranks": (8,), "experts": (8, 16)}, "experts=.*one number, or one for each"),
        ({"ranks": (8,), "experts": (12,)}, "experts=12 cannot be split evenly over ranks=8"),
        ({"ranks": (12,), "experts": (24,)}, "ranks_per_node=8"),
        ({"allowance": Allowance(slots=113)}, "slots=113: must be at most 112"),
        ({"systems": ()}, "name at least one of megatron"),
        ({"systems": ("lrmoe", "lrmoe")}, "each system once"),
        ({"systems": ("deepspeed",)}, "systems='deepspeed'"),
        ({"model": "Qwen3-30B"}, "no such model"),
        ({"hardware": "h101"}, "no such device"),
        ({"trace": trace(), "experts": (16,)}, r"experts=\[16\]: the trace has 8"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(Settings(**{"systems": ("megatron",), "tokens": 16, **change}))


@pytest.mark.parametrize(
    ("field", "value"), [("slots", -1), ("max_drop", 1.0), ("max_drop", -0.1), ("budget_bytes", 0)]
)
def test_an_allowance_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field.removesuffix('_bytes')}={value}"):
        Allowance(**{field: value})  # type: ignore[arg-type]
