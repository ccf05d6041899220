"""The fuzz benchmark: a hundred of its calls, and that it sees what it looks for."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from lrmoe.layer import backward, experts

BENCHMARKS = str(Path(__file__).resolve().parents[1] / "benchmarks")


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    if BENCHMARKS not in sys.path:
        sys.path.append(BENCHMARKS)  # its scripts find each other there
    return importlib.import_module("fuzz")


def test_a_hundred_calls_end_in_the_right_answer_or_a_documented_error(
    fuzz: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz.main(["--json", "--calls", "100", "--seed", "6"]) == 0
    found = {row["name"]: row["value"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found == {"fuzz.calls": 100, "fuzz.failures": 0}


def test_every_fault_is_refused_by_name(fuzz: ModuleType) -> None:
    for fault in fuzz.FAULTS:
        for tokens in (0, 4):
            call = fuzz.FuzzCall(fault=fault, tokens=tokens, experts=2, top_k=2, hidden=3, width=2)
            fuzz.judge_fault(call)


def test_calls_that_matter_are_among_those_drawn(fuzz: ModuleType) -> None:
    drawn: list[Any] = []
    fuzz.Fuzz(check=drawn.append).run(400, 3, lambda _: None)
    pruned = [c for c in drawn if dict(c.config).get("max_drop", 0.3) > 0 and c.trains and not c.fault]
    assert len(drawn) == 400
    assert len(pruned) > 100
    for name in ("fault", "mask", "autocast", "one_row", "batched", "reverse"):
        assert 10 < sum(bool(getattr(c, name)) for c in drawn) < 300, name
    for name in ("tokens", "made", "entry", "dtypes", "strange", "ids", "fill", "micro_batches"):
        assert len({getattr(c, name) for c in drawn}) > 1, name
    assert sum("budget" in str(c.config) for c in drawn) > 40
    assert len({c.made for c in pruned}) >= 3


@pytest.mark.parametrize(
    ("op", "name"), [("grouped_mm", "out"), ("grouped_mm_input", "d_"), ("grouped_mm_weight", "d_")]
)
def test_a_wrong_product_is_seen(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, op: str, name: str
) -> None:
    right = getattr(experts, op)

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = right(*args, **kwargs)
        return found.mul_(1 + 1e-4)

    call = fuzz.FuzzCall(
        tokens=9, experts=3, top_k=2, hidden=5, width=4, config=(("max_drop", 0.5), ("warmup_steps", 0))
    )
    fuzz.judge(call)
    monkeypatch.setattr(experts, op, wrong)
    with pytest.raises(fuzz.WrongError, match=f"^{name}"):
        fuzz.judge(call)


def test_a_weight_that_is_not_one_over_its_chance_is_seen(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = backward.select_pairs
    monkeypatch.setattr(backward, "select_pairs", lambda *args: right(*args) * 1.1)
    with pytest.raises(fuzz.WrongError, match="inverse of its inclusion probability"):
        fuzz.judge(fuzz.FuzzCall(tokens=40, experts=2, hidden=5, width=4, config=(("warmup_steps", 0),)))


def test_the_smallest_example_is_shown_and_the_run_goes_on(
    fuzz: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(call: Any) -> None:
        if call.tokens > 5 and call.experts > 2:
            raise fuzz.WrongError("too many")

    drawn = st.builds(fuzz.FuzzCall, tokens=st.integers(0, 40), experts=st.sampled_from([1, 2, 3, 8]))
    found = fuzz.Fuzz(check=check, drawn=drawn)
    found.run(60, 0, lambda _: None)
    assert found.calls >= 60
    ((kind, example),) = found.failures.items()
    assert "WrongError" in kind
    assert "too many" in kind
    assert example.startswith("FuzzCall(tokens=6, experts=3)\n")
    monkeypatch.setattr(fuzz, "Fuzz", lambda: found)
    assert fuzz.main(["--calls", "1"]) == 1
    said = capsys.readouterr()
    assert "tokens=6, experts=3" in said.err
    assert "fuzz.failures" in said.out


def test_a_call_that_hangs_is_a_failure(fuzz: ModuleType) -> None:
    with pytest.raises(fuzz.HangError), fuzz.limited(0.1):
        time.sleep(30)
    with fuzz.limited(0.05):
        pass
    time.sleep(0.1)  # the limit is gone
