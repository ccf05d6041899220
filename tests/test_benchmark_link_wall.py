"""The benchmark over a limited link: its figures, its link, and what it says where it cannot run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests import benchmark
from tests.experiments.staged import call


@pytest.fixture(scope="module")
def link_wall() -> ModuleType:
    return benchmark.load("link_wall")


def test_figures_are_mean_wall_times_and_their_ratios(link_wall: ModuleType) -> None:
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


def test_only_finished_trajectories_take_part(link_wall: ModuleType, tmp_path: Path) -> None:
    for name in ("exact", "lrmoe"):
        folder = tmp_path / "trajectories" / f"m-aux0-seed0-{name}"
        folder.mkdir(parents=True)
        if name == "exact":
            (folder / "DONE").write_text("")
    block = link_wall.block_of(tmp_path, "m", 0, 50)
    assert list(block.folders) == ["megatron", "symi", "ultraep"]
    assert all(path.is_absolute() for path in block.folders.values())


def test_a_run_without_trajectories_is_bad_usage(
    link_wall: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link_wall, "why_not", lambda: None)
    assert link_wall.main(["--run", str(tmp_path)]) == 2
    assert "make headline" in capsys.readouterr().err


def test_where_hosts_cannot_be_made_it_says_why_and_prints_nothing(
    link_wall: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link_wall, "why_not", lambda: "needs root")
    assert link_wall.main(["--json"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "skipped, it needs root" in err
