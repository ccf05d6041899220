"""Layer calls on shards equal the plain loop: whatever a policy plans, stashed, recomputed or pruned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.config import POLICIES, LRMoEConfig
from lrmoe.distributed.sharded import cut_experts, gather_homes
from lrmoe.errors import InputError
from lrmoe.layer import MoELayer
from lrmoe.planning.shards import expert_cuts
from tests.distributed.calls import bounds_of, even, merge
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, forward, pruning, run
from tests.reference import GRADS, Case, Result, assert_result, make_case

SHAPE: dict[str, Any] = {
    "experts": 16,
    "top_k": 4,
    "hidden": 7,
    "width": 5,
}  # 70 and 35 elements: no padding-free cut over 4 or 8


def sharded_call(
    layer: MoELayer, case: Case, *, needs: tuple[str, ...] = GRADS, checkpoint: str | None = None
) -> Result:
    """One call on this rank's tokens; gradients of shards come back as those of this rank's home experts."""
    comm = layer.comm
    cuts = expert_cuts(case.hidden.shape[1], case.down.shape[2], comm.size)
    up, down = (
        cut_experts(w, cut, comm.rank) for w, cut in zip((case.gate_up, case.down), cuts, strict=True)
    )
    tensors = {"d_hidden": case.hidden, "d_weights": case.weights, "d_gate_up": up, "d_down": down}
    leaf = {name: t.detach().clone().requires_grad_(name in needs) for name, t in tensors.items()}
    out = forward(layer, case, leaf, checkpoint=checkpoint)
    out.backward(case.grad_out)
    grads: dict[str, Tensor | None] = {name: leaf[name].grad for name in GRADS}
    for name, cut in zip(("d_gate_up", "d_down"), cuts, strict=True):
        grad = grads[name]
        if grad is not None:
            assert not grad[:, cut.width(comm.rank) :].any(), "padding has no gradient"
            grads[name] = gather_homes(comm, grad, cut)
    return Result(out=out.detach(), **grads)


def mine(case: Case, sizes: list[int]) -> Case:
    return case.tokens(*bounds_of(sizes)[dist.get_rank()])


def rank_calls(config: LRMoEConfig, cases: list[Case], sizes: list[int], kwargs: dict[str, Any]) -> list[Any]:
    """Runs in a worker: several calls of one layer, each with its bytes of weights and gradients."""
    layer = build(cases[0], config, group=dist.group.WORLD)
    found = []
    for case in cases:
        result = sharded_call(layer, mine(case, sizes), **kwargs)
        assert layer.last_record is not None
        found.append((result, layer.last_record.bytes.get("replicas", 0)))
    return found


def skewed(ranks: int, number: int, dtype: torch.dtype = torch.float64) -> Case:
    return make_case(tokens=11 * ranks, seed=number % 2, skew=3.0, dtype=dtype, **SHAPE)


def check(
    pool: Pool, config: LRMoEConfig, cases: list[Case], sizes: list[int] | None = None, **kwargs: Any
) -> Any:
    """Compare every call with the plain loop; returns all ranks' bytes by call."""
    sizes = even(cases[0], pool.world_size) if sizes is None else sizes
    ranks = pool.run(rank_calls, config, cases, sizes, kwargs, limit_s=60)
    for number, case in enumerate(cases):
        assert_result(merge([calls[number][0] for calls in ranks]), case, what=f"call {number}")
    return [[sent for _, sent in calls] for calls in ranks]


def sharded(**fields: Any) -> LRMoEConfig:
    return exact(storage="sharded", **fields)


@pytest.mark.distributed
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_exact(pool4: Pool, policy: str, lean: bool) -> None:
    check(pool4, sharded(policy=policy, lean_wire=lean), [skewed(4, number) for number in range(4)])


@pytest.mark.distributed
@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["laer", "symi"])
def test_dtypes_and_activations(pool2: Pool, policy: str, dtype: torch.dtype, activations: str) -> None:
    config = sharded(policy=policy, activations=activations)
    check(pool2, config, [skewed(2, number, dtype) for number in range(3)])


@pytest.mark.distributed
@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("policy", ["laer", "symi"])
def test_checkpointing(pool2: Pool, policy: str, checkpoint: str) -> None:
    check(pool2, sharded(policy=policy), [skewed(2, number) for number in range(3)], checkpoint=checkpoint)


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [[0, 44, 0, 0], [44, 0, 0, 0], [1, 20, 3, 20]])
def test_uneven_and_idle_ranks(pool4: Pool, sizes: list[int]) -> None:
    check(pool4, sharded(policy="laer"), [skewed(4, number) for number in range(3)], sizes)


