"""The layer with every kernel in the place it has on CUDA, against the plain loop in float64.

In the interpreter rows lie on a CPU: what asks where they lie is told otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lrmoe.layer import experts
from lrmoe.ops import fused, grouped
from lrmoe.ops.triton import interpreted, passes
from tests.layer.harness import exact, pruning, run
from tests.reference import assert_result, make_case

pytestmark = pytest.mark.skipif(not interpreted(), reason="cases lie on a CPU")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the passes that ran."""
    names: set[str] = set()
    for name in ("gate", "gate_backward", "norms", "combine", "move"):
        work = getattr(passes, name)

        def named(*given: Any, name: str = name, work: Callable[..., Any] = work, **more: Any) -> Any:
            names.add(name)
            return work(*given, **more)

        monkeypatch.setattr(passes, name, named)
    monkeypatch.setattr(passes, "usable", lambda *tensors: None)
    monkeypatch.setattr(fused, "cpu", passes)
    monkeypatch.setattr(grouped, "_way", lambda *a, **k: "triton")
    return names


@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16]
)  # bf16 is cut, not rounded, by the interpreter
def test_exact(dtype: torch.dtype, by_index: bool, calls: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "reads_by_index", lambda *a, **k: by_index)
    case = make_case(tokens=12, experts=4, dtype=dtype)
    mixed = dataclasses.replace(case, weights=case.weights.float())
    activations = "recompute" if by_index else "stash"
    assert_result(run(mixed, exact(activations=activations)).result, mixed)
    assert calls >= {"gate", "gate_backward", "combine"} | (set() if by_index else {"move"})


def test_pruned(calls: set[str]) -> None:
    case = make_case(tokens=24, experts=4, dtype=torch.float32)
    found = run(case, pruning(max_drop=0.4, estimator="topk", router_grad="retained"))
    assert found.result.d_weights is not None
    keep_TK = (found.result.d_weights != 0).double()
    assert 0 < int(keep_TK.sum()) < keep_TK.numel()
    assert_result(found.result, case, keep_TK=keep_TK, router_grad="retained")
    assert calls == {"gate", "gate_backward", "norms", "combine", "move"}
