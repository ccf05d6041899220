"""Every policy runs for real: exact on either wire, with a stash, without, in parts; same weights in all layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.config import POLICIES
from lrmoe.planning import LayerPlan, Problem, get_policy, policy_info
from lrmoe.planning.policies import FasterMoE, FlexMoE, SmartMoE
from tests.distributed.calls import even
from tests.distributed.plans import InParts, unpriced
from tests.distributed.pool import Pool
from tests.distributed.truth import Truth, mine
from tests.layer.harness import build, exact, local_experts, run
from tests.reference import Case, assert_result, make_case, plain_loop

pytestmark = pytest.mark.distributed

SEEDS = (8, 1, 1)  # of the calls
MODES: dict[str, dict[str, Any]] = {
    "stash": {},
    "recompute": {"recompute": True},
    "parts": {"forward": 2, "backward": 3},
}
MANY_RANKS = ("parts",)  # eight processes on two cores take their time
EAGER: dict[str, Callable[[Problem], LayerPlan]] = {  # options with which these move experts at this size
    "fastermoe": FasterMoE(rule="code", hidden=8, width=6, flops=1e9, bandwidth=1e9),
    "flexmoe": FlexMoE(interval=2, threshold=1.0, sync_seconds=1e-9),
    "smartmoe": SmartMoE(interval=2),
    "lrmoe": unpriced,
}


def skewed(number: int) -> Case:
    """The batch of a call: hot experts that change."""
    return make_case(tokens=40, experts=16, top_k=4, hidden=8, width=6, seed=SEEDS[number], skew=3.0)


def policy_of(name: str) -> Callable[[Problem], LayerPlan]:
    return EAGER.get(name) or get_policy(name)


def calls_of(name: str) -> int:
    """History policies start from fixed ownership and move in later calls; the others move at once."""
    return len(SEEDS) if policy_info(name).inputs in ("history", "both") else 1


def every_policy(lean: bool) -> dict[str, int]:
    """Worker: every policy in every mode; returns the most foreign experts that a call of each policy had."""
    group, ranks, moved = dist.group.WORLD, dist.get_world_size(), dict.fromkeys(POLICIES, 0)
    truths = [Truth.of(skewed(number)) for number in range(len(SEEDS))]
    for name in POLICIES:
        for mode in MODES if ranks < 8 else MANY_RANKS:
            config = exact(policy=name, lean_wire=lean)
            policy = InParts(policy=policy_of(name), **MODES[mode])
            layer = build(truths[0].case, config, group=group, policy=policy)
            for number, truth in enumerate(truths[: calls_of(name)]):
                sizes = even(truth.case, ranks)
                found = run(mine(truth.case, sizes), config, group=group, layer=layer)
                truth.check(found.result, sizes, f"{name}, {mode}, lean wire {lean}, call {number}")
                moved[name] = max(moved[name], sum(found.record.replicas_R))
    return moved


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_policy_is_exact_in_every_mode(request: pytest.FixtureRequest, ranks: int, lean: bool) -> None:
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    for moved in pool.run(every_policy, lean, limit_s=90):
        still = [name for name, copies in moved.items() if not copies]
        assert still == ["megatron"], "the case must make every other policy move experts"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_on_one_rank(name: str, mode: str) -> None:
    config, case = exact(policy=name), skewed(0)
    layer = build(case, config, policy=InParts(policy=policy_of(name), **MODES[mode]))
    for _ in range(2):
        assert_result(run(case, config, layer=layer).result, case)


def with_default_options(name: str, calls: int) -> list[int]:
    """Worker: the same batch again and again; returns the foreign experts of each call."""
    truth, config = Truth.of(skewed(0)), exact(policy=name)
    layer = build(truth.case, config, group=dist.group.WORLD)
    sizes, moved = even(truth.case, dist.get_world_size()), []
    for number in range(calls):
        found = run(mine(truth.case, sizes), config, group=dist.group.WORLD, layer=layer)
        truth.check(found.result, sizes, f"{name}, call {number}")
        moved.append(sum(found.record.replicas_R))
    return moved


def test_smartmoe_moves_after_its_ten_calls(pool4: Pool) -> None:
    moved = pool4.run(with_default_options, "smartmoe", 12)[0]
    assert moved[:10] == [0] * 10
    assert min(moved[10:]) > 0


STEPS = 3
State = dict[str, Tensor]


def train(name: str, group: Any) -> State:
    """Three AdamW steps of one layer; this rank's weights and optimizer state after them."""
    case = skewed(0)
    block = local_experts(case, group)
    weights = {"d_gate_up": case.gate_up[block], "d_down": case.down[block]}
    weights = {key: value.clone().requires_grad_() for key, value in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, weight_decay=0.1)
    ranks = 1 if group is None else dist.get_world_size(group)
    layer = build(case, exact(policy=name), group=group, policy=policy_of(name))
    for step in range(STEPS):
        batch = skewed(step)
        part = batch if group is None else mine(batch, even(batch, ranks))
        for begin, end in ((0, 4), (4, part.hidden.shape[0])):  # two micro-batches of different size
            some = part.tokens(begin, end)
            out = layer(some.hidden, some.ids, some.weights, *weights.values(), training=True)
            out.backward(some.grad_out)
        optimizer.step()
        optimizer.zero_grad()
        layer.clock.advance()
    state = [optimizer.state[weight] for weight in weights.values()]
    found = {key: weight.detach() for key, weight in weights.items()}
    return found | {
        f"{i} {key}": one[key] for i, one in enumerate(state) for key in ("exp_avg", "exp_avg_sq")
    }


def train_all() -> dict[str, State]:
    """Worker: train under every policy, with many ranks under a few."""
    names = POLICIES if dist.get_world_size() < 8 else ("lrmoe", "laer", "symi", "llep")
    return {name: train(name, dist.group.WORLD) for name in names}


def plain_training() -> State:
    """The same with the plain loop."""
    case = skewed(0)
    weights = {"gate_up": case.gate_up.clone(), "down": case.down.clone()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        now = dataclasses.replace(skewed(step), gate_up=weights["gate_up"], down=weights["down"])
        found = plain_loop(now, needs=["d_gate_up", "d_down"])
        weights["gate_up"].grad, weights["down"].grad = found.d_gate_up, found.d_down
        optimizer.step()
    state = [optimizer.state[weight] for weight in weights.values()]
    found_all = {f"d_{key}": weight for key, weight in weights.items()}
    return found_all | {
        f"{i} {key}": one[key] for i, one in enumerate(state) for key in ("exp_avg", "exp_avg_sq")
    }


def assert_same_state(found: State, wanted: State, what: str) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        error = (found[key] - value).abs()
        limit = 1e-10 * value.abs() + 1e-13 * float(value.abs().max())
        assert bool((error <= limit).all()), f"{what}: {key} differs by {float(error.max()):.2e}"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_weights_and_optimizer_state_after_three_steps(request: pytest.FixtureRequest, ranks: int) -> None:
    wanted = plain_training()
    if ranks == 1:
        for name in POLICIES:
            assert_same_state(train(name, None), wanted, name)
        return
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    found = pool.run(train_all, limit_s=60)
    for name in found[0]:
        merged = {key: torch.cat([one[name][key] for one in found]) for key in wanted}
        assert_same_state(merged, wanted, f"{name}, {ranks} ranks")
