"""The memory model against what a call really allocates, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.layer.harness import build, exact, pruning, run
from tests.reference import GRADS, make_case

MODES = {
    "stash": exact(activations="stash"),
    "recompute": exact(activations="recompute"),
    "sampled": pruning(max_drop=0.5),
    "topk": pruning(max_drop=0.5, estimator="topk", router_grad="retained"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_every_part_is_predicted_to_the_byte(mode: str, dtype: torch.dtype) -> None:
    case = make_case(tokens=64, experts=4, hidden=32, width=24, dtype=dtype)
    record = run(case, MODES[mode], layer=build(case, MODES[mode])).record
    assert record.mem == record.mem_predicted


@pytest.mark.parametrize("needs", [("d_hidden",), ("d_gate_up", "d_down"), GRADS], ids="+".join)
def test_parts_without_gradient_are_not_predicted(needs: Any) -> None:
    case = make_case(tokens=64, experts=4, hidden=32, width=24)
    record = run(case, exact(), needs=needs).record
    assert record.mem == record.mem_predicted
