"""check_every over several ranks: all ranks' gradients as one vector, and training that does not notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.distributed.calls import Spread, spread
from tests.distributed.pool import Pool
from tests.layer.harness import pruning
from tests.layer.test_check import ZERO_TIME, compared
from tests.reference import GRADS, make_case

pytestmark = pytest.mark.distributed
CASE = make_case(tokens=61, experts=8, top_k=3, seed=1, skew=3.0)
SIZES = {2: [20, 41], 4: [1, 30, 0, 30]}


def check(pool: Pool, **fields: Any) -> Spread:
    """Figures against the float64 loop on every rank; same bits and records as without the check."""
    config = pruning(max_drop=0.5, **fields)
    checked, plain = (
        spread(pool, CASE, config.replace(check_every=every), sizes=SIZES[pool.world_size])
        for every in (1, 0)
    )
    for name in ("out", *GRADS):
        assert torch.equal(getattr(checked.result, name), getattr(plain.result, name)), name
    blank = {"check_cosine": None, "check_relative_error": None, "peak_measured": 0, **ZERO_TIME}
    for one, other in zip(checked.records, plain.records, strict=True):
        assert dataclasses.replace(one, **blank) == dataclasses.replace(other, **blank)
    cosine, error = compared(checked.result, CASE)
    assert error > 0.05
    for record in checked.records:
        assert record.check_cosine == pytest.approx(cosine, rel=1e-9)
        assert record.check_relative_error == pytest.approx(error, rel=1e-9)
    return checked


@pytest.mark.parametrize("lean_wire", ["auto", False])
@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_equals_the_reference(pool2: Pool, estimator: str, activations: str, lean_wire: Any) -> None:
    check(pool2, estimator=estimator, activations=activations, lean_wire=lean_wire)


@pytest.mark.parametrize("selection", ["global", "local"])
def test_four_ranks_one_without_tokens(pool4: Pool, selection: str) -> None:
    check(pool4, selection=selection, lean_wire="auto")
