"""U17: a router that chooses one expert learns from the main loss; weights normalised to a constant 1 are warned of."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from tests.integrations.models import make_model, make_tokens, run
from tests.layer.harness import build, exact, pruning
from tests.reference import Case, make_case, plain_loop

FEW = settings(deadline=None, max_examples=30, derandomize=True)
FULL = [
    exact(),
    exact(activations="recompute"),
    pruning(max_drop=0.5, router_grad="full"),
    pruning(max_drop=0.5, estimator="topk"),
]
GATE = "model.layers.0.mlp.gate.weight"


def top_one(case: Case, config: LRMoEConfig) -> tuple[Tensor, Tensor]:
    """Gradient of a router's weight with auxiliary loss off: through the layer, and through the plain loop."""
    router = torch.randn(case.hidden.shape[1], case.num_experts, generator=torch.Generator().manual_seed(1))
    router = router.double().requires_grad_()
    chance = torch.softmax(case.hidden @ router, dim=-1)
    top = chance.topk(1, dim=-1)
    layer = build(case, config)
    out = layer(case.hidden, top.indices, top.values, case.gate_up, case.down, training=True)
    (found,) = torch.autograd.grad(out, router, case.grad_out, retain_graph=True)
    one = Case(**{**vars(case), "ids": top.indices, "weights": top.values.detach()})
    (wanted,) = torch.autograd.grad(top.values, router, plain_loop(one).d_weights)
    return found, wanted


@FEW
@given(
    tokens=st.sampled_from([1, 2, 16, 33]),
    experts=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 99),
    config=st.sampled_from(FULL),
)
def test_the_router_gets_the_gradient_of_every_token(
    tokens: int, experts: int, seed: int, config: LRMoEConfig
) -> None:
    """Also of tokens whose only pair backward leaves out, with the full router gradient."""
    case = make_case(tokens=tokens, experts=experts, top_k=1, seed=seed)
    found, wanted = top_one(case, config)
    assert float(found.norm()) > 1e-6
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_the_re_weighted_gradient_of_kept_tokens_is_right_on_average() -> None:
    """The default of `sampled`: dropped tokens give nothing, kept ones more; over seeds it is the whole gradient."""
    case = make_case(tokens=16, experts=4, top_k=1)
    _, wanted = top_one(case, exact())
    found = torch.stack([top_one(case, pruning(max_drop=0.5, seed=seed))[0] for seed in range(80)])
    assert float(found.std(dim=0).norm()) > 0.05 * float(wanted.norm()), "pruning must have moved it"
    error = float((found.mean(dim=0) - wanted).norm() / wanted.norm())
    assert error < 0.2, error


@pytest.mark.parametrize("mode", ["exact", "topk"])
def test_a_host_model_with_one_expert_a_token(mode: str) -> None:
    eager, ids = (
        make_model("qwen3", dtype=torch.float64, num_experts_per_tok=1, norm_topk_prob=False),
        make_tokens(),
    )
    model = copy.deepcopy(eager)
    modes: dict[str, dict[str, Any]] = {
        "exact": {"max_drop": 0},
        "topk": {"max_drop": 0.3, "estimator": "topk"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lrmoe_hf.enable(model, LRMoEConfig(warmup_steps=0, **modes[mode]))
    ours, theirs = run(model, ids), run(eager, ids)
    last = GATE.replace("layers.0", "layers.1")  # below it the pruned gradients of its experts arrive
    assert float(ours[last].norm()) > 1e-6
    torch.testing.assert_close(ours[last], theirs[last], rtol=1e-9, atol=1e-12)
    assert float(ours[GATE].norm()) > 1e-6


def test_one_normalised_weight_leaves_the_router_without_gradient_and_is_warned_of() -> None:
    eager, ids = (
        make_model("qwen3", dtype=torch.float64, num_experts_per_tok=1, norm_topk_prob=True),
        make_tokens(),
    )
    model = copy.deepcopy(eager)
    with pytest.warns(UserWarning, match=r"norm_topk_prob.*num_experts_per_tok=1.*router"):
        handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0))
    ours, theirs = run(model, ids), run(eager, ids)
    for grads in (ours, theirs):
        assert float(grads[GATE].abs().max()) < 1e-7, "but for the rounding of an fp32 softmax"
    handle.disable()
