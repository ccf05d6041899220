"""The kept set is a function of (seed, layer, step, micro-batch, expert) and of nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lrmoe.layer import MoELayer
from lrmoe.layer.randomness import Key
from tests.layer.harness import build, forward, keep_weights, kept, leaves, pruning, run
from tests.reference import GRADS, Case, make_case

CASE = make_case(tokens=50, experts=4, top_k=2, seed=8)
RANDOM = [{"estimator": "sampled"}, {"estimator": "topk", "score": "random"}]


def config(**fields: Any) -> Any:
    return pruning(**{"max_drop": 0.5, "seed": 5, "router_grad": "retained", **fields})


def next_kept(layer: MoELayer, case: Case = CASE, **kwargs: Any) -> Tensor:
    return keep_weights(run(case, config(), layer=layer, **kwargs).result, case)


@pytest.mark.parametrize("fields", RANDOM)
def test_the_same_key_keeps_the_same_set(fields: dict[str, str]) -> None:
    first = kept(CASE, config(**fields), step=3)
    torch.manual_seed(999)
    torch.rand(5)
    assert torch.equal(first, kept(CASE, config(**fields), step=3))


@pytest.mark.parametrize("fields", RANDOM)
def test_every_part_of_the_key_matters(fields: dict[str, str]) -> None:
    base = kept(CASE, config(**fields), step=3)
    others = {
        "seed": kept(CASE, config(**fields, seed=6), step=3),
        "step": kept(CASE, config(**fields), step=4),
    }
    layer = build(CASE, config(**fields), step=3, layer=1)
    others["layer"] = next_kept(layer)
    others["micro-batch"] = next_kept(layer)
    seen = [base, *others.values()]
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert not torch.equal(one > 0, other > 0), list(others)


def test_every_expert_draws_its_own_numbers() -> None:
    """Two experts with the same pairs must not keep the same places."""
    case = make_case(tokens=64, experts=2, top_k=2, seed=1)
    keep_TK = kept(case, pruning(max_drop=0.5, score="random"))
    by_expert = [torch.nonzero((case.ids == e) & (keep_TK > 0))[:, 0].tolist() for e in range(2)]
    assert by_expert[0] != by_expert[1]


def test_evaluation_never_advances_it() -> None:
    plain, disturbed = build(CASE, config(), step=1), build(CASE, config(), step=1)
    first = [next_kept(plain), next_kept(plain)]
    found = [next_kept(disturbed)]
    with torch.no_grad():
        forward(disturbed, CASE, leaves(CASE, GRADS), training=False)
    with torch.inference_mode():
        forward(disturbed, CASE, leaves(CASE, []), training=False)
    with pytest.warns(UserWarning, match="evaluation mode"):  # with gradients, still evaluation
        run(CASE, config(), layer=disturbed, training=False)
    found.append(next_kept(disturbed))
    assert torch.equal(first[0], found[0])
    assert torch.equal(first[1], found[1])


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_recomputation_never_advances_it(checkpoint: str) -> None:
    plain, replayed = build(CASE, config()), build(CASE, config())
    for _ in range(3):
        assert torch.equal(next_kept(plain), next_kept(replayed, checkpoint=checkpoint))


def test_micro_batches_count_from_zero_in_every_step() -> None:
    layer = build(CASE, config())
    micro_batches = []
    for _ in range(2):
        for _ in range(3):
            next_kept(layer)
            assert layer.last_record is not None
            micro_batches.append((layer.last_record.step, layer.last_record.micro_batch))
        layer.clock.advance()
    assert micro_batches == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_the_key_does_not_depend_on_when_backward_runs() -> None:
    found = []
    for order in (1, -1):
        layer = build(CASE, config())
        batches = [leaves(CASE, GRADS) for _ in range(3)]
        outs = [forward(layer, CASE, leaf) for leaf in batches]
        for out in outs[::order]:
            out.backward(CASE.grad_out)
        found.append([grad for leaf in batches if (grad := leaf["d_weights"].grad) is not None])
        assert len(found[-1]) == len(batches)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0][0].ne(0), found[0][1].ne(0))


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_words_are_those_of_mixing_part_by_part(seed: int) -> None:
    """The published finaliser on numpy's wrapping integers: what earlier runs drew is drawn again."""

    def mixed(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    experts, state, golden = np.arange(5), np.zeros(5, dtype=np.uint64), np.uint64(0x9E3779B97F4A7C15)
    for part in (seed, 3, 2**40, 1, -1):
        state = mixed(state + golden + np.array([part % 2**64], dtype=np.uint64))
    wanted = mixed(state + golden + experts.astype(np.uint64))
    found = Key(seed=seed, layer=3, step=2**40, micro_batch=1, salt=-1).words(experts)
    assert np.array_equal(found, wanted)
