"""U11: close scores are told apart: by the host's router, which stays as it is, and by what is made of its weights."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from tests.integrations.models import SUPPORTED, make_model, make_tokens, run
from tests.layer.harness import exact, kept, pruning
from tests.layer.harness import run as run_layer
from tests.reference import Case, assert_result, counts, make_case, top_pairs

FEW = settings(deadline=None, max_examples=25, derandomize=True)


def close_case(gap: float, seed: int) -> Case:
    """Router logits with gaps of about `gap` around the last place chosen; everything else in bf16."""
    order = torch.rand(64, 8, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)
    logits = 0.3 + gap * order + 3.0 * (order == 7)  # one clear first choice, the others a gap apart
    top = torch.topk(torch.softmax(logits, dim=-1), 2, dim=-1)
    assert bool((order.gather(1, top.indices) == torch.tensor([7, 6])).all()), "fp32 tells them apart"
    case = make_case(tokens=64, experts=8, top_k=2, dtype=torch.bfloat16)
    return dataclasses.replace(case, ids=top.indices, weights=top.values / top.values.sum(-1, keepdim=True))


CLOSE = given(gap=st.sampled_from([1e-3, 3e-4, 1e-5]), seed=st.integers(0, 10_000))


def test_the_case_is_one_that_rounding_would_decide_otherwise() -> None:
    order = torch.rand(64, 8, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    logits = 0.3 + 1e-3 * order
    chances = torch.softmax(logits, dim=-1)
    found = [one.sort(descending=True, stable=True).indices[:, :2] for one in (chances, chances.bfloat16())]
    assert not torch.equal(*found)


@FEW
@CLOSE
def test_a_layer_in_bf16_runs_what_the_fp32_router_chose(gap: float, seed: int) -> None:
    case = close_case(gap, seed)
    found = run_layer(case, exact())
    assert list(found.record.counts_E) == counts(case.ids, 8).tolist()
    assert found.result.d_weights is not None
    assert found.result.d_weights.dtype == torch.float32
    in_its_precision = found.result.d_weights.bfloat16()  # which its factors have
    assert_result(dataclasses.replace(found.result, d_weights=in_its_precision), case)


@FEW
@CLOSE
def test_selection_tells_routing_weights_apart_that_bf16_cannot(gap: float, seed: int) -> None:
    """The kept pairs of an expert are those of largest fp32 weight, where bf16 would see ties."""
    case, generator = close_case(gap, seed), torch.Generator().manual_seed(seed)
    weights = 0.5 + 1e-4 * torch.rand(case.ids.shape, generator=generator)
    assert len(weights.bfloat16().unique()) < 4
    same_gradient = case.grad_out[:1].expand_as(case.grad_out).contiguous()
    case = dataclasses.replace(case, weights=weights, grad_out=same_gradient)
    for score in ("alpha", "alpha_grad"):
        config = pruning(max_drop=0.5, estimator="topk", score=score)
        keep_TK = kept(case, config)
        quota_E = run_layer(case, config).quota_E
        assert torch.equal(keep_TK > 0.5, top_pairs(weights, case.ids, quota_E) > 0)


class Seen:
    """What reaches an experts module, and what its router gave."""

    def __init__(self, model: nn.Module) -> None:
        self.given: list[tuple[Tensor, ...]] = []
        self.logits: list[Tensor] = []
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(lambda _, args: self.given.append(tuple(args)))
            elif name.endswith(".gate"):
                module.register_forward_hook(lambda _, __, out: self.logits.append(_first(out)))


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("drop", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SUPPORTED)
def test_the_hosts_router_gives_the_same_bits(name: str, dtype: torch.dtype, drop: float) -> None:
    """Logits, chosen experts and weights of the first MoE layer, whose input does not depend on lrmoe."""
    eager, ids = make_model(name, dtype=dtype), make_tokens()
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, LRMoEConfig(max_drop=drop, warmup_steps=0))
    seen = [Seen(one) for one in (model, eager)]
    for one in (model, eager):
        run(one, ids)
    ours, theirs = seen
    assert ours.given
    assert len(ours.given) == len(theirs.given)
    assert len(ours.logits) == len(theirs.logits) > 0
    for mine, wanted in zip(
        (ours.logits[0], *ours.given[0]), (theirs.logits[0], *theirs.given[0]), strict=True
    ):
        assert mine.dtype == wanted.dtype
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_router_logits_that_the_model_returns_are_the_hosts(name: str) -> None:
    eager, ids = make_model(name, dtype=torch.float64), make_tokens()
    model = copy.deepcopy(eager)
    lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.4, warmup_steps=0))
    ours, theirs = (one(input_ids=ids, output_router_logits=True).router_logits for one in (model, eager))
    assert len(ours) == len(theirs) == 2
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)
        assert torch.equal(mine.topk(2).indices, wanted.topk(2).indices)
