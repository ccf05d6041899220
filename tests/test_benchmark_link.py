"""The benchmark of layer calls over a limited link: its rate, its figures, and what it says where it cannot run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests import benchmark


@pytest.fixture(scope="module")
def link() -> ModuleType:
    return benchmark.load("link")


def timed(link: ModuleType, lane: str, wall_ms: float, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "draw": 0, "round": 1, "cpu_ms": 100.0, "sent_bytes": 1_000_000, "forward_peak": 1.2, "backward_peak": 1.0,
        "replicas": 1, "chunks": 1, "stash_bytes": 7, "peak_bytes": 9,
    }  # fmt: skip
    return link.Timed(lane=lane, wall_ms=wall_ms, **{**values, **changes})


def test_figures_are_medians_of_ratios_of_the_same_routing_and_round(link: ModuleType) -> None:
    walls = {
        "megatron": [100.0, 200.0, 400.0],
        "ultraep": [90.0, 190.0, 380.0],
        "drop0.2": [80.0, 180.0, 300.0],
        "drop0.5": [50.0, 150.0, 200.0],
        "drop0.2.in_turn": [100.0, 200.0, 300.0],
        "drop0.5.in_turn": [100.0, 200.0, 300.0],
    }
    calls = [
        timed(link, lane, ms, draw=draw) for lane, values in walls.items() for draw, ms in enumerate(values)
    ]
    found = {row["name"]: row for row in link.figures(calls, {"seed": 0})}
    assert {name: row["value"] for name, row in found.items()} == {
        "link.ultraep.wall_over_fixed": 0.95,
        "link.drop0.2.wall_over_fixed": 0.8,
        "link.drop0.2.wall_over_ultraep": 0.8889,
        "link.drop0.5.wall_over_fixed": 0.5,
        "link.drop0.5.wall_over_ultraep": 0.5556,
        "link.drop0.2.wall_over_in_turn": 0.9,
        "link.drop0.5.wall_over_in_turn": 0.6667,
    }
    context = found["link.drop0.5.wall_over_fixed"]["context"]
    assert context["calls"] == 3
    assert context["spread"] == pytest.approx(0.125 / 0.5)
    assert context["lanes"]["drop0.5"]["wall_ms"] == 150
    assert context["lanes"]["megatron"]["stash_bytes"] == 7


def test_the_first_rate_carries_what_is_sent_in_half_the_time_of_compute(link: ModuleType) -> None:
    calls = [timed(link, "balanced", 120.0), timed(link, "balanced", 120.0)]
    assert link.first_rate(calls) == pytest.approx(1_000_000 / 0.05)
    assert link.exchange_share(calls) == pytest.approx(1 / 6)


def test_rates_go_towards_a_third_in_bounded_steps(link: ModuleType) -> None:
    assert link.next_rate(100.0, 1 / 3) == pytest.approx(100)
    assert link.next_rate(100.0, 1 / 2) == pytest.approx(200), (
        "exchange took as long as compute, not half as long"
    )
    assert link.next_rate(100.0, 1 / 4) == pytest.approx(200 / 3)
    assert link.next_rate(100.0, 0.95) == 300
    assert link.next_rate(100.0, -0.2) == pytest.approx(100 / 3)


def test_the_nearest_rate_that_was_tried_stays(
    link: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shares, limits = iter([0.6, 0.45, 0.5, 0.2, 0.39]), []
    monkeypatch.setattr(link, "run", lambda *_: [timed(link, "balanced", 120.0)])
    monkeypatch.setattr(link, "exchange_share", lambda _: next(shares))
    monkeypatch.setattr(link, "limit", lambda _, rate: limits.append(rate))
    what = link.Work(case=link.Case(), lanes=(), draws=(0, 1), rounds=3, budget=None)
    rate, share = link.find_rate((), tmp_path, what)
    assert share == 0.39
    assert (limits[-1], len(limits)) == (rate, link.TRIES + 1)


def test_where_hosts_cannot_be_made_it_says_why_and_prints_nothing(
    link: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link, "why_not", lambda: "needs root")
    assert link.main(["--json"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "skipped, it needs root" in err


def test_the_rate_of_the_link_is_set_on_both_hosts(link: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command))
    hosts = [SimpleNamespace(command=lambda *c, n=n: [str(n), *c]) for n in (0, 1)]
    link.limit(hosts, 1e6)
    assert [command[0] for command in ran] == ["0", "1"]
    assert all("8000000bit" in command for command in ran)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_every_system_runs_over_the_link(link: ModuleType) -> None:
    reason = link.why_not()
    if reason is not None:
        pytest.skip(reason)
    small = ["--rounds", "1", "--draws", "1", "--tokens", "64", "--rate", "1e8", "--budget", "64MiB"]
    ran = benchmark.run("link", *small, limit_s=280)
    assert ran.code == 0, ran.said
    assert len(ran.figures) == 7
    lanes = next(iter(ran.figures.values()))["context"]["lanes"]
    assert lanes["drop0.5"]["backward_peak"] < lanes["drop0.2"]["backward_peak"] < 0.9
    assert lanes["ultraep"]["replicas"] == 1
    assert lanes["megatron"]["replicas"] == 0
    assert lanes["megatron"]["sent_bytes"] < lanes["ultraep"]["sent_bytes"], "a copy's weights travel"
