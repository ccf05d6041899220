"""How often the host waits for a device in a call, and what the device has been asked for by then."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lrmoe.layer import announce, replay, reroute, routing, wire
from lrmoe.ops import Reading
from tests.layer.harness import build, forward, leaves, pruning
from tests.reference import GRADS, make_case

CASE = make_case(tokens=16, experts=4)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Readings from a device as they start and are waited for, and the sort of pairs."""
    seen: list[str] = []

    class Watched(Reading):
        def __init__(self, values: Tensor) -> None:
            seen.append("start")
            super().__init__(values)

        def wait(self) -> Tensor:
            seen.append("wait")
            return super().wait()

    def sort_keys(*given: Any) -> Tensor:
        seen.append("sort")
        return routing.sort_keys(*given)

    monkeypatch.setattr(announce, "sort_keys", sort_keys)
    for module in (announce, replay, reroute, wire):
        monkeypatch.setattr(module, "Reading", Watched)
    return seen


@pytest.mark.parametrize(
    "fields", [{}, {"estimator": "topk"}, {"score": "alpha", "select_in": "forward"}], ids=str
)
def test_one_rank_waits_once_a_call_while_its_pairs_are_sorted(
    fields: dict[str, Any], log: list[str]
) -> None:
    layer, leaf = build(CASE, pruning(max_drop=0.5, **fields)), leaves(CASE, GRADS)
    out = forward(layer, CASE, leaf)
    assert log == ["start", "sort", "wait"]
    out.backward(CASE.grad_out)
    assert log == ["start", "sort", "wait"], "backward reads nothing"
