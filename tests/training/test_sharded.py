"""Training on shards of experts: the weights that owned storage reaches, at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe import LRMoEConfig
from lrmoe.distributed import Comm
from lrmoe.distributed.sharded import gather_homes
from lrmoe.errors import ConfigError
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.training.config import ModelConfig, TrainConfig
from lrmoe.training.loop import Trainer
from lrmoe.training.model import build_model, expert_cuts
from lrmoe.training.state import saved_tensors
from tests.distributed.pool import Pool
from tests.training.test_model import fuse, saved
from tests.training.tiny import CPU, SHAPE, float64_model, tiny_config, whole_state

LIMIT_S = 120  # the first case imports transformers in every process
EXACT = {"max_drop": 0.0, "warmup_steps": 0}
SHARDED = {**EXACT, "storage": "sharded"}
CLIP = {"warmup_steps": 0, "clip_norm": 0.2}
ODD = {"hidden_size": 30, "moe_intermediate_size": 15}  # 900 and 450: 4 divides the first alone
EXPERTS = "model.layers.{}.mlp.experts.{}"
NAMES = [EXPERTS.format(layer, name) for layer in range(2) for name in ("gate_up_proj", "down_proj")]


def group_of(ranks: int) -> Any:
    return dist.group.WORLD if ranks > 1 else None


def joined(tensors: dict[str, Tensor], model: Any, group: Any) -> dict[str, tuple[Tensor, Any]]:
    """Shards as this rank's home experts, with a mark for `whole_state`; everything else as it is."""
    cuts = expert_cuts(model)
    return {
        name: (gather_homes(Comm(group), tensor, cuts[name]), "home") if name in cuts else (tensor, None)
        for name, tensor in tensors.items()
    }


def built(config: ModelConfig, ranks: int) -> dict[str, Any]:
    group = group_of(ranks)
    model = build_model(config, seed=0, device=CPU, group=group, storage="sharded")
    found = {name: p.detach() for name, p in model.named_parameters()}
    assert {name for name, p in found.items() if p.ndim == 2 and ".experts." in name} == set(NAMES)
    return joined(found, model, group)


@pytest.mark.distributed
@pytest.mark.parametrize("source", ["preset", "checkpoint", "fused"])
def test_initial_weights_are_those_of_owned_storage(pool4: Pool, tmp_path: Path, source: str) -> None:
    whole = dict(saved(tmp_path).named_parameters())
    if source == "fused":
        fuse(tmp_path)
    config = ModelConfig(overrides=SHAPE) if source == "preset" else ModelConfig(checkpoint=str(tmp_path))
    for found in (whole_state(pool4.run(built, config, 4, limit_s=LIMIT_S)), whole_state([built(config, 1)])):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)


