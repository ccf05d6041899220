"""A fault on one rank is an error on every rank, within the time limit, and the group can go on afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.errors import ConfigError, InputError, LRMoEError, PlanError, RankError
from lrmoe.layer import MoELayer
from tests.distributed.calls import merge
from tests.distributed.pool import Outcome, Pool
from tests.layer.harness import build, exact, forward, leaves, pruning, run
from tests.reference import GRADS, Case, assert_result, make_case

pytestmark = pytest.mark.distributed
CASE = make_case(tokens=8, experts=4, top_k=2, hidden=8, width=6)

BAD: dict[str, Callable[[Case], dict[str, Any]]] = {
    "wrong hidden size": lambda c: {"hidden": torch.randn(8, 9, dtype=torch.float64)},
    "integer hidden": lambda c: {"hidden": torch.ones(8, 8, dtype=torch.int64)},
    "float ids": lambda c: {"ids": c.ids.double()},
    "ids on another device": lambda c: {"ids": c.ids.to("meta")},
    "weights on another device": lambda c: {"weights": c.weights.to("meta")},
    "ids of fewer tokens": lambda c: {"ids": c.ids[:3]},
    "weights of fewer slots": lambda c: {"weights": c.weights[:, :1]},
    "transposed down": lambda c: {"down": c.down.transpose(1, 2)},
}


def healthy(group: Any) -> bool:
    """The group still works, and in step: a collective and an exact call give the right answer."""
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    run(CASE, exact(), group=group)
    return int(total) == dist.get_world_size(group)


def one_rank_is_bad(name: str, bad_rank: int, training: bool) -> tuple[str, str, bool]:
    """Worker: what was raised here (type, text), and whether the group works afterwards."""
    case = CASE
    if dist.get_rank() == bad_rank:
        case = dataclasses.replace(CASE, **BAD[name](CASE))
    group = dist.group.WORLD
    layer, leaf = build(CASE, exact(), group=group), leaves(case, ["d_gate_up"], group)
    try:
        forward(layer, case, leaf, training=training)
    except LRMoEError as error:
        return type(error).__name__, str(error), healthy(group)
    return "nothing", "", healthy(group)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_on_one_rank_raises_on_every_rank(
    pool2: Pool, name: str, bad_rank: int, training: bool
) -> None:
    found = pool2.run(one_rank_is_bad, name, bad_rank, training, limit_s=20)
    assert found[bad_rank][0] == InputError.__name__
    assert "must" in found[bad_rank][1]
    kind, text, works = found[1 - bad_rank]
    assert kind == RankError.__name__
    assert f"rank {bad_rank} was given bad input" in text
    assert works
    assert found[bad_rank][2]


def test_bad_input_on_every_rank(pool4: Pool) -> None:
    found = pool4.run(one_rank_is_bad_everywhere, limit_s=20)
    assert [kind for kind, _, _ in found] == [InputError.__name__] * 4


def one_rank_is_bad_everywhere() -> tuple[str, str, bool]:
    return one_rank_is_bad("float ids", dist.get_rank(), True)


def disagree(what: str) -> tuple[str, str]:
    """Worker: the ranks call the same layer in ways that do not fit together."""
    rank, group = dist.get_rank(), dist.group.WORLD
    case = CASE.to(torch.float32) if what == "autocast" or (what == "dtype" and rank) else CASE
    config = pruning()
    if rank and what.startswith("config "):
        name, value = what.removeprefix("config ").split("=")
        config = config.replace(**{name: type(getattr(config, name))(value)})
    layer = build(case, config, group=group)
    if what == "step" and rank:
        layer.clock.advance()
    needs = GRADS[1:] if what == "gradients" and rank else GRADS
    if (
        what == "micro-batch" and rank
    ):  # an extra call in evaluation must not count, so this is no disagreement
        layer.controller.next_moment()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast" and rank == 1):
            out = forward(layer, case, leaves(case, needs, group), training=not (what == "training" and rank))
        out.backward(case.grad_out)
    except LRMoEError as error:
        dist.barrier()
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("dtype", "dtype"),
        ("autocast", "dtype"),
        ("config max_drop=0.2", "configuration"),
        ("config seed=1", "configuration"),
        ("config estimator=topk", "configuration"),
        ("config score=alpha", "configuration"),
        ("step", "step"),
        ("gradients", "gradient"),
        ("training", "training"),
        ("micro-batch", "calls"),
    ],
)
def test_ranks_that_disagree_are_told_so(pool2: Pool, what: str, word: str) -> None:
    for kind, text in pool2.run(disagree, what, limit_s=20):
        assert kind == RankError.__name__
        assert word in text


def wider_rows_on_one_rank() -> Any:
    """Worker: the same weights everywhere; one rank's input is wider, which the layer casts: no disagreement."""
    case = CASE.to(torch.bfloat16)
    if dist.get_rank():
        case = dataclasses.replace(case, hidden=case.hidden.float(), grad_out=case.grad_out.float())
    return run(case, exact(), group=dist.group.WORLD).result.out.float()


