"""The memory model against what a call really allocates, on several ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.calls import spread
from tests.distributed.pool import Pool
from tests.layer.harness import exact, pruning
from tests.reference import make_case

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("activations", ["stash", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_exact_call_is_predicted_to_the_byte(pool2: Pool, dtype: torch.dtype, activations: str) -> None:
    case = make_case(tokens=41, experts=8, top_k=3, dtype=dtype)
    for record in spread(
        pool2, case, exact(activations=activations, replica_slots=0), sizes=[30, 11]
    ).records:
        assert record.mem == record.mem_predicted


@pytest.mark.parametrize(
    "fields", [{}, *({"select_in": "forward", "score": score} for score in ("alpha", "alpha_phi"))]
)
def test_a_pruned_call_differs_only_by_which_source_keeps_how_many(
    pool2: Pool, fields: dict[str, str]
) -> None:
    case = make_case(tokens=300, experts=8, top_k=3)
    for record in spread(pool2, case, pruning(max_drop=0.4, replica_slots=0, **fields)).records:
        for part, size in record.mem.items():
            near = 0.1 if part == "backward" else 0.0
            assert record.mem_predicted[part] == pytest.approx(size, rel=near), part
