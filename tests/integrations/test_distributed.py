"""Several gloo processes: expert parallelism through Transformers, FSDP2, DDP, and `shard_experts`."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from lrmoe import ConfigError, LRMoEConfig, UnsupportedError
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool, world
from tests.integrations.models import make_tokens
from tests.integrations.ranks import LIMIT_S, batches, load, reduce_by_hand, reference, save_models, step
from tests.reference import assert_within

pytestmark = pytest.mark.distributed

EXACT = LRMoEConfig(max_drop=0)
PRUNED = LRMoEConfig(max_drop=0.4, warmup_steps=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of saved tiny models, by name."""
    return save_models(tmp_path_factory.mktemp("models"), ("qwen3", "glm4"))


def check(actual: dict[str, Tensor], path: str, dtype: torch.dtype, ids: list[Tensor]) -> None:
    exact, plain = reference(path, torch.float64, ids), reference(path, dtype, ids)
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        assert_within(value, exact[name], plain[name], name)


def ep_equals_eager(path: str, dtype: torch.dtype, ep: int, lengths: list[int], enable: bool) -> None:
    ids = batches(lengths)
    layout = {"fsdp_size": dist.get_world_size(), "ep_size": ep, "ep_implementation": "lrmoe"}
    model = load(path, dtype, **layout)
    if enable:
        lrmoe_hf.enable(model, EXACT)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "error", message=".*returned a view tensor"
        )  # changed in place it loses its hook
        for _ in range(2):  # the second time finds whatever the first left behind
            actual = step(model, ids[dist.get_rank()])
    check(actual, path, dtype, ids)


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
def test_ep2_equals_eager(pool2: Pool, saved: dict[str, str], name: str) -> None:
    pool2.run(ep_equals_eager, saved[name], torch.float32, 2, [12, 12], True, limit_s=LIMIT_S)


def test_ep2_with_uneven_batches_and_before_enable(pool2: Pool, saved: dict[str, str]) -> None:
    pool2.run(ep_equals_eager, saved["qwen3"], torch.float32, 2, [2, 13], True, limit_s=LIMIT_S)
    pool2.run(ep_equals_eager, saved["qwen3"], torch.float32, 2, [12, 12], False, limit_s=LIMIT_S)


# GLM-4 keeps its selection bias in float32, and FSDP2 refuses two dtypes in one group: float64 is Qwen3's only.
@pytest.mark.parametrize(("name", "dtype"), [("qwen3", torch.float64), ("glm4", torch.float32)], ids=str)
def test_ep2_by_expert_fsdp2_equals_eager(
    pool4: Pool, saved: dict[str, str], name: str, dtype: torch.dtype
) -> None:
    pool4.run(ep_equals_eager, saved[name], dtype, 2, [12, 5, 7, 9], True, limit_s=LIMIT_S)


def test_ep4_equals_eager(pool4: Pool, saved: dict[str, str]) -> None:
    pool4.run(ep_equals_eager, saved["qwen3"], torch.float32, 4, [12, 5, 2, 9], True, limit_s=LIMIT_S)


def ep_equals_all_to_all(path: str) -> None:
    ids = batches([9, 6])[dist.get_rank()]
    layout = {"fsdp_size": 2, "ep_size": 2}
    theirs = step(load(path, torch.float64, **layout, ep_implementation="all_to_all"), ids)
    model = load(path, torch.float64, **layout, ep_implementation="lrmoe")
    lrmoe_hf.enable(model, EXACT)
    for name, value in step(model, ids).items():
        assert_within(value, theirs[name], theirs[name], name)


def test_ep2_in_float64_equals_transformers_all_to_all(pool2: Pool, saved: dict[str, str]) -> None:
    # Not with eager: where experts are whole on a rank, FSDP2 of torch 2.13 divides their float64 (and float16)
    # gradients twice, whatever the implementation.
    pool2.run(ep_equals_all_to_all, saved["qwen3"], limit_s=LIMIT_S)


