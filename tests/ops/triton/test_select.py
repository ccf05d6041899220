"""Kernels that choose rows: the same bits as the layer's own selection on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lrmoe.layer import selection
from lrmoe.layer.randomness import UNIT
from lrmoe.layer.selection import Candidates, Choice
from lrmoe.ops.triton import select
from lrmoe.ops.triton.rule import SELECT_ROWS
from tests.ops.triton.inputs import DEVICE

NAN, INF = float("nan"), float("inf")
COUNTS = [0, 1, 7, 30, 0, 9, 40, 33, 1, 64, 0]
QUOTAS = [0, 1, 2, 0, 0, 8, 25, 33, 0, 1, 0]  # none, some, all but one, all
KINDS = ["spread", "wide", "equal", "zero", "tied", "tiny", "broken", "all broken"]


BLOCKS = select._BLOCKS  # as on a device


def scores(kind: str, rows: int, seed: int = 0) -> Tensor:
    """Scores of one kind, fp32 on the CPU."""
    gen = torch.Generator().manual_seed(seed)
    found = torch.exp((6 if kind == "wide" else 1) * torch.randn(rows, generator=gen))
    if kind == "equal":
        found[:] = 0.7
    elif kind == "zero":
        found[torch.rand(rows, generator=gen) < 0.8] = 0
        found[torch.rand(rows, generator=gen) < 0.1] = -0.0
    elif kind == "tied":
        found = found.mul(2).round() / 2
    elif kind == "tiny":
        found *= 1e-41  # subnormal
    elif kind == "broken":
        found[::5], found[3::11], found[4::13] = NAN, INF, -INF
    elif kind == "all broken":
        found[:] = NAN
    return found


def table(kind: str, quotas: dict[int, int] | None = None, *, seed: int = 0) -> Candidates:
    """Candidates on the CPU; quotas by count."""
    gen = torch.Generator().manual_seed(seed + 1)
    counts, wanted = (COUNTS, QUOTAS) if quotas is None else (list(quotas), list(quotas.values()))
    return Candidates(
        score_M=scores(kind, sum(counts), seed),
        counts_L=torch.tensor(counts),
        quota_L=torch.tensor(wanted),
        offset_L=torch.randint(0, UNIT, (len(counts),), generator=gen),
        word_L=torch.randint(-(2**62), 2**62, (len(counts),), generator=gen),
    )


def on_device(rows: Candidates) -> Candidates:
    """The same where kernels run."""
    return Candidates(**{name: getattr(rows, name).to(DEVICE) for name in Candidates.__dataclass_fields__})


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 rows: a long expert spans several."""
    monkeypatch.setattr(select, "_BLOCKS", (64, 64))


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The layer's selection calls the kernels, as it does on CUDA."""
    with monkeypatch.context() as patch:
        patch.setattr(selection, "_kernels", lambda rows: select)
        yield patch


def assert_same(found: Choice, wanted: Choice) -> None:
    assert torch.equal(found.weight_M.cpu(), wanted.weight_M)
    assert found.weight_M.dtype == wanted.weight_M.dtype
    for name in ("energy", "dropped", "variance", "nonfinite"):
        ours, theirs = getattr(found.loss, name), getattr(wanted.loss, name)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(
            ours.cpu(), theirs, rtol=1e-12, atol=1e-300, msg=f"{name}: {ours} and {theirs}"
        )


def check(estimator: str, rows: Candidates) -> None:
    wanted = selection.choose(estimator, "lrm", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_kernels", lambda rows: select)
        assert_same(selection.choose(estimator, "lrm", on_device(rows)), wanted)


@pytest.mark.parametrize(
    ("estimator", "kind"),
    [
        *(("sampled", kind) for kind in KINDS),
        *(("topk", kind) for kind in ("zero", "tied", "tiny", "broken")),
    ],
)
def test_the_same_rows_and_weights_bit_for_bit(estimator: str, kind: str) -> None:
    check(estimator, table(kind))


def test_the_same_probabilities_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table("broken", seed=5)
    wanted = selection.inclusion(rows)
    monkeypatch.setattr(selection, "_kernels", lambda rows: select)
    assert torch.equal(selection.inclusion(on_device(rows)).cpu(), wanted)


@pytest.mark.parametrize("kind", ["spread", "tied"])
@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_an_expert_of_several_blocks(estimator: str, kind: str) -> None:
    check(estimator, table(kind, {3: 1, 200: 50, 0: 0, 1: 1}))


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_blocks_as_large_as_on_a_device(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_BLOCKS", BLOCKS)
    assert select.block_rows(5005, 4) == 2048
    check(estimator, table("tied", {3: 3, 5000: 1250, 0: 0, 2: 1}))


def test_no_rows_at_all(by_kernels: pytest.MonkeyPatch) -> None:
    rows = on_device(table("spread", {0: 0}))
    for estimator in ("topk", "sampled"):
        choice = selection.choose(estimator, "lrm", rows)
        assert choice.weight_M.shape == (0,)
        assert float(choice.loss.energy) == float(choice.loss.variance) == float(choice.loss.dropped) == 0
        assert int(choice.loss.nonfinite) == 0
    assert selection.inclusion(rows).shape == (0,)


def test_strided_scores_are_read_as_they_lie(by_kernels: pytest.MonkeyPatch) -> None:
    rows = table("spread", {5: 2, 40: 20})
    apart = torch.stack([rows.score_M, torch.full_like(rows.score_M, NAN)], dim=1)[:, 0]
    found = selection.choose("sampled", "lrm", on_device(Candidates(**{**rows.__dict__, "score_M": apart})))
    by_kernels.undo()
    assert_same(found, selection.choose("sampled", "lrm", rows))


def test_runs_repeat(by_kernels: pytest.MonkeyPatch) -> None:
    rows = on_device(table("wide", {5: 2, 40: 20}))
    first = selection.choose("sampled", "lrm", rows)
    again = selection.choose("sampled", "lrm", rows)
    assert torch.equal(first.weight_M, again.weight_M)
    assert torch.equal(first.loss.variance, again.loss.variance)


@pytest.mark.parametrize(
    ("rows", "experts", "block", "warps"),
    [(1, 1, 512, 2), (512 * 8, 8, 512, 2), (513 * 8, 8, 1024, 4), (4096, 2, 2048, 8), (10**6, 1, 2048, 8)],
)
def test_blocks_hold_an_average_expert(
    rows: int, experts: int, block: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "_BLOCKS", BLOCKS)
    assert select.block_rows(rows, experts) == block
    assert select.warps(block) == warps


def test_a_cpu_and_many_rows_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table("spread")
    assert selection._kernels(rows) is None
    seen: list[Tensor] = []
    monkeypatch.setattr(selection, "usable", lambda *tensors: seen.extend(tensors))

    class Claims:
        """Scores that say they lie on a GPU."""

        is_cuda = True

        def __init__(self, rows: int) -> None:
            self.shape = (rows,)

    def claimed(count: int) -> Candidates:
        claims: Any = Claims(count)
        return dataclasses.replace(rows, score_M=claims)

    assert selection._kernels(claimed(SELECT_ROWS)) is select
    assert len(seen) == 1
    assert selection._kernels(claimed(SELECT_ROWS + 1)) is None
    monkeypatch.setattr(selection, "usable", lambda *tensors: "switched off")
    assert selection._kernels(claimed(5)) is None
