"""Expert parallelism with nothing dropped equals the float64 loop in one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.distributed.calls import spread
from tests.distributed.pool import Pool
from tests.layer.harness import exact, run
from tests.reference import GRADS, assert_result, make_case

pytestmark = pytest.mark.distributed
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks(pool2: Pool, dtype: torch.dtype, activations: str) -> None:
    case = make_case(tokens=41, experts=8, top_k=3, dtype=dtype)
    found = spread(pool2, case, exact(activations=activations))
    assert_result(found.result, case)
    assert [r.pairs for r in found.records] == [123, 123]


@pytest.mark.parametrize("dtype", DTYPES)
def test_four_ranks(pool4: Pool, dtype: torch.dtype) -> None:
    case = make_case(tokens=50, experts=8, top_k=3, dtype=dtype, seed=1)
    assert_result(spread(pool4, case, exact()).result, case)


def test_eight_ranks_of_one_expert_each(pool8: Pool) -> None:
    case = make_case(tokens=30, experts=8, top_k=2, seed=2)
    assert_result(spread(pool8, case, exact()).result, case)


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_checkpointing(pool2: Pool, checkpoint: str) -> None:
    case = make_case(tokens=40, experts=4)
    assert_result(spread(pool2, case, exact(), checkpoint=checkpoint).result, case)


@pytest.mark.parametrize(
    "needs", [("d_hidden",), ("d_weights",), ("d_down",), ("d_hidden", "d_gate_up")], ids="+".join
)
def test_frozen_parts(pool2: Pool, needs: tuple[str, ...]) -> None:
    case = make_case(tokens=20, experts=4)
    found = spread(pool2, case, exact(), needs=needs).result
    for name in GRADS:
        assert (getattr(found, name) is not None) == (name in needs)
    assert_result(found, case)


def test_routing_weights_wider_than_the_rows(pool2: Pool) -> None:
    case = make_case(tokens=30, experts=4, seed=3)
    mixed = dataclasses.replace(case.to(torch.bfloat16), weights=case.weights.float())
    assert_result(spread(pool2, mixed, exact()).result, mixed)


def test_ids_without_expert_and_doubled_experts(pool2: Pool) -> None:
    case = make_case(tokens=30, experts=4, top_k=3)
    ids = case.ids.clone()
    ids[::5, 0], ids[1::5, 2], ids[2::5] = -1, 4, ids[2::5, :1]
    case = dataclasses.replace(case, ids=ids)
    assert_result(spread(pool2, case, exact()).result, case)


def test_gelu(pool2: Pool) -> None:
    case = make_case(tokens=20, experts=4, activation="gelu_tanh")
    assert_result(spread(pool2, case, exact()).result, case)


def test_layouts_agree_in_float64(pool2: Pool, pool4: Pool) -> None:
    case = make_case(tokens=24, experts=4)
    alone = run(case, exact()).result
    for pool in (pool2, pool4):
        for name in ("out", *GRADS):
            found = getattr(spread(pool, case, exact()).result, name)
            torch.testing.assert_close(found, getattr(alone, name), rtol=1e-10, atol=1e-13)
