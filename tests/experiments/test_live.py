"""Progress: plain lines without a terminal, a table that stays in place on one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lrmoe.config import LRMoEConfig
from lrmoe.experiments import live
from lrmoe.experiments.cost import step_cost
from lrmoe.experiments.lane import Lane
from lrmoe.experiments.live import Progress
from lrmoe.experiments.systems import get_system
from tests.experiments.records import record


def lanes() -> list[Lane]:
    return [
        Lane(get_system(name), LRMoEConfig(), target_loss=2.0, smoothing_steps=1, max_steps=9)
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
        Lane(get_system(name), LRMoEConfig(max_drop=0), target_loss=None, smoothing_steps=1, max_steps=1)
        for name in ("megatron", "ultraep", "symi", "lrmoe")
    ]
    console = Console(file=out, width=100)
    with Progress(racing, target_loss=None, max_steps=1, every=1, console=console) as progress:
        for lane in racing:
            lane.add(4.0, 1, step_cost([[record(ms={"experts": 500.0}, sent={})]]))
        progress.update(1, None)
    assert out.getvalue().count("done in 1 steps\n") == 4