@pytest.mark.distributed
def test_one_expert_gets_every_pair(pool4: Pool) -> None:
    case = make_case(tokens=40, **{**SHAPE, "top_k": 1})
    case.ids.fill_(6)
    for policy in ("laer", "symi", "ultraep"):
        check(pool4, sharded(policy=policy), [case] * 3)


@pytest.mark.distributed
def test_eight_ranks(pool8: Pool) -> None:
    check(pool8, sharded(policy="laer"), [skewed(8, number) for number in range(2)])


@pytest.mark.distributed
@pytest.mark.parametrize("needs", [("d_hidden",), ("d_weights", "d_down"), ("d_gate_up",)], ids="+".join)
def test_frozen_parts(pool2: Pool, needs: tuple[str, ...]) -> None:
    case = skewed(2, 0)
    ranks = pool2.run(rank_calls, sharded(policy="laer"), [case] * 2, even(case, 2), {"needs": needs})
    found = merge([calls[-1][0] for calls in ranks])
    for name in GRADS:
        assert (getattr(found, name) is not None) == (name in needs)
    assert_result(found, case)


@pytest.mark.distributed
def test_weights_are_built_twice_a_call_or_once_a_step(pool2: Pool) -> None:
    """LAER builds in forward and backward; SYMI again only where the layout changes. Gradients return in fp32."""
    case = skewed(2, 0)
    config = {"lean_wire": False, "replica_slots": 1}
    laer = check(pool2, sharded(policy="laer", **config), [case] * 3)
    symi = check(pool2, sharded(policy="symi", **config), [case] * 4)
    expert = (7 * 10 + 7 * 5) * 8 // 2  # bytes of an expert that lie on the other rank
    for rank in range(2):
        first, *_, before, last = symi[rank]
        assert 7 * expert < last < 10 * expert, "the layout of the third call stays: gradients only"
        assert before == last
        assert first > 1.5 * last
        assert laer[rank][-1] > 2.5 * last


def memory_of(config: LRMoEConfig, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    case = skewed(2, 0, dtype)
    layer = build(case, config, group=dist.group.WORLD)
    for _ in range(2):
        sharded_call(layer, mine(case, even(case, 2)))
    assert layer.last_record is not None
    return layer.last_record.mem, layer.last_record.mem_predicted


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("policy", ["laer", "symi"])
def test_memory_is_predicted(pool2: Pool, policy: str, dtype: torch.dtype) -> None:
    config = sharded(policy=policy, activations="stash", lean_wire=False)
    for measured, predicted in pool2.run(memory_of, config, dtype):
        for part in ("weights", "grads", "replicas"):
            assert measured[part] == predicted[part] > 0, part


def pruned_calls(config: LRMoEConfig, case: Case, sizes: list[int]) -> tuple[Result, Result]:
    """The same call on shards and on owned weights."""
    on_shards = sharded_call(build(case, config, group=dist.group.WORLD), mine(case, sizes))
    owned = run(mine(case, sizes), config.replace(storage="owned"), group=dist.group.WORLD)
    return on_shards, owned.result


@pytest.mark.distributed
@pytest.mark.parametrize("estimator", ["sampled", "topk"])
def test_pruned_calls_equal_those_of_owned_storage(pool4: Pool, estimator: str) -> None:
    case = skewed(4, 0)
    config = pruning(storage="sharded", max_drop=0.4, estimator=estimator, replica_slots=0)
    ranks = pool4.run(pruned_calls, config, case, even(case, 4))
    for name in ("out", *GRADS):
        for on_shards, owned in ranks:
            torch.testing.assert_close(getattr(on_shards, name), getattr(owned, name), rtol=1e-10, atol=1e-13)


def test_one_rank() -> None:
    case = make_case(tokens=30, **SHAPE)
    layer = build(case, sharded())
    assert_result(sharded_call(layer, case), case)


def test_whole_weights_are_refused() -> None:
    case = make_case(tokens=30, **SHAPE)
    with pytest.raises(
        InputError, match=r"gate_up_proj has shape .*must be \(16, 70\) \(this rank's part of all"
    ):
        run(case, sharded())


def released() -> tuple[Tensor, Tensor]:
    """The same call before and after weights change, with a step between."""
    case = skewed(2, 0)
    layer = build(case, sharded(policy="symi"), group=dist.group.WORLD)
    part = mine(case, even(case, 2))
    for _ in range(3):
        before = sharded_call(layer, part).out
    layer.clock.advance()
    part.down.mul_(2)
    return before, sharded_call(layer, part).out


@pytest.mark.distributed
def test_kept_weights_go_with_the_step(pool2: Pool) -> None:
    for before, after in pool2.run(released):
        torch.testing.assert_close(after, 2 * before)
