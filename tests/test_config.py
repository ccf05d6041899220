"""Every field of the configuration: its default, what is refused, and the words of the refusal."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError

DEFAULTS = {
    "policy": "lrmoe",
    "replica_slots": 2,
    "max_drop": 0.3,
    "drop": "always",
    "estimator": "sampled",
    "score": "lrm",
    "selection": "global",
    "select_in": "backward",
    "router_grad": "auto",
    "max_added_variance": None,
    "memory_budget": None,
    "layer_budget": None,
    "min_keep": 1,
    "peak_target": 1.0,
    "storage": "owned",
    "check_every": 0,
    "activations": "auto",
    "lean_wire": "auto",
    "warmup_steps": 20,
    "cooldown_steps": 0,
    "total_steps": None,
    "seed": 0,
    "observe": False,
}

WRONG: dict[str, list[Any]] = {
    "policy": ["fastest", "", None, 3],
    "replica_slots": [-1, 1.5, "2", None, True],
    "max_drop": [-0.1, 1.0, 1.5, float("nan"), float("inf"), "0.3", None, True],
    "drop": ["never", "", None, 0.3],
    "estimator": ["TopK", "top", None],
    "score": ["LRM", "norm", None],
    "selection": ["both", None],
    "select_in": ["backwards", None],
    "router_grad": ["none", None, True],
    "max_added_variance": [-0.1, 0, "much", float("nan"), float("inf"), True],
    "memory_budget": ["sixty", -1, 1.5],
    "layer_budget": ["1 parsec", -1, 0.5],
    "min_keep": [-1, 0, 1.0, "1", None, True],
    "peak_target": [0.0, -1.0, float("nan"), float("inf"), "1", None],
    "storage": ["shared", None],
    "check_every": [-1, 0.5, None],
    "activations": ["keep", None],
    "lean_wire": ["yes", 1, 0, None],
    "warmup_steps": [-1, 2.5, None, True],
    "cooldown_steps": [-1, 2.5, None],
    "total_steps": [0, -5, 2.5, "many"],
    "seed": [-1, 0.5, None],
    "observe": ["yes", 1, None],
}


def test_defaults_are_the_documented_ones() -> None:
    assert LRMoEConfig().to_dict() == DEFAULTS


def test_every_field_has_wrong_values_here_and_a_description() -> None:
    assert set(WRONG) == set(DEFAULTS)
    for one in dataclasses.fields(LRMoEConfig):
        assert len(one.metadata["doc"]) > 10, one.name


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in WRONG.items() for v in values])
def test_a_value_out_of_range_is_refused_with_field_value_and_what_is_valid(
    field: str, value: object
) -> None:
    changed: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError) as caught:
        LRMoEConfig(**changed)
    message = str(caught.value)
    assert field in message
    assert repr(value) in message
    assert "must" in message or "valid" in message or "needs" in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_added_variance": 0.1, "estimator": "topk"}, "max_added_variance.*sampled"),
        ({"drop": "auto", "estimator": "topk"}, "drop='auto'.*sampled.*'always'"),
        ({"select_in": "forward", "score": "lrm"}, "select_in='forward'.*score='lrm'.*alpha"),
        ({"min_keep": 0, "estimator": "sampled"}, "min_keep=0.*sampled"),
        ({"cooldown_steps": 5}, "cooldown_steps=5.*total_steps"),
        ({"layer_budget": "1GiB", "storage": "sharded"}, "layer_budget='1GiB'.*storage='owned'"),
        (
            {"check_every": 10, "layer_budget": "1GiB"},
            "check_every=10.*layer_budget='1GiB'.*valid with a budget: 0",
        ),
        ({"check_every": 10, "memory_budget": "9GiB"}, "check_every=10.*memory_budget='9GiB'"),
        ({"cooldown_steps": 11, "total_steps": 10}, "cooldown_steps=11.*total_steps=10"),
        ({"policy": "megatron", "max_drop": 0.3}, "max_drop=0.3.*megatron"),
    ],
)
def test_forbidden_combinations_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LRMoEConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"max_drop": 0},
        {"max_drop": 0.999},
        {"drop": "auto"},
        {"max_added_variance": 0.1},
        {"drop": "overload", "max_added_variance": 1e-3},
        {"select_in": "forward", "score": "alpha"},
        {"estimator": "topk", "min_keep": 0},
        {"policy": "megatron", "max_drop": 0.0},
        {"policy": "symi", "max_drop": 0.0},
        {"policy": "my_file.py:MyPolicy"},
        {"lean_wire": True},
        {"cooldown_steps": 5, "total_steps": 5},
        {"lean_wire": False},
        {"drop": "overload", "peak_target": 0.5},
        {"seed": 2**62},
        {"memory_budget": "60GiB"},
        {"memory_budget": "12.5%", "layer_budget": 10**9},
    ],
)
def test_the_edges_of_the_valid_range_are_accepted(values: dict[str, Any]) -> None:
    assert LRMoEConfig(**values).to_dict() == {**DEFAULTS, **values}


def test_router_grad_auto_is_full_for_topk_and_retained_for_sampled() -> None:
    assert LRMoEConfig(estimator="topk").full_router_grad
    assert not LRMoEConfig(estimator="sampled").full_router_grad
    assert LRMoEConfig(estimator="sampled", router_grad="full").full_router_grad
    assert not LRMoEConfig(estimator="topk", router_grad="retained").full_router_grad


def test_unknown_fields_name_the_nearest_one() -> None:
    with pytest.raises(
        ConfigError, match=r"max_dorp: no such field.*did you mean .max_drop.*; valid: policy"
    ):
        LRMoEConfig.from_dict({"max_dorp": 0.2})
    with pytest.raises(ConfigError, match=r"estimater: no such field.*did you mean .estimator."):
        LRMoEConfig().replace(estimater="topk")


def test_configurations_are_immutable_keyword_only_and_survive_json() -> None:
    config = LRMoEConfig(max_drop=0.2, seed=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_drop = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        LRMoEConfig("lrmoe")  # type: ignore[call-arg]
    assert LRMoEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.replace(max_drop=0.5) == LRMoEConfig(max_drop=0.5, seed=7)
    assert config.max_drop == 0.2