def mixed_precision_is_as_near_as_all_to_all(path: str) -> None:
    ids = batches([12, 5])
    layout = {"fsdp_size": 2, "ep_size": 2, "fsdp_mixed_precision": True}
    plain = step(load(path, torch.float32, **layout, ep_implementation="all_to_all"), ids[dist.get_rank()])
    model = load(path, torch.float32, **layout, ep_implementation="lrmoe")
    lrmoe_hf.enable(model, EXACT)
    actual, exact = step(model, ids[dist.get_rank()]), reference(path, torch.float64, ids)
    for name, value in actual.items():
        assert value.dtype == plain[name].dtype
        error, limit = ((found[name].double() - exact[name]).norm() for found in (actual, plain))
        assert error <= 1.5 * limit + 1e-3 * exact[name].norm(), name


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
def test_ep2_under_mixed_precision(pool2: Pool, saved: dict[str, str], name: str) -> None:
    pool2.run(mixed_precision_is_as_near_as_all_to_all, saved[name], limit_s=LIMIT_S)


def fsdp_equals_eager(path: str, dtype: torch.dtype) -> None:
    ids = batches([12, 5])
    model = load(path, dtype, fsdp_size=2)
    lrmoe_hf.enable(model, EXACT)
    check(step(model, ids[dist.get_rank()]), path, dtype, ids)
    model = load(path, dtype)
    lrmoe_hf.enable(model, EXACT)  # before wrapping
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    check(step(model, ids[dist.get_rank()]), path, dtype, ids)


def test_fsdp2_without_expert_parallelism(pool2: Pool, saved: dict[str, str]) -> None:
    pool2.run(fsdp_equals_eager, saved["qwen3"], torch.float64, limit_s=LIMIT_S)
    pool2.run(fsdp_equals_eager, saved["glm4"], torch.float32, limit_s=LIMIT_S)


def ddp_equals_eager(path: str, lengths: list[int]) -> None:
    ids = batches(lengths)
    model = load(path, torch.float64)
    first = lrmoe_hf.enable(model, EXACT)
    wrapped = DistributedDataParallel(model)
    first.disable()
    handle = lrmoe_hf.enable(wrapped, EXACT)  # before or after wrapping: the same names
    assert handle.layers.keys() == first.layers.keys()
    for _ in range(2):
        actual = step(wrapped, ids[dist.get_rank()])
    idle = [record.counts_E.count(0) for record in handle.telemetry.drain()]
    assert min(idle) > 0, "no expert is idle on this rank"
    check(actual, path, torch.float64, ids)


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
def test_ddp_with_idle_experts(pool2: Pool, saved: dict[str, str], name: str) -> None:
    pool2.run(ddp_equals_eager, saved[name], [2, 3], limit_s=LIMIT_S)


def checkpointing_keeps_numbers(path: str, layout: dict[str, Any], use_reentrant: bool) -> None:
    ids = batches([12, 5])[dist.get_rank()]
    plain = load(path, torch.float64, **layout)
    lrmoe_hf.enable(plain, PRUNED)
    expected = step(plain, ids)
    model = load(path, torch.float64, **layout)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    handle = lrmoe_hf.enable(model, PRUNED)
    actual = step(model, ids)
    assert all(record.kept_share < 0.7 for record in handle.telemetry.drain())
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("ep", [1, 2])
def test_checkpointing_under_ep_and_fsdp(
    pool2: Pool, saved: dict[str, str], use_reentrant: bool, ep: int
) -> None:
    layout = {"fsdp_size": 2} | ({"ep_size": 2, "ep_implementation": "lrmoe"} if ep == 2 else {})
    pool2.run(checkpointing_keeps_numbers, saved["qwen3"], layout, use_reentrant, limit_s=LIMIT_S)


