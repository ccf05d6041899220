"""Progress: plain lines without a terminal, a table that stays in place on one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lrmoe.config import LRMoEConfig
from lrmoe.experiments.compare import live
from lrmoe.experiments.compare.cost import step_cost
from lrmoe.experiments.compare.lane import Lane
from lrmoe.experiments.compare.live import Place, Progress
from lrmoe.experiments.systems.registry import get_system
from tests.experiments.records import record


def lanes() -> list[Lane]:
    return [
        Lane(get_system(name), LRMoEConfig(), targets=[2.0], smoothing_steps=1, max_steps=9)
        for name in ("megatron", "lrmoe")
    ]


def shown(*, terminal: bool, losses: list[float]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    racing = lanes()
    with Progress(racing, target_loss=2.0, max_steps=9, every=2, console=console) as progress:
        for step, loss in enumerate(losses, 1):
            for lane in racing:
                lane.add(loss, 1, step_cost([[record(ms={"experts": 500.0}, sent={"return": 100})]]))
            progress.update(step, 1000.0)
    return out.getvalue()


def test_plain_lines_come_every_few_steps_and_at_the_end() -> None:
    text = shown(terminal=False, losses=[5.0, 4.0, 1.5])
    assert "\x1b" not in text
    first, last = text.splitlines()
    assert "step 2, 0 s: megatron loss 4.000, kept 70%, MoE 1.20 s; lrmoe loss 4.000" in first
    assert last.count("reached in 3 steps") == 2


def test_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REFRESH_S", 0.0)
    text = shown(terminal=True, losses=[5.0, 1.5])
    assert "to loss 2, at most 9 steps" in text
    assert "2 reached" in text
    assert "1.20 s" in text, "critical path: 2 x (0.5 s + 100 B over 1000 B/s)"


def test_nothing_to_say_before_the_first_step() -> None:
    out = io.StringIO()
    with Progress(
        lanes(), target_loss=2.0, max_steps=9, every=1, console=Console(file=out, width=100)
    ) as progress:
        progress.update(1, None)
    assert "megatron loss -, kept -, MoE -; lrmoe" in out.getvalue()


def test_without_a_target_and_with_many_systems_every_one_has_its_line() -> None:
    out = io.StringIO()
    racing = [
        Lane(get_system(name), LRMoEConfig(max_drop=0), smoothing_steps=1, max_steps=1)
        for name in ("megatron", "ultraep", "symi", "lrmoe")
    ]
    console = Console(file=out, width=100)
    with Progress(racing, target_loss=None, max_steps=1, every=1, console=console) as progress:
        for lane in racing:
            lane.add(4.0, 1, step_cost([[record(ms={"experts": 500.0}, sent={})]]))
        progress.update(1, None)
    assert out.getvalue().count("done in 1 steps\n") == 4


def test_one_of_several_says_its_number_and_the_time_that_all_of_them_need() -> None:
    out = io.StringIO()
    place = Place(number=2, of=4, name="qwen-seed1", left=2, took_s=(100.0, 140.0))
    console = Console(file=out, width=200)
    with Progress(lanes(), target_loss=2.0, max_steps=9, every=1, console=console, place=place) as progress:
        progress.update(1, None)
    assert out.getvalue().startswith("[2/4 qwen-seed1] step 1, 0 s, about 6 min left: megatron")


def test_its_table_leaves_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REFRESH_S", 0.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    place = Place(number=1, of=4, name="qwen-seed0", left=3)
    with Progress(lanes(), target_loss=None, max_steps=9, every=1, console=console, place=place) as progress:
        progress.update(1, None)
    assert "cell 1 of 4, qwen-seed0, at most 0 s left" in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[2K"), "the last lines are erased"


def test_time_left_without_cells_before_is_that_of_all_steps() -> None:
    place = Place(number=1, of=3, name="a", left=2)
    assert place.remaining(0, 50, 3.0) == "time left not known yet"
    assert place.remaining(10, 50, 20.0) == "at most 5 min left", "2 x 100 s, and 80 s of this one"
    done = Place(number=3, of=3, name="c", left=0, took_s=(10.0,))
    assert done.remaining(10, 50, 20.0) == "about 0 s left", "never below zero"
