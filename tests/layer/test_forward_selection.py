"""The kept set fixed in forward, on one rank: nothing changes but what stays for backward."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lrmoe.config import FORWARD_SCORES, SCORES, LRMoEConfig
from lrmoe.errors import ConfigError
from lrmoe.layer import release_scratch
from lrmoe.layer.experts import BLOCK_ROWS
from lrmoe.planning.policies import Policy
from lrmoe.telemetry.tracking import StorageTracker
from tests.distributed.plans import Fixed, InParts
from tests.layer.harness import build, forward, kept, leaves, pruning, run
from tests.reference import GRADS, Case, assert_result, make_case, scores, top_pairs

ESTIMATORS = ("topk", "sampled")
CASE = make_case(tokens=61, experts=8, top_k=3, seed=1, skew=1.5)
LARGE = make_case(tokens=BLOCK_ROWS, experts=8, top_k=3, hidden=32, width=24, dtype=torch.float32)


def early(score: str, **fields: Any) -> LRMoEConfig:
    """A configuration that fixes the kept set in forward."""
    return pruning(**{"max_drop": 0.4, "score": score, "select_in": "forward", **fields})


def at_home(config: LRMoEConfig) -> Policy | None:
    """The configuration's own policy."""
    return build(CASE, config)._announcer._policy


def same(case: Case, config: LRMoEConfig, policy: Policy | None = None, **kwargs: Any) -> None:
    """The bits of a choice in backward; new layers, so that both plan alike."""
    late, soon = (
        run(case, one, layer=build(case, one, policy=policy), **kwargs)
        for one in (config.replace(select_in="backward"), config)
    )
    for name in ("out", *GRADS):
        assert torch.equal(getattr(late.result, name), getattr(soon.result, name)), name
    for name in ("kept", "quota_E", "energy", "energy_dropped", "variance_added", "rows_backward_local"):
        assert getattr(late.record, name) == getattr(soon.record, name), name


