"""The fuzz benchmark: a hundred of its calls, some over two ranks, and that it sees what it looks for."""

from __future__ import annotations

import dataclasses
import json
import pickle
import time
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from lrmoe.layer import backward, experts
from lrmoe.layer.pruning import select_pairs
from tests import benchmark
from tests.distributed.pool import Pool
from tests.forked import forked_workers


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    return benchmark.load("fuzz")


def test_a_hundred_calls_end_in_the_right_answer_or_a_documented_error(
    fuzz: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with forked_workers():
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

    def too_heavy(*args: Any) -> Tensor | None:
        weight = select_pairs(*args)
        return None if weight is None else weight * 1.1

    monkeypatch.setattr(backward, "select_pairs", too_heavy)
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


@pytest.fixture
def ranks(fuzz: ModuleType) -> ModuleType:
    return benchmark.load("fuzz_ranks")


def spread(fuzz: ModuleType, **changes: Any) -> Any:
    """A call over two ranks that prunes, the second rank with most tokens."""
    config = {"max_drop": 0.5, "warmup_steps": 0, **changes.pop("config", {})}
    call = fuzz.FuzzCall(tokens=17, experts=4, top_k=2, hidden=5, width=4, config=tuple(config.items()))
    return benchmark.load("fuzz_calls").RanksCall(call=call, sizes=(3, 14), **changes)


def answers(pool: Pool, drawn: Any) -> list[Any]:
    return pool.run(answer_on_a_rank, pickle.dumps(drawn), limit_s=60)


def answer_on_a_rank(drawn: bytes) -> Any:
    """Worker: one that started before the benchmarks were found knows their classes only once it looks there, too."""
    ranks = benchmark.load("fuzz_ranks")
    return ranks.answer(pickle.loads(drawn), dist.get_rank(), dist.group.WORLD)


@pytest.mark.distributed
@pytest.mark.parametrize("storage", ["owned", "sharded"])
def test_ranks_that_get_the_right_answer_together_pass_and_others_do_not(
    fuzz: ModuleType, ranks: ModuleType, pool2: Pool, storage: str
) -> None:
    drawn = spread(fuzz, config={"storage": storage})
    found = answers(pool2, drawn)
    ranks.judge_ranks(drawn, found)
    found[1].outcomes[0].grads["d_down"].mul_(1 + 1e-4)
    with pytest.raises(fuzz.WrongError, match=r"^d_down"):
        ranks.judge_ranks(drawn, found)


@pytest.mark.distributed
def test_what_is_wrong_on_one_rank_has_to_be_an_error_on_all(
    fuzz: ModuleType, ranks: ModuleType, pool2: Pool
) -> None:
    fault = "hidden_states: another width"
    drawn = spread(fuzz, odd=1)
    drawn = dataclasses.replace(drawn, call=dataclasses.replace(drawn.call, fault=fault))
    found = answers(pool2, drawn)
    ranks.judge_ranks(drawn, found)
    assert found[0].outcomes, "the layer goes on after it"
    accepted = [dataclasses.replace(found[0], spoiled=None), found[1]]
    with pytest.raises(fuzz.WrongError, match="accepted by rank 0"):
        ranks.judge_ranks(drawn, accepted)
    for differs in ("configuration", "mode"):
        drawn = spread(fuzz, differs=differs)
        found = answers(pool2, drawn)
        ranks.judge_ranks(drawn, found)
        with pytest.raises(fuzz.WrongError, match="rank 1 does not say"):
            ranks.judge_ranks(drawn, [found[0], dataclasses.replace(found[1], error=None)])


@pytest.mark.distributed
def test_a_rank_that_waits_in_vain_has_failed(fuzz: ModuleType, ranks: ModuleType, pool2: Pool) -> None:
    drawn = spread(fuzz)
    first, second = answers(pool2, drawn)
    with pytest.raises(fuzz.HangError, match=r"ranks \[1\] took more than"):
        ranks.judge_ranks(drawn, [first, dataclasses.replace(second, slow=True)])
