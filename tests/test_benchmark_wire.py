"""The wire benchmark: its plans are what its figures say, and both wires carry what was counted by hand."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lrmoe.planning import LayerPlan, Problem, Topology
from tests import benchmark


@pytest.fixture(scope="module")
def wire() -> ModuleType:
    return benchmark.load("wire")


def plan_of(wire: ModuleType, name: str, ranks: int, experts: int) -> LayerPlan:
    counts_RE = np.random.default_rng(0).integers(0, 90, (ranks, experts))
    problem = Problem(
        counts_RE=counts_RE, topology=Topology(ranks=ranks, experts=experts), slots=2, max_drop=0.0
    )
    plan: LayerPlan = getattr(wire, name)(problem)
    plan.check(problem)
    return plan


@pytest.mark.parametrize("name", ["spread", "keep_local"])
@pytest.mark.parametrize(("ranks", "experts"), [(2, 8), (3, 9), (8, 128)])
def test_every_rank_holds_two_foreign_experts_and_each_of_them_runs_at_two_places(
    wire: ModuleType, name: str, ranks: int, experts: int
) -> None:
    plan = plan_of(wire, name, ranks, experts)
    assert plan.replicas_R.tolist() == [2] * ranks
    counts = np.bincount(plan.instance_expert_J, minlength=experts)
    assert counts.max() == 2
    assert counts.sum() == experts + 2 * ranks


def test_an_even_spread_halves_every_source_and_keep_local_keeps_what_is_at_home(wire: ModuleType) -> None:
    spread, keep = (plan_of(wire, name, 8, 128) for name in ("spread", "keep_local"))
    for j in np.flatnonzero(spread.foreign_J):
        expert, host = spread.instance_expert_J[j], spread.instance_rank_J[j]
        halves = spread.counts_RE[:, expert] / 2
        assert (np.abs(spread.assign_RJ[:, j] - halves) <= 0.5).all()
        assert keep.assign_RJ[host, j] == keep.counts_RE[host, expert], "a copy's rank sends its pairs away"
        others = np.delete(keep.assign_RJ[:, j], [host, keep.topology.home_E[expert]])
        assert (others > 0).any()


@pytest.mark.long
def test_a_small_run_prints_every_figure_with_lean_bytes_below_those_of_one_row_per_pair(
    wire: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = {name: fields for name, fields in wire.layouts().items() if name in ("", "token_choice.")}
    monkeypatch.setattr(wire, "layouts", lambda: layouts)
    sizes = "--ranks 2 --experts 8 --top-k 4 --hidden 256 --width 8 --tokens 40"
    assert wire.main(["--json", *sizes.split()]) == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == [
        "wire.E8.bytes_over_row_per_pair",
        "wire.E8.token_choice.bytes_over_row_per_pair",
    ]
    for row in rows:
        sent = row["context"]["bytes_per_token"]
        assert sent["lean"]["replicas"] == sent["row_per_pair"]["replicas"]
        assert row["value"] < 0.6, "4 of 8 experts on 2 ranks: about 1 row a token for 2 pairs"
    at_home = rows[0]["context"]["bytes_per_token"]["row_per_pair"]["forward"]
    assert at_home == pytest.approx(2 * 2 * 512, rel=0.15), "two pairs a token cross, there and back, in bf16"
    assert rows[0]["context"]["bytes_per_token"]["lean"]["replicas"] == 0
    assert rows[1]["context"]["bytes_per_token"]["lean"]["replicas"] > 0


def test_names_follow_the_layout(wire: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {
        "lean": wire.Sent(forward=10, backward=30, replicas=5),
        "row_per_pair": wire.Sent(forward=40, backward=40, replicas=5),
    }
    monkeypatch.setattr(wire, "both_wires", lambda *_: sent)
    rows = [wire.bench(wire.Case(), name, fields, 0) for name, fields in wire.layouts().items()]
    assert {row["name"]: row["value"] for row in rows} == {
        "wire.E128.bytes_over_row_per_pair": 0.5,
        "wire.E128.token_choice.bytes_over_row_per_pair": 0.5,
        "wire.E128.token_choice.local_first.bytes_over_row_per_pair": 0.5,
        "wire.E128.drop0.5.backward_bytes_over_row_per_pair": 0.75,
    }
