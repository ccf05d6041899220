"""The benchmark over a limited link: its figures, its link, and what it says where it cannot run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks import link_wall

from tests.experiments.staged import call


def test_figures_are_mean_wall_times_and_their_ratios() -> None:
    walls = {"symi": (180.0, 220.0), "ultraep": (160.0, 160.0), "lrmoe": (120.0, 140.0)}
    calls = [call(system=name, wall_ms=ms) for name, both in walls.items() for ms in both]
    calls.append(call(system=link_wall.BALANCED, wall_ms=90.0, cpu_ms=120.0))
    found = {line["name"]: line for line in link_wall.figures(calls, 1e8, seed=0)}
    assert found["link_wall.lrmoe.wall_over_symi"]["value"] == pytest.approx(0.65)
    assert found["link_wall.symi.wall_over_ultraep"]["value"] == pytest.approx(1.25)
    assert found["link_wall.lrmoe.wall_ms"]["value"] == pytest.approx(130)
    assert "link_wall.symi.wall_over_symi" not in found
    assert not any(".megatron." in name for name in found), "it did not run"
    context = found["link_wall.lrmoe.wall_ms"]["context"]
    assert context["exchange_share_of_balanced_call"] == pytest.approx(1 - 60 / 90, abs=1e-4)
    assert context["calls"] == 2


def test_only_finished_trajectories_take_part(tmp_path: Path) -> None:
    for name in ("exact", "lrmoe"):
        folder = tmp_path / "trajectories" / f"m-aux0-seed0-{name}"
        folder.mkdir(parents=True)
        if name == "exact":
            (folder / "DONE").write_text("")
    block = link_wall.block_of(tmp_path, "m", 0, 50)
    assert list(block.folders) == ["megatron", "symi", "ultraep"]
    assert all(path.is_absolute() for path in block.folders.values())


def test_a_run_without_trajectories_is_bad_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link_wall, "why_not", lambda _: None)
    assert link_wall.main(["--run", str(tmp_path)]) == 2
    assert "make headline" in capsys.readouterr().err


def test_where_hosts_cannot_be_made_it_says_why_and_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link_wall, "why_not", lambda _: "needs root")
    assert link_wall.main(["--json"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "skipped, it needs root" in err


def test_the_rate_of_the_link_is_set_on_both_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command))
    hosts = [SimpleNamespace(command=lambda *c, n=n: [str(n), *c]) for n in (0, 1)]
    link_wall.limit(hosts, 1e6)  # type: ignore[arg-type]  # stand-ins
    assert [command[0] for command in ran] == ["0", "1"]
    assert all("8000000bit" in command for command in ran)
