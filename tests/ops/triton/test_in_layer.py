"""The layer with kernels that choose rows and multiply segments against the layer without them, both on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lrmoe import ops
from lrmoe.layer import experts, selection
from lrmoe.ops.triton import grouped, interpreted, select
from tests.layer.harness import pruning, run
from tests.reference import GRADS, make_case

pytestmark = pytest.mark.skipif(not interpreted(), reason="tensors of the CPU, which the interpreter takes")
CASE = make_case(tokens=20, experts=3, top_k=2, hidden=16, width=12, seed=2, dtype=torch.float32)


def use_kernels(patch: pytest.MonkeyPatch) -> list[str]:
    """As on CUDA where the rule sends everything to kernels; the list tells which products read rows by index."""
    by_index: list[str] = []

    def watched(name: str) -> Any:
        product = getattr(grouped, name)

        def call(*given: Any, index_N: Any = None, **named: Any) -> Any:
            by_index.extend([name] * (index_N is not None))
            return product(*given, index_N=index_N, **named)

        return call

    for name in ("grouped_mm", "grouped_mm_weight"):
        patch.setattr(grouped, name, watched(name))
    patch.setattr(ops.grouped, "_way", lambda *given, **named: "triton")
    patch.setattr(experts, "reads_by_index", lambda *given, **named: True)
    patch.setattr(experts, "_packs_early", lambda x: False)
    patch.setattr(selection, "_kernels", lambda rows: select)
    return by_index


@pytest.mark.parametrize(
    ("fields", "by_index"),
    [
        ({"estimator": "sampled"}, ["grouped_mm", "grouped_mm_weight"]),
        ({"estimator": "topk", "activations": "stash"}, ["grouped_mm", "grouped_mm_weight"]),
        # Computed again from packed inputs, which then serve the weight gradient as well.
        ({"activations": "recompute"}, ["grouped_mm"]),
        ({"max_drop": 0.0}, ["grouped_mm", "grouped_mm_weight"]),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_the_same(
    fields: dict[str, Any], by_index: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pruning(**{"max_drop": 0.5, "router_grad": "retained", **fields})
    plain = run(CASE, config)
    read = use_kernels(monkeypatch)
    found = run(CASE, config)
    assert set(read) == set(by_index)
    assert found.record.kept == plain.record.kept
    for name in ("out", *GRADS):
        ours, theirs = getattr(found.result, name), getattr(plain.result, name)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=f"{name}: {ours} and {theirs}")
        assert torch.equal(ours == 0, theirs == 0) or name != "d_weights", "another choice"