def pruned_steps(path: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model = load(path, torch.float32, fsdp_size=2, ep_size=2, ep_implementation="lrmoe")
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.4, warmup_steps=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle.attach(optimizer)
    for number in range(4):
        ids = make_tokens(2, 8 + rank, seed=number + 7 * rank)
        mask = torch.ones_like(ids)
        mask[0, : 3 * rank] = 0
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    records = handle.telemetry.drain()
    model.eval()
    with torch.no_grad():
        model(input_ids=make_tokens(1, 4))
    handle.disable()
    model.train()
    step(model, make_tokens(1, 4))
    assert not handle.telemetry.drain()
    return {
        "step": handle.clock.step,
        "pairs": [record.pairs for record in records],
        "kept": [record.kept for record in records],
        "load": [record.backward_load_R for record in records],
        "world": {record.world_size for record in records},
    }


def test_ep2_training_steps_agree_over_ranks(pool2: Pool, saved: dict[str, str]) -> None:
    first, second = pool2.run(pruned_steps, saved["glm4"], limit_s=LIMIT_S)
    assert first == second
    pairs = 2 * (2 * 8 + 2 * 9 - 3)
    assert first["pairs"] == [pairs] * 4
    assert first["kept"] == [pairs] + [pairs - int(0.4 * pairs)] * 3
    assert first["world"] == {2}
    assert first["step"] == 4


def sharded_equals_eager(path: str, lengths: list[int]) -> None:
    rank, group = dist.get_rank(), world()
    ids = batches(lengths)
    model = load(path, torch.float64)
    lrmoe_hf.shard_experts(model, group)
    experts = list(lrmoe_hf.expert_parameters(model))
    assert {(p.shape[0], vars(p)["lrmoe_expert"]) for p in experts} == {(4, (4 * rank, 8))}
    before = local_step(model, ids[rank])
    handle = lrmoe_hf.enable(model, EXACT, group=group)
    after = local_step(model, ids[rank])
    exact = reference(path, torch.float64, ids)
    for name, parameter in model.named_parameters():
        expected = exact[name]
        if hasattr(parameter, "lrmoe_expert"):
            expected = expected[4 * rank : 4 * rank + 4]
        for actual in (before, after):
            assert_within(actual[name], expected, expected, name)
    assert handle.group is group
    with pytest.raises(UnsupportedError, match="spread over 2 ranks"):
        pickle.dumps(model.model.layers[1].mlp.experts)


def local_step(model: PreTrainedModel, ids_BS: Tensor) -> dict[str, Tensor]:
    """Gradients of the mean loss: dense ones averaged over ranks, expert ones complete on their rank."""
    reduce_by_hand(model, ids_BS)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
def test_shard_experts(pool2: Pool, saved: dict[str, str], name: str) -> None:
    pool2.run(sharded_equals_eager, saved[name], [11, 4], limit_s=LIMIT_S)


def uneven_refused(path: str) -> None:
    model = load(path, torch.float32)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.num_experts = 7
        experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[:7].detach())
        experts.down_proj = nn.Parameter(experts.down_proj[:7].detach())
    with pytest.raises(ConfigError, match="7 experts cannot be spread evenly over 2 ranks"):
        lrmoe_hf.shard_experts(model, world())
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape[0] == 7


def other_layouts_refused(path: str) -> None:
    layout = {"fsdp_size": 2, "ep_size": 2}
    model = load(path, torch.float32, **layout, ep_implementation="all_to_all")
    with pytest.raises(UnsupportedError, match="ep_implementation='lrmoe'"):
        lrmoe_hf.enable(model, EXACT)
    with pytest.raises(UnsupportedError, match="tp_size=2"):
        load(path, torch.float32, tp_size=2, ep_size=2, ep_implementation="lrmoe")
    model = load(path, torch.float32, **layout, ep_implementation="lrmoe")
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ConfigError, match="are spread over"):
        lrmoe_hf.enable(model, EXACT, group=alone)


def test_other_layouts_are_refused(pool2: Pool, saved: dict[str, str]) -> None:
    pool2.run(uneven_refused, saved["qwen3"], limit_s=LIMIT_S)
    pool2.run(other_layouts_refused, saved["qwen3"], limit_s=LIMIT_S)


def generates(path: str) -> list[list[int]]:
    model = load(path, torch.float64, fsdp_size=2, ep_size=2, ep_implementation="lrmoe")
    lrmoe_hf.enable(model, PRUNED)
    model.eval()
    ids = make_tokens(1, 5, seed=dist.get_rank())
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    ours = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    theirs = load(path, torch.float64).eval().generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(ours, theirs)
    return ours.tolist()


def test_generation_under_ep(pool2: Pool, saved: dict[str, str]) -> None:
    pool2.run(generates, saved["qwen3"], limit_s=LIMIT_S)