def test_rows_of_another_dtype_on_one_rank_are_cast(pool2: Pool) -> None:
    ours, theirs = pool2.run(wider_rows_on_one_rank)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def build_with(num_experts: int) -> str:
    try:
        MoELayer(
            num_experts=num_experts,
            hidden_size=8,
            intermediate_size=6,
            config=exact(),
            group=dist.group.WORLD,
        )
    except (ConfigError, PlanError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("num_experts", [1, 3, 5])
def test_experts_that_do_not_divide_are_refused_early(pool2: Pool, num_experts: int) -> None:
    for text in pool2.run(build_with, num_experts):
        assert f"experts={num_experts}" in text
        assert "ranks=2" in text


def later_call_after_fault() -> Any:
    """Worker: rank 1 faults once; the same layer then gives exact results on both ranks."""
    group = dist.group.WORLD
    layer = build(CASE, exact(), group=group)
    bad = dataclasses.replace(CASE, ids=CASE.ids.double()) if dist.get_rank() else CASE
    with contextlib.suppress(LRMoEError):
        forward(layer, bad, leaves(CASE, GRADS, group))
    return run(CASE, exact(), layer=layer, group=group).result


def test_the_layer_goes_on_after_a_fault(pool2: Pool) -> None:
    ranks = pool2.run(later_call_after_fault)
    doubled: dict[str, Any] = {
        f: torch.cat([getattr(CASE, f)] * 2) for f in ("hidden", "ids", "weights", "grad_out")
    }
    assert_result(merge(ranks), dataclasses.replace(CASE, **doubled))


def only_first_evaluates() -> str:
    """Worker: rank 0 evaluates, rank 1 trains: the calls meet each other and the ranks are told."""
    group = dist.group.WORLD
    layer = build(CASE, exact(), group=group)
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                forward(layer, CASE, leaves(CASE, [], group), training=False)
        else:
            forward(layer, CASE, leaves(CASE, GRADS, group))
    except RankError as error:
        return str(error)
    return ""


def test_evaluation_on_one_rank_only_meets_the_others_training_call(pool2: Pool) -> None:
    outcomes: list[Outcome] = pool2.outcomes(only_first_evaluates, limit_s=20)
    assert all("training" in str(one.value) for one in outcomes)


SIZES: dict[str, dict[str, Any]] = {
    "the number of experts": {"num_experts": 8},
    "the expert width": {"intermediate_size": 7},
    "the activation": {"activation": "gelu"},
    "the layer's index": {"layer": 1},
}


def call_other_layer(change: dict[str, Any]) -> str:
    """Worker: rank 1 built another layer; the first call tells both."""
    group = dist.group.WORLD
    sizes: dict[str, Any] = {
        "num_experts": 4,
        "hidden_size": 8,
        "intermediate_size": 6,
        "activation": "silu",
        "layer": 0,
    }
    sizes |= change if dist.get_rank() else {}
    layer = MoELayer(config=exact(), group=group, **sizes)
    local, width = sizes["num_experts"] // 2, sizes["intermediate_size"]
    ids, alpha = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    try:
        layer(
            torch.randn(3, 8), ids, alpha, torch.randn(local, 2 * width, 8), torch.randn(local, 8, width),
            training=True,
        )  # fmt: skip
    except RankError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", SIZES)
def test_ranks_that_built_different_layers_are_told(pool2: Pool, what: str) -> None:
    for text in pool2.run(call_other_layer, SIZES[what]):
        assert what in text
        assert "rank 1" in text