@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("router_grad", ["full", "retained"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("score", FORWARD_SCORES)
def test_the_same_bits_as_where_backward_selects(
    score: str, estimator: str, router_grad: str, activations: str
) -> None:
    config = early(score, estimator=estimator, router_grad=router_grad, activations=activations)
    same(CASE, config)
    same(CASE.to(torch.bfloat16), config)
    same(LARGE, config)  # several blocks of rows


@pytest.mark.parametrize("parts", [(1, 3), (1, 50), (4, 1), (5, 7)])
@pytest.mark.parametrize("score", FORWARD_SCORES)
def test_a_call_in_parts(score: str, parts: tuple[int, int]) -> None:
    for recompute, estimator in itertools.product((False, True), ESTIMATORS):
        config = early(score, estimator=estimator)
        own = at_home(config)
        assert own is not None
        same(CASE, config, InParts(policy=own, forward=parts[0], backward=parts[1], recompute=recompute))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("score", FORWARD_SCORES)
def test_equals_the_pruned_reference(score: str, estimator: str) -> None:
    config = early(score, estimator=estimator)
    found, keep_TK = run(CASE, config), kept(CASE, config)
    assert_result(
        found.result, CASE, keep_TK=keep_TK, router_grad="full" if estimator == "topk" else "retained"
    )
    assert int((keep_TK > 1e-9).sum()) == found.record.kept == 183 - 73
    if estimator == "topk" and score != "random":
        best = top_pairs(scores(CASE, score), CASE.ids, found.quota_E)
        assert torch.equal(keep_TK > 0.5, best > 0.5)


@pytest.mark.parametrize("case", [CASE.tokens(0, 0), CASE.tokens(0, 1)], ids=["no token", "one token"])
@pytest.mark.parametrize("score", FORWARD_SCORES)
def test_few_tokens(score: str, case: Case) -> None:
    same(case, early(score, max_drop=0.9))


def test_padding_and_pairs_without_an_expert() -> None:
    ids = CASE.ids.clone()
    ids[3], ids[7, 1] = 99, -1
    case = dataclasses.replace(CASE, ids=ids)
    for score in FORWARD_SCORES:
        same(case, early(score), mask=torch.arange(61) % 4 != 0)


@pytest.mark.parametrize("needs", [("d_hidden",), ("d_weights",), ("d_gate_up",), ("d_down", "d_weights")])
def test_frozen_parts(needs: tuple[str, ...]) -> None:
    for score, estimator in itertools.product(FORWARD_SCORES, ESTIMATORS):
        config = early(score, estimator=estimator)
        late = run(CASE, config.replace(select_in="backward"), needs=needs).result
        soon = run(CASE, config, needs=needs).result
        for name in GRADS:
            a, b = getattr(late, name), getattr(soon, name)
            assert (a is None) == (b is None) == (name not in needs)
            assert a is None or torch.equal(a, b), name


def saved_bytes(case: Case, config: LRMoEConfig) -> int:
    """What a forward leaves for backward beside its output, by the tracker."""
    layer, leaf, tracker = build(case, config), leaves(case, GRADS), StorageTracker()
    release_scratch()
    with tracker:
        out = forward(layer, case, leaf)
    release_scratch()
    left = tracker.current - out.nbytes
    del out
    return left


@pytest.mark.parametrize("score", FORWARD_SCORES)
def test_what_is_dropped_leaves_no_stash(score: str) -> None:
    pairs, row = LARGE.ids.numel(), 2 * 24 * 4
    config = early(score, max_drop=0.3)
    late, soon = (run(LARGE, config.replace(select_in=s)).record for s in ("backward", "forward"))
    stashed = pairs - int(0.3 * pairs)
    assert soon.mem["stash"] == stashed * row + 4 * pairs  # and every pair's weight
    assert late.mem["stash"] == pairs * (row + 4 * (score == "alpha_phi"))
    assert soon.mem == soon.mem_predicted
    # Weights of pairs stay instead of norms, and beside nothing where the score reads none.
    fewer = (pairs - stashed) * row - 4 * pairs * (score != "alpha_phi")
    saved = saved_bytes(LARGE, config.replace(select_in="backward")) - saved_bytes(LARGE, config)
    assert saved == pytest.approx(fewer, abs=2048)  # the experts' past scores


def test_an_exact_call_keeps_all() -> None:
    for fields in ({"max_drop": 0.0}, {"warmup_steps": 5}, {"observe": True}):
        record = run(LARGE, early("alpha", **fields)).record
        assert record.mem["stash"] == LARGE.ids.numel() * 2 * 24 * 4
        assert record.kept_share == 1


def test_full_router_gradients_keep_outputs_but_no_activations_of_dropped_pairs() -> None:
    config = early("alpha", estimator="topk", max_drop=0.3)
    full, retained = (saved_bytes(LARGE, config.replace(router_grad=r)) for r in ("full", "retained"))
    assert full - retained == LARGE.ids.numel() * 32 * 4


@pytest.mark.parametrize("score", FORWARD_SCORES)
def test_budgets_predict_it(score: str) -> None:
    free = early(score, max_drop=0.3, layer_budget=2**60)
    record, needed = budgeted(free)
    assert needed <= record.peak_predicted <= 1.02 * needed
    tight = free.replace(layer_budget=int(0.6 * record.peak_predicted))
    smaller, needed = budgeted(tight)
    assert needed <= smaller.peak_predicted <= min(1.02 * needed, 0.6 * record.peak_predicted)
    assert smaller.chunks > 1


def budgeted(config: LRMoEConfig) -> tuple[Any, int]:
    """The record of a call under the tracker, and the most that it held, parameters included."""
    layer, leaf, tracker = build(LARGE, config), leaves(LARGE, GRADS), StorageTracker()
    with tracker:
        forward(layer, LARGE, leaf).backward(LARGE.grad_out)
    assert layer.last_record is not None
    return layer.last_record, tracker.peak + leaf["d_gate_up"].nbytes + leaf["d_down"].nbytes


@pytest.mark.parametrize("score", FORWARD_SCORES)
@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_checkpointing(score: str, checkpoint: str) -> None:
    for estimator in ESTIMATORS:
        config = early(score, estimator=estimator)
        plain, again = run(CASE, config), run(CASE, config, checkpoint=checkpoint)
        for name in ("out", *GRADS):
            assert torch.equal(getattr(plain.result, name), getattr(again.result, name)), name


def test_a_recompute_keeps_the_set_of_its_forward_though_its_routing_weights_differ() -> None:
    """Kernels need not repeat to the bit; the set that was fixed stays."""
    config, leaf = early("alpha", router_grad="retained"), leaves(CASE, GRADS)
    layer, seen = build(CASE, config), list[int]()

    def body(hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        noise = torch.linspace(1.0, 1.5 if seen else 1.0, 61 * 3).reshape(61, 3)
        seen.append(len(seen))
        return layer(hidden, CASE.ids, weights * noise, gate_up, down, training=True)

    out = torch_checkpoint(body, *(leaf[n] for n in GRADS), use_reentrant=False)
    out.backward(CASE.grad_out)
    assert len(seen) == 2
    assert leaf["d_weights"].grad is not None
    assert torch.equal(leaf["d_weights"].grad != 0, kept(CASE, config) > 1e-9)


def test_a_retained_graph_goes_back_twice_with_the_same_set() -> None:
    for score in FORWARD_SCORES:
        config, leaf = early(score), leaves(CASE, GRADS)
        layer = build(CASE, config)
        out = forward(layer, CASE, leaf)
        out.backward(CASE.grad_out, retain_graph=True)
        once = {n: leaf[n].grad.clone() for n in GRADS}  # type: ignore[union-attr]
        learned = layer.state_dict()
        out.backward(CASE.grad_out)
        for name in GRADS:
            assert torch.equal(leaf[name].grad, 2 * once[name]), name  # type: ignore[arg-type]
        assert layer.state_dict() == learned


def test_the_planner_learns_once_a_call_and_already_in_forward() -> None:
    for checkpoint in (None, "reentrant", "non-reentrant"):
        late, soon = (build(CASE, early("alpha_phi", select_in=place)) for place in ("backward", "forward"))
        out = forward(soon, CASE, leaves(CASE, GRADS), checkpoint=checkpoint)
        before = soon.state_dict()
        assert (checkpoint == "reentrant") or before != build(CASE, early("alpha_phi")).state_dict()
        out.backward(CASE.grad_out)
        assert checkpoint == "reentrant" or soon.state_dict() == before
        run(CASE, late.config, layer=late, checkpoint=checkpoint)
        assert soon.state_dict() == late.state_dict()


def test_evaluation_and_no_grad_choose_nothing() -> None:
    layer = build(CASE, early("alpha"))
    with torch.no_grad():
        for training in (True, False):
            forward(layer, CASE, leaves(CASE, GRADS), training=training)
    fresh = build(CASE, early("alpha")).state_dict()
    assert layer.state_dict()["score_sums"] == fresh["score_sums"]


@pytest.mark.parametrize("score", [s for s in SCORES if s not in FORWARD_SCORES])
def test_scores_of_a_gradient_are_refused(score: str) -> None:
    with pytest.raises(ConfigError, match=r"only alpha, alpha_phi, random are known in forward"):
        early(score)


def test_the_choice_is_one_process_choice_at_given_quotas() -> None:
    """Quotas fix how many; scores alone say which."""
    config = early("alpha", estimator="topk", router_grad="retained")
    quota_E = torch.tensor(run(CASE, config).quota_E).numpy()
    other = build(CASE, config, policy=Fixed(quota_E=quota_E))
    assert torch.equal(kept(CASE, config, layer=other) > 0.5, kept(CASE, config) > 0.5)
