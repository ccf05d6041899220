"""U05: ranks call the layer a different number of times: an error that names the call on every rank, never a hang."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist

from lrmoe.errors import RankError
from lrmoe.layer import MoELayer
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, forward, leaves
from tests.reference import GRADS, make_case

pytestmark = pytest.mark.distributed
CASE = make_case(tokens=8, experts=4, top_k=2, hidden=8, width=6)
LIMIT_S = 2
ADVICE = "every rank must make the same calls, in evaluation and generation too"


def call(layer: MoELayer, *, training: bool = True, tokens: int = 8) -> None:
    """A call of the layer, and its backward in training."""
    case = CASE.tokens(0, tokens)
    with torch.set_grad_enabled(training):
        out = forward(layer, case, leaves(case, GRADS, layer.comm.group), training=training)
    if training:
        out.backward(case.grad_out)


def behind(ahead: str, meanwhile: str) -> tuple[str, float]:
    """Worker: after two training calls of both ranks rank 0 makes one more call, rank 1 does something else."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=LIMIT_S))
    layer = build(CASE, exact(), group=group)
    other = build(CASE, exact(), group=group, layer=1)
    for one in (layer, other):
        call(one)
        call(one)
    begin = time.monotonic()
    try:
        if dist.get_rank() == 0:
            call(layer, training=ahead == "training")
        elif meanwhile == "sums gradients":
            # Rank 0's time is to be up first: the end of this rank's closes its connections.
            time.sleep(LIMIT_S / 2)
            dist.all_reduce(torch.zeros(5), group=group)
        elif meanwhile == "ends":
            os._exit(0)
        elif meanwhile == "goes on":
            layer.clock.advance()
            call(layer)
        elif meanwhile == "evaluates":
            call(layer, training=False)
        elif meanwhile == "calls another layer":
            call(other)
        elif meanwhile == "joins without tokens":
            call(layer, training=ahead == "training", tokens=0)
    except (RankError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", time.monotonic() - begin


@pytest.mark.parametrize("ahead", ["training", "evaluation"])
@pytest.mark.parametrize(
    ("meanwhile", "said"),
    [("sums gradients", "some rank did not come in time"), ("ends", "some rank was lost")],
)
def test_a_rank_that_makes_no_more_calls(pool: Pool, ahead: str, meanwhile: str, said: str) -> None:
    text, took = pool.outcomes(behind, ahead, meanwhile)[0].value
    which = "training call 3 of step 0" if ahead == "training" else "a call in evaluation mode"
    where = f"RankError: MoE layer 0: waiting for all ranks at {which} (the layer's call 3 on rank 0)"
    assert text.startswith(f"{where}: {said}")
    assert took < LIMIT_S + 5


@pytest.mark.parametrize(
    ("ahead", "meanwhile", "said"),
    [
        (
            "training",
            "goes on",
            ["training call 3 of step 0 of layer 0", "training call 1 of step 1 of layer 0"],
        ),
        (
            "training",
            "evaluates",
            ["training call 3 of step 0 of layer 0", "a call in evaluation mode of layer 0"],
        ),
        (
            "evaluation",
            "goes on",
            ["a call in evaluation mode of layer 0", "training call 1 of step 1 of layer 0"],
        ),
        (
            "training",
            "calls another layer",
            ["training call 3 of step 0 of layer 0", "call 3 of step 0 of layer 1"],
        ),
    ],
)
def test_calls_that_meet_but_are_not_the_same(
    pool: Pool, ahead: str, meanwhile: str, said: list[str]
) -> None:
    for text, took in pool.run(behind, ahead, meanwhile):
        assert text.startswith("RankError: MoE layer ")
        assert "differs between ranks" in text
        assert f"rank 0 makes {said[0]}, rank 1 makes " in text
        assert f"{said[1]}: {ADVICE}" in text
        assert took < LIMIT_S, "no time limit was needed"


@pytest.mark.parametrize("ahead", ["training", "evaluation"])
def test_a_rank_with_nothing_left_joins_without_tokens(pool: Pool, ahead: str) -> None:
    assert [text for text, _ in pool.run(behind, ahead, "joins without tokens")] == ["nothing"] * 2