def trained(config: TrainConfig, ranks: int, steps: int = 3) -> tuple[dict[str, Any], list[float]]:
    """Weights and moments after some steps, of this rank's home experts and all else; norms and losses."""
    group = group_of(ranks)
    trainer = Trainer(config, group, model=float64_model(config, group))
    metrics = [trainer.step() for _ in range(steps)]
    for name, entry, tensor in saved_tensors(trainer):
        if entry.cut is not None:
            assert not tensor[:, entry.cut.width(trainer.rank) :].any(), f"{name}: padding must stay zero"
    return state_of(trainer), [value for m in metrics for value in (m.grad_norm, m.loss)]


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Name -> (tensor, mark of experts): masters, and moments as name/moment."""
    found: dict[str, Any] = {}
    for name, entry, tensor in saved_tensors(trainer):
        if entry.cut is not None:
            found[name] = (gather_homes(Comm(trainer.group), tensor, entry.cut), "home")
        else:
            found[name] = (tensor.detach().clone(), entry.span)
    return found


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-13, msg=name)


def merged(ranks: list[Any]) -> dict[str, Tensor]:
    return whole_state([state for state, _ in ranks])


def odd_config(folder: Path, ranks: int, **lrmoe: Any) -> TrainConfig:
    return tiny_config(
        folder,
        model={"overrides": {**SHAPE, **ODD}},
        lrmoe={**EXACT, **lrmoe},
        optim=CLIP,
        train={"batch_size": 8 // ranks, "accumulate": 2},
    )


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["megatron", "laer", "symi"])
def test_three_steps_end_where_owned_storage_does(
    pool2: Pool, pool4: Pool, tmp_path: Path, policy: str
) -> None:
    """Weights, moments, clipped norms and losses; padding stays zero."""
    owned, said = trained(odd_config(tmp_path, 1), 1)
    wanted = whole_state([owned])
    for ranks, pool in ((1, None), (2, pool2), (4, pool4)):
        config = odd_config(tmp_path, ranks, storage="sharded", policy=policy, replica_slots=1)
        runs = [trained(config, 1)] if pool is None else pool.run(trained, config, ranks, limit_s=LIMIT_S)
        assert_close(merged(runs), wanted)
        for _, heard in runs:
            assert heard == pytest.approx(said, rel=1e-10)


@pytest.mark.distributed
def test_pruned_steps_end_where_owned_storage_does(pool2: Pool, tmp_path: Path) -> None:
    changes = {"max_drop": 0.4}
    owned = pool2.run(trained, odd_config(tmp_path, 2, **changes), 2, limit_s=LIMIT_S)
    sharded = pool2.run(trained, odd_config(tmp_path, 2, **changes, storage="sharded"), 2, limit_s=LIMIT_S)
    assert_close(merged(sharded), merged(owned))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
def test_activation_checkpointing(pool2: Pool, tmp_path: Path, kind: str) -> None:
    plain = odd_config(tmp_path, 2, storage="sharded", policy="laer")
    again = plain.replace(train={"activation_checkpointing": kind})
    assert_close(
        merged(pool2.run(trained, again, 2, limit_s=LIMIT_S)),
        merged(pool2.run(trained, plain, 2, limit_s=LIMIT_S)),
    )


def low_precision(config: TrainConfig) -> dict[str, Any]:
    """Masters in float32 beside parameters in bfloat16, and their share of the memory."""
    trainer = Trainer(config, dist.group.WORLD)
    losses = [trainer.step().loss for _ in range(4)]
    entries = [e for e in trainer.parameters.entries if e.cut is not None]
    assert all(e.parameter.dtype == torch.bfloat16 for e in entries)
    assert all(e.master.dtype == torch.float32 for e in entries)
    assert len(entries) == 4
    return {"losses": losses, "elements": sum(e.master.numel() for e in entries)}


@pytest.mark.distributed
def test_low_precision_and_evaluation(pool2: Pool, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, lrmoe=SHARDED, train={"dtype": "bfloat16"}, optim={"lr": 1e-2})
    ranks = pool2.run(low_precision, config, limit_s=LIMIT_S)
    assert ranks[0] == ranks[1]
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0]
    assert ranks[0]["elements"] == 2 * 4 * 3 * 32 * 16 // 2  # layers, experts, projections, half of each


def evaluate(config: TrainConfig) -> float:
    trainer = Trainer(config, group_of(dist.get_world_size()))
    trainer.step()
    return trainer.evaluate()


@pytest.mark.distributed
def test_evaluation_equals_that_of_owned_storage(pool2: Pool, tmp_path: Path) -> None:
    owned, sharded = (
        pool2.run(evaluate, tiny_config(tmp_path, lrmoe=kind), limit_s=LIMIT_S) for kind in (EXACT, SHARDED)
    )
    assert sharded == pytest.approx(owned, rel=1e-5)


def test_experts_of_another_kind_are_refused() -> None:
    config = ModelConfig(overrides=SHAPE)
    owned, sharded = (
        build_model(config, seed=0, device=CPU, storage=storage) for storage in ("owned", "sharded")
    )
    said = (
        r"storage='sharded': the parameters of .*experts are whole experts .*valid is 'owned'; `lrmoe train`"
    )
    with pytest.raises(ConfigError, match=said):
        lrmoe_hf.enable(owned, LRMoEConfig(storage="sharded"))
    with pytest.raises(
        ConfigError, match=r"storage='owned': .*are shards of all experts; valid is 'sharded'$"
    ):
        lrmoe_hf.enable(sharded, LRMoEConfig())
    assert not any(hasattr(module, "_lrmoe") for module in owned.modules()), "nothing was changed"
