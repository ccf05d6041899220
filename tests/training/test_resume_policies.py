"""A resumed run is the uninterrupted one bit for bit, whatever its policy remembers and its layers have learned."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.config import POLICIES
from lrmoe.planning import LayerPlan, Problem, get_policy, policy_info
from lrmoe.planning.policies import EPLB, FlexMoE, SmartMoE
from lrmoe.planning.problem import History
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from tests.distributed.pool import Pool
from tests.training.test_async import everything, same
from tests.training.tiny import tiny_config

EAGER: dict[str, Callable[[Problem], LayerPlan]] = {  # options with which these act within a few steps
    "eplb": EPLB(interval=2),
    "flexmoe": FlexMoE(interval=2, threshold=1.0, sync_seconds=1e-9),
    "smartmoe": SmartMoE(interval=2),
}
HISTORY = [name for name in POLICIES if policy_info(name).inputs in ("history", "both")]
PRUNED: dict[str, dict[str, Any]] = {
    "sampled": {},
    "of own pairs": {"selection": "local"},
    "limited": {"max_added_variance": 0.1},
    "limited, of own pairs": {"max_added_variance": 0.1, "selection": "local"},
    "auto": {"drop": "auto", "max_added_variance": 0.2},
    "overload": {"drop": "overload", "peak_target": 1.0},
    "topk": {"estimator": "topk", "router_grad": "retained"},
    "chosen in forward": {"select_in": "forward", "score": "alpha"},
}
BEFORE, AFTER = 3, 2  # steps
LIMIT_S = 200  # a few seconds, on machines that do little else


class Recorded:
    """A policy, the hashes of its plans, and whether any would have been another one without a past."""

    def __init__(self, policy: Callable[[Problem], LayerPlan]) -> None:
        self.policy, self.seen, self.needs_past = policy, list[int](), False

    def __call__(self, problem: Problem) -> LayerPlan:
        plan = self.policy(problem)
        self.seen.append(plan.fingerprint())
        if problem.history is not None:
            without = self.policy(dataclasses.replace(problem, history=History()))
            self.needs_past |= without.fingerprint() != self.seen[-1]
        return plan


def trainer_of(config: TrainConfig, group: Any) -> tuple[Trainer, Recorded]:
    name = config.lrmoe.policy
    recorded = Recorded(EAGER.get(name) or get_policy(name))
    return Trainer(config, group, policy=recorded), recorded


def steps(trainer: Trainer, count: int) -> None:
    for _ in range(count):
        trainer.step()


def resumed(config: TrainConfig, ranks: int) -> str:
    """Why a resumed run is not the one that went on; empty where it is, and where its past mattered."""
    group = dist.group.WORLD if ranks > 1 else None
    through, plans = trainer_of(config, group)
    steps(through, BEFORE)
    through.save()
    plans.seen.clear()
    steps(through, AFTER)
    after, again = trainer_of(config, group)
    after.resume()
    torch.manual_seed(
        12345 + (dist.get_rank() if ranks > 1 else 0)
    )  # of no consequence: every step seeds anew
    steps(after, AFTER)
    if again.seen != plans.seen:
        return "other plans"
    if not same(everything(through), everything(after)):
        return "other weights, moments or states"
    history = config.lrmoe.policy in HISTORY and ranks > 1
    return "the past made no difference" if history and not again.needs_past else ""


def all_of(configs: dict[str, TrainConfig], ranks: int) -> dict[str, str]:
    return {name: said for name, config in configs.items() if (said := resumed(config, ranks))}


def policy_configs(folder: Path) -> dict[str, TrainConfig]:
    return {
        name: tiny_config(
            folder,
            lrmoe={"policy": name, "max_drop": 0.0, "replica_slots": 1},
            train={"name": name, "accumulate": 2},
            optim={"lr": 3e-2},
        )
        for name in POLICIES
    }


def pruned_configs(folder: Path) -> dict[str, TrainConfig]:
    base = {"max_drop": 0.4, "replica_slots": 1, "warmup_steps": 0}
    return {
        name: tiny_config(folder, lrmoe={**base, **changes}, train={"name": name, "accumulate": 2})
        for name, changes in PRUNED.items()
    }


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_every_policy_on_two_ranks(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(all_of, policy_configs(tmp_path), 2, limit_s=LIMIT_S) == [{}, {}]


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_what_pruning_has_learned_on_two_ranks(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(all_of, pruned_configs(tmp_path), 2, limit_s=LIMIT_S) == [{}, {}]


def test_what_pruning_has_learned_alone(tmp_path: Path) -> None:
    configs = pruned_configs(tmp_path)
    assert all_of({name: configs[name] for name in ("sampled", "limited", "auto")}, 1) == {}


def test_a_calibration_is_resumed(tmp_path: Path) -> None:
    """`drop="auto"` with exact calls at the start, which are timed: no two runs measure alike, but a resumed one."""
    config = tiny_config(tmp_path, lrmoe={"max_drop": 0.4, "drop": "auto", "warmup_steps": 2})
    assert resumed(config, 1) == ""
    trainer = Trainer(config)
    trainer.resume()
    for layer in trainer.handle.layers.values():
        auto = layer.controller.drops.auto
        assert auto is not None
        assert auto.frozen
        assert auto.forward_ms > 0


def test_dropout_needs_no_saved_generator(tmp_path: Path) -> None:
    """Every step seeds the generators by (seed, step, rank), so a checkpoint holds none of their state."""
    config = tiny_config(tmp_path)
    other = tiny_config(
        tmp_path,
        model={"overrides": {**config.model.overrides, "attention_dropout": 0.3}},
        train={"name": "dropout", "activation_checkpointing": "non_reentrant", "accumulate": 2},
    )
    assert resumed(other, 1) == ""
    assert Trainer(other).step().loss != Trainer(config.replace(train={"accumulate": 2})).step().loss


def save_some(config: TrainConfig) -> None:
    trainer, _ = trainer_of(config, dist.group.WORLD)
    steps(trainer, BEFORE)
    trainer.save()


@pytest.mark.distributed
def test_what_other_ranks_cannot_use_is_said_once(
    pool2: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    eplb, local = policy_configs(tmp_path)["eplb"], pruned_configs(tmp_path)["of own pairs"]
    told = {
        "eplb": "policy='eplb' begins anew: past counts and placements are those of another number of ranks: 2, not 1",
        "of own pairs": "scores of past calls begin anew: with selection='local' every rank knew those of its own "
        "pairs only, and the number of ranks was 2",
    }
    for config in (eplb, local):
        pool2.run(save_some, config)
        trainer, _ = trainer_of(config, None)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lrmoe.layer"):
            assert trainer.resume() == BEFORE
            trainer.resume()
        assert caplog.messages == [f"lrmoe: {told[config.train.name]}"]
        assert all(layer.state_dict()["past"] is None for layer in trainer.handle.layers.values())
        trainer.step()


def test_another_policy_begins_anew_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = policy_configs(tmp_path)["symi"]
    trainer, _ = trainer_of(config, None)
    steps(trainer, 1)
    trainer.save()
    other, _ = trainer_of(config.replace(lrmoe={"policy": "laer"}), None)
    other.resume()
    assert caplog.messages == [
        "lrmoe: policy='laer' begins anew: past counts and placements are those of policy 'symi'"
    ]
    assert all(layer.state_dict()["past"] is None for layer in other.handle.layers.values())
