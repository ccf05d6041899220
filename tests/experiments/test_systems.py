"""Names of systems, presets and the configuration of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrmoe.config import POLICIES, LRMoEConfig
from lrmoe.errors import ConfigError
from lrmoe.experiments.compare.config import CompareConfig, Experiment
from lrmoe.experiments.compare.presets import PRESETS, get_preset
from lrmoe.experiments.systems.registry import SYSTEMS, get_system, get_systems
from lrmoe.planning.policies import INFO
from lrmoe.training.toml_files import read_toml

MINE = """
from lrmoe.planning.policies import PolicyInfo, get_policy

def plan(problem):
    return get_policy("megatron")(problem)

plan.INFO = PolicyInfo(title="Mine", source="here", inputs="nothing", acts="never", moves="nothing", slots="none")

class Drops:
    INFO = PolicyInfo(
        title="Drops", source="here", inputs="nothing", acts="never", moves="nothing", slots="none", drops=True
    )

    def __call__(self, problem):
        return get_policy("lrmoe")(problem)
"""


def test_megatron_drops_nothing_whatever_the_base() -> None:
    config = get_system("megatron").config(LRMoEConfig(max_drop=0.7, estimator="topk", seed=5))
    assert (config.policy, config.max_drop, config.replica_slots, config.seed) == ("megatron", 0.0, 0, 5)


def test_lrmoe_takes_the_base_as_it_is() -> None:
    base = LRMoEConfig(max_drop=0.4, warmup_steps=3, score="alpha")
    assert get_system("lrmoe").config(base) == base


@pytest.mark.parametrize(
    ("name", "estimator", "max_drop"), [("lrmoe-sampled50", "sampled", 0.5), ("lrmoe-topk20", "topk", 0.2)]
)
def test_named_settings_win_over_the_base(name: str, estimator: str, max_drop: float) -> None:
    base = LRMoEConfig(max_drop=0.1, score="alpha", activations="stash", lean_wire=False)
    config = get_system(name).config(base)
    assert (config.estimator, config.score, config.max_drop) == (estimator, "lrm", max_drop)
    assert (config.activations, config.lean_wire) == ("stash", False), (
        "what is not the system's stays the base's"
    )


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'lrmo': no such system \(did you mean 'lrmoe'\?\); valid: megatron, fastermoe"
    ):
        get_system("lrmo")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_a_system(name: str) -> None:
    system = get_system(name)
    assert system.changes["policy"] == name
    assert system.info == INFO[name]
    assert system.exact(LRMoEConfig()) == (name != "lrmoe")


def test_all_is_every_system_and_stands_alone() -> None:
    assert [system.name for system in get_systems(["all"])] == list(SYSTEMS)
    assert CompareConfig(systems=["all"]).systems == tuple(SYSTEMS)  # type: ignore[arg-type]  # as TOML gives it
    with pytest.raises(ConfigError, match="'all' alone"):
        get_systems(["all", "lrmoe"])


def test_a_policy_from_a_file_is_a_system(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    exact, drops = get_system(f"{path}:plan"), get_system(f"{path}:Drops")
    assert exact.changes["policy"] == f"{path}:plan"
    assert (exact.may_drop, drops.may_drop) == (False, True)
    assert "max_drop" in exact.changes
    assert "max_drop" not in drops.changes
    with pytest.raises(ConfigError, match=f"systems='{path}:nope'.*has no 'nope'"):
        get_system(f"{path}:nope")


def test_exact_systems_without_fixed_ownership_still_share_one_run() -> None:
    names = [
        s.name
        for s in Experiment(preset="demo", compare=CompareConfig(systems=("ultraep", "lrmoe"))).executed
    ]
    assert names == ["ultraep"]


@pytest.mark.parametrize("names", [[], ["lrmoe", "lrmoe"]])
def test_none_or_the_same_twice_is_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="systems="):
        get_systems(names)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_valid_and_fair(name: str, tmp_path: Path) -> None:
    experiment = Experiment.from_dict(name, get_preset(name))
    configs = [experiment.train_config(system).lrmoe for system in experiment.systems]
    for field in ("activations", "lean_wire", "memory_budget", "layer_budget", "seed"):
        assert len({getattr(config, field) for config in configs}) == 1, field
    slots = {config.replica_slots for config in configs if config.policy != "megatron"}
    assert len(slots) == 1, "fixed ownership has no use for any"
    experiment.write(tmp_path / "config.toml")
    assert Experiment.from_dict(name, read_toml(tmp_path / "config.toml")) == experiment


def test_a_preset_is_a_copy() -> None:
    get_preset("demo")["compare"]["systems"].append("x")
    assert "x" not in get_preset("demo")["compare"]["systems"]


@pytest.mark.parametrize(("name", "near"), [("dem", "'demo'"), ("publish", "'published'")])
def test_unknown_preset(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {near}.*valid: demo, small, published"):
        get_preset(name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_steps", 0),
        ("max_steps", 2.5),
        ("ep", 1),
        ("smoothing_steps", True),
        ("link_skip_steps", -1),
        ("link_steps", 0),
        ("target_loss", float("nan")),
        ("target_loss", "low"),
        ("link_bytes_per_s", 0),
        ("systems", "megatron"),
        ("systems", [1]),
    ],
)
def test_bad_values_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"compare\.{field}="):
        CompareConfig(**{field: value})  # type: ignore[arg-type]


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"compare\.targetloss: no such key \(did you mean 'target_loss'\?\)"
    ):
        Experiment.from_dict("demo", {"compare": {"targetloss": 1}})


def test_every_named_system_has_a_line_about_it() -> None:
    assert all(system.about and system.info.inputs for system in SYSTEMS.values())
