"""U23: padded positions carry no load, no quota and no gradient, return 0, and their NaN stays where it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lrmoe
from lrmoe.errors import InputError
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, forward, leaves, pruning, run
from tests.reference import GRADS, Case, Result, assert_result, make_case, plain_loop

CASE = make_case(tokens=16, experts=4, top_k=2)  # B=2, S=8; 3 and 8 real tokens
MASK = torch.zeros(16, dtype=torch.bool)
MASK[:3] = MASK[8:] = True
MODES = {"exact": exact(), "topk": pruning(max_drop=0.4, estimator="topk"), "sampled": pruning(max_drop=0.4)}


def padded(fill: float) -> Case:
    """The padded batch: hidden, routing weights and arriving gradient of padded positions hold `fill`."""
    changed: dict[str, Any] = {}
    for field in ("hidden", "weights", "grad_out"):
        changed[field] = getattr(CASE, field).clone()
        changed[field][~MASK] = fill
    return dataclasses.replace(CASE, **changed)


def unpadded() -> Case:
    """The same tokens without padding."""
    return dataclasses.replace(
        CASE, **{f: getattr(CASE, f)[MASK] for f in ("hidden", "ids", "weights", "grad_out")}
    )


@pytest.mark.parametrize("fill", [0.0, 1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_unpadded_run(mode: str, fill: float) -> None:
    wanted = run(unpadded(), MODES[mode])
    found = run(padded(fill), MODES[mode], mask=MASK)
    assert found.record.pairs == wanted.record.pairs == 22
    assert found.quota_E == wanted.quota_E
    assert list(found.record.counts_E) == list(wanted.record.counts_E)
    for name in ("out", "d_hidden", "d_weights"):
        mine, theirs = getattr(found.result, name), getattr(wanted.result, name)
        torch.testing.assert_close(mine[MASK], theirs, rtol=1e-12, atol=1e-13)
        assert torch.equal(mine[~MASK], torch.zeros_like(mine[~MASK])), name
    for name in ("d_gate_up", "d_down"):
        torch.testing.assert_close(
            getattr(found.result, name), getattr(wanted.result, name), rtol=1e-12, atol=1e-13
        )


@pytest.mark.parametrize("shape", [(16,), (2, 8)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_the_context_manager_takes_both_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wanted = run(padded(0.0), exact(), mask=MASK).result
    with lrmoe.padding(MASK.reshape(shape).to(dtype)):
        found = run(padded(0.0), exact()).result
    for name in ("out", *GRADS):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert_result(run(CASE, exact()).result, CASE)  # outside the context nothing is masked


def test_a_mask_given_by_argument_wins_over_the_context() -> None:
    with lrmoe.padding(torch.ones(16, dtype=torch.bool)):
        found = run(padded(float("nan")), exact(), mask=MASK)
    assert found.record.pairs == 22


def test_a_batch_of_nothing_but_padding() -> None:
    for config in MODES.values():
        found = run(padded(float("nan")), config, mask=torch.zeros(16, dtype=torch.bool))
        assert found.record.pairs == 0
        for name in ("out", *GRADS):
            grad = getattr(found.result, name)
            assert torch.equal(grad, torch.zeros_like(grad)), name


def test_evaluation_masks_too() -> None:
    with torch.no_grad():
        out = forward(
            build(CASE, exact()),
            padded(float("nan")),
            leaves(padded(float("nan")), []),
            training=False,
            mask=MASK,
        )
    torch.testing.assert_close(out[MASK], plain_loop(CASE).out[MASK], rtol=1e-10, atol=1e-12)
    assert torch.equal(out[~MASK], torch.zeros_like(out[~MASK]))


@pytest.mark.parametrize(
    "mask", [torch.ones(15), torch.ones(2, 7), torch.ones(17)], ids=lambda m: str(tuple(m.shape))
)
def test_a_mask_of_the_wrong_shape_is_refused(mask: Tensor) -> None:
    with pytest.raises(InputError, match="mask"):
        run(CASE, exact(), mask=mask.bool())
    with lrmoe.padding(mask.bool()), pytest.raises(InputError, match="mask"):
        run(CASE, exact())


@pytest.mark.parametrize(
    "mask", [torch.ones(16), torch.ones(2, 4, 2, dtype=torch.bool)], ids=["float", "three dimensions"]
)
def test_a_mask_of_the_wrong_kind_is_refused(mask: Tensor) -> None:
    with pytest.raises(InputError, match="mask"), lrmoe.padding(mask):
        run(CASE, exact())


def masked_rank(config: Any) -> Result:
    rows = slice(0, 8) if dist.get_rank() == 0 else slice(8, 16)
    part = padded(float("nan")).tokens(rows.start, rows.stop)
    return run(part, config, group=dist.group.WORLD, mask=MASK[rows]).result


@pytest.mark.distributed
def test_two_ranks_with_uneven_padding(pool2: Pool) -> None:
    ranks = pool2.run(masked_rank, exact())
    wanted = plain_loop(unpadded())
    torch.testing.assert_close(torch.cat([r.out for r in ranks])[MASK], wanted.out, rtol=1e-10, atol=1e-12)
    for name in ("d_gate_up", "d_down"):
        joined = torch.cat([getattr(r, name) for r in ranks])
        torch.testing.assert_close(joined, getattr(wanted, name), rtol=1e-10, atol=1e-12)
