"""U30: experts used by two layers: each use plans for itself, gradients add up, and the tie survives."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool, world
from tests.integrations.models import assert_same, make_model, make_tokens, run
from tests.integrations.ranks import LIMIT_S, reduce_by_hand

EXACT = LRMoEConfig(max_drop=0)
PRUNED = LRMoEConfig(max_drop=0.4, warmup_steps=0)
KINDS = ("module", "parameters", "one parameter")


def tied_model(kind: str, *, seed: int = 0) -> PreTrainedModel:
    """A model whose two layers share their experts module, both its parameters, or one of them."""
    model = make_model("qwen3", dtype=torch.float64, seed=seed)
    first, second = (layer.mlp for layer in model.model.layers)
    if kind == "module":
        second.experts = first.experts
    else:
        second.experts.down_proj = first.experts.down_proj
        if kind == "parameters":
            second.experts.gate_up_proj = first.experts.gate_up_proj
    return model


def train(model: PreTrainedModel, steps: int = 2) -> int:
    """A few steps of SGD; returns how many expert parameters the optimizer has."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        model(input_ids=make_tokens(seed=step), labels=make_tokens(seed=step)).loss.backward()
        optimizer.step()
    experts = {id(parameter) for parameter in lrmoe_hf.expert_parameters(model)}
    return sum(id(p) in experts for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_equal_the_eager_model(kind: str) -> None:
    eager, ids = tied_model(kind), make_tokens()
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, EXACT)
    assert_same(run(model, ids), eager, ids)
    entries = {"module": 2, "parameters": 2, "one parameter": 3}[kind]
    assert train(model) == train(eager) == entries
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=name)


def uses(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """What each use of the shared down projection adds to its gradient, pruned; the last one is of both."""
    shared, experts = model.model.layers[0].mlp.experts.down_proj, model.model.layers[1].mlp.experts
    handle = lrmoe_hf.enable(model, PRUNED)
    found = []
    for tied in (False, True):
        experts.down_proj = shared if tied else nn.Parameter(shared.detach().clone())
        model.zero_grad()
        handle.clock.step = 0
        for layer in handle.layers.values():  # the same random offsets again
            layer.controller._step, layer.controller._calls_in_step = 0, 0
            layer.controller.learned.sums_XF.zero_()
        model(input_ids=ids, labels=ids).loss.backward()
        found += [shared.grad.clone()] if tied else [shared.grad.clone(), experts.down_proj.grad.clone()]
    kept = [record.kept for record in handle.telemetry.drain()]
    pairs = 2 * ids.numel()
    assert kept == [pairs - int(0.4 * pairs)] * 4
    return found


def test_each_use_drops_by_its_own_plan() -> None:
    first, second, both = uses(tied_model("one parameter"), make_tokens())
    torch.testing.assert_close(both, first + second, rtol=1e-10, atol=1e-13)
    assert float((first - second).abs().max()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_tie_survives_a_state_dict_and_a_file(kind: str, tmp_path: Path) -> None:
    model = tied_model(kind)
    handle = lrmoe_hf.enable(model, PRUNED)
    train(model)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = tied_model(kind, seed=5)
    handle_after = lrmoe_hf.enable(other, PRUNED)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    handle_after.load_state_dict(handle.state_dict())
    first, second = (layer.mlp.experts for layer in other.model.layers)
    assert first.down_proj is second.down_proj
    assert len(handle.layers) == (1 if kind == "module" else 2)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    wanted = run(model, make_tokens())
    for name, value in run(other, make_tokens()).items():
        assert torch.equal(value, wanted[name]), name


def cut_keeps_ties(kind: str, sharded: bool) -> None:
    """Experts spread over two ranks: one gradient for both uses, the reference's."""
    rank, group = dist.get_rank(), world()
    ids = [make_tokens(1, 9, seed=3), make_tokens(1, 6, seed=4)]
    eager = tied_model(kind)
    (sum(eager(input_ids=one, labels=one).loss for one in ids) / 2).backward()
    model = tied_model(kind)
    if sharded:
        lrmoe_hf.install_sharded_experts(model, group)
    else:
        lrmoe_hf.shard_experts(model, group)
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert first.down_proj is second.down_proj
    assert (first.gate_up_proj is second.gate_up_proj) is (kind != "one parameter")
    lrmoe_hf.enable(model, EXACT.replace(storage="sharded" if sharded else "owned"), group=group)
    reduce_by_hand(model, ids[rank])
    wanted, found = eager.model.layers[0].mlp.experts.down_proj.grad, first.down_proj.grad
    if not sharded:
        torch.testing.assert_close(found, wanted[4 * rank : 4 * rank + 4], rtol=1e-10, atol=1e-12)
    norm = lrmoe_hf.clip_grad_norm_(model, float("inf"))
    torch.testing.assert_close(
        norm, torch.stack([p.grad.norm() for p in eager.parameters()]).norm(), rtol=1e-10, atol=0
    )


@pytest.mark.distributed
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_spread_over_ranks_stay_tied(pool2: Pool, kind: str, sharded: bool) -> None:
    pool2.run(cut_keeps_ties, kind, sharded, limit_s=LIMIT_S)


def under_ddp(kind: str) -> None:
    model = tied_model(kind)
    lrmoe_hf.enable(model, EXACT)
    wrapped, eager = DistributedDataParallel(model), tied_model(kind)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    eager(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.distributed
def test_data_parallel_hooks_fire_once_for_both_uses(pool2: Pool) -> None:
    for kind in KINDS:
        pool2.run(under_ddp, kind, limit_s=LIMIT_S)
