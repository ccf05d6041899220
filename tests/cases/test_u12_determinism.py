"""U12: bitwise equal runs, in torch's deterministic mode, without a refusal; ties in a stated order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.calls import spread
from tests.distributed.pool import Pool
from tests.layer.harness import exact, pruning, run
from tests.reference import GRADS, make_case

CASE = make_case(tokens=256, experts=8, top_k=4, hidden=64, width=32, dtype=torch.bfloat16)
MODES = {
    "exact": exact(),
    "recompute": exact(activations="recompute"),
    "sampled": pruning(max_drop=0.5),
    "topk": pruning(max_drop=0.5, estimator="topk"),
    "tied scores": pruning(max_drop=0.5, score="random"),
    "topk of tied scores": pruning(max_drop=0.5, score="grad_norm", estimator="topk"),
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", MODES)
def test_twenty_runs_agree_bitwise(mode: str) -> None:
    first = run(CASE, MODES[mode])
    for _ in range(19):
        again = run(CASE, MODES[mode])
        for name in ("out", *GRADS):
            assert torch.equal(getattr(first.result, name), getattr(again.result, name)), name
        assert first.quota_E == again.quota_E


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["exact", "sampled", "topk"])
def test_ranks_agree_bitwise_from_run_to_run(pool2: Pool, mode: str) -> None:
    first = spread(pool2, CASE, MODES[mode]).result
    for _ in range(3):
        again = spread(pool2, CASE, MODES[mode]).result
        for name in ("out", *GRADS):
            assert torch.equal(getattr(first, name), getattr(again, name)), name
