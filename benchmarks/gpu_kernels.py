"""Every Triton kernel on its own for `gpu_check.py`, whether or not `lrmoe.ops` would use it for these tensors.

On a CPU they run in triton's interpreter, where TRITON_INTERPRET=1 is set; else they are left out, and that is said.

Shape letters: E experts, N rows (pairs).
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from gpu_ops import check_activation, check_grouped, check_rows, poisoned, segment_counts
from gpu_report import NAMES, Report
from plain import Shape
from torch import Tensor

from lrmoe.layer.randomness import UNIT
from lrmoe.layer.selection import _UNITS as UNITS
from lrmoe.layer.selection import Candidates, keep_sampled, keep_top
from lrmoe.ops.triton import interpreted, missing

SMALL = Shape(tokens=40, hidden=40, width=24, experts=8, top_k=2, repeats=1)  # for the interpreter


def why_not(device: torch.device) -> str | None:
    """Why kernels cannot run here, or None."""
    trouble = missing()
    if trouble is None and device.type != "cuda" and not interpreted():
        return f"kernels need cuda, or TRITON_INTERPRET=1 on {device.type}"
    return trouble


def check_kernels(report: Report, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """All kernels that work on rows in one dtype, against float64."""
    fits = _runnable(report, shape, device)
    if fits is None:
        return
    shape, name = fits, f"triton.{NAMES[dtype]}"
    rows, activation = _module("rows"), _module("activation")
    check_rows(report, name, rows, shape, dtype, device, seed)
    _check_scaled(report, name, rows, shape, dtype, device, seed)
    check_activation(report, name, activation, shape, dtype, device, seed)
    _check_norms(report, name, activation, shape, dtype, device, seed)
    _check_products(report, shape, dtype, device, seed)


def check_chosen(report: Report, shape: Shape, device: torch.device, seed: int) -> None:
    """The kernels' choice of kept rows against the one without a kernel, bit for bit."""
    fits = _runnable(report, shape, device)
    if fits is not None:
        _check_selection(report, fits, device, seed)


def _runnable(report: Report, shape: Shape, device: torch.device) -> Shape | None:
    """The shape to check kernels at, None (which is said) where they cannot run."""
    trouble = why_not(device)
    if trouble is not None:
        report.left_out(f"Triton kernels: {trouble}")
        return None
    return shape if device.type == "cuda" else SMALL


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"lrmoe.ops.triton.{name}")


def _check_scaled(
    report: Report,
    name: str,
    rows: ModuleType,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> None:
    """Packing with a factor for each row."""
    gen = torch.Generator(device=device).manual_seed(seed)
    source = torch.randn(shape.tokens, shape.hidden, generator=gen, device=device).to(dtype)
    index_N = torch.randint(0, shape.tokens, (shape.tokens * shape.top_k,), generator=gen, device=device)
    scale_N = torch.rand(len(index_N), generator=gen, device=device)
    found = rows.gather_rows(source, index_N, out=poisoned(source[index_N]), scale_N=scale_N)
    exact = source[index_N].double() * scale_N.double()[:, None]
    report.check(f"{name}.gather_scaled", [found], [exact], [exact.to(dtype)])


def _check_norms(
    report: Report,
    name: str,
    activation: ModuleType,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> None:
    """Norms that the activation leaves beside its rows: those of the rows as they are rounded."""
    gen = torch.Generator(device=device).manual_seed(seed)
    h_N2I = 4 * torch.randn(shape.tokens, 2 * shape.width, generator=gen, device=device).to(dtype)
    norm_N = poisoned(h_N2I[:, 0].float())
    phi = activation.gated_activation(h_N2I, "silu", out=poisoned(h_N2I[:, : shape.width]), norm_N=norm_N)
    exact, plain = (torch.linalg.vector_norm(phi.to(t), dim=1) for t in (torch.float64, torch.float32))
    report.check(f"{name}.silu_norms", [norm_N], [exact], [plain])


class _Grouped:
    """The grouped products' kernels with the signatures of `lrmoe.ops`."""

    def __init__(self) -> None:
        self.kernels = _module("grouped")

    def grouped_mm(self, rows: Tensor, weight: Tensor, counts: list[int], *, out: Tensor) -> Tensor:
        found: Tensor = self.kernels.grouped_mm(rows, weight.transpose(1, 2), counts, out=out)
        return found

    def grouped_mm_input(self, grad: Tensor, weight: Tensor, counts: list[int], *, out: Tensor) -> Tensor:
        found: Tensor = self.kernels.grouped_mm(grad, weight, counts, out=out)
        return found

    def grouped_mm_weight(
        self, grad: Tensor, rows: Tensor, counts: list[int], *, out: Tensor, add: bool = False
    ) -> Tensor:
        found: Tensor = self.kernels.grouped_mm_weight(grad, rows, counts, out=out, add=add)
        return found


def _check_products(
    report: Report, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    has, name = _Grouped(), f"triton.{NAMES[dtype]}"
    for label, counts in segment_counts(shape):
        check_grouped(report, f"{name}.{label}", has, shape, counts, dtype, device, seed)
    counts = segment_counts(shape)[0][1]
    gen = torch.Generator(device=device).manual_seed(seed)
    source = torch.randn(shape.tokens, shape.hidden, generator=gen, device=device).to(dtype)
    weight = torch.randn(shape.experts, shape.width, shape.hidden, generator=gen, device=device).to(dtype)
    index_N = torch.randint(0, shape.tokens, (sum(counts),), generator=gen, device=device)
    place_N = torch.randperm(sum(counts), generator=gen, device=device)
    found = has.kernels.grouped_mm(
        source, weight.transpose(1, 2), counts, out=source.new_full((sum(counts), shape.width), float("nan")),
        index_N=index_N, place_N=place_N,
    )  # fmt: skip
    exact, plain = (
        torch.cat(
            [
                rows @ one.T
                for rows, one in zip(source[index_N].to(t).split(counts), weight.to(t), strict=True)
            ]
        )
        for t in (torch.float64, dtype)
    )
    report.check(f"{name}.gathered", [found[place_N]], [exact], [plain])


def _check_selection(report: Report, shape: Shape, device: torch.device, seed: int) -> None:
    """The same rows as on a CPU without kernels, with the same weights; ties, zeros and broken scores among them."""
    gen, select = torch.Generator().manual_seed(seed), _module("select")
    counts_L = torch.tensor(segment_counts(shape)[0][1])
    score_M = torch.exp(2 * torch.randn(int(counts_L.sum()), generator=gen))
    score_M[::7] = 0.25
    score_M[3::50], score_M[5::90], score_M[11::60] = 0.0, float("nan"), float("inf")
    table = Candidates(
        score_M=score_M,
        counts_L=counts_L,
        quota_L=(counts_L * torch.rand(len(counts_L), generator=gen)).ceil().long(),
        offset_L=torch.randint(0, UNIT, counts_L.shape, generator=gen),
        word_L=torch.zeros_like(counts_L),
    )
    given = [t.to(device) for t in (table.score_M, table.counts_L, table.quota_L, table.offset_L)]
    for name, found, wanted in (
        ("topk", select.keep_top(*given[:3])[0], keep_top(table)),
        ("sampled", select.keep_sampled(*given, UNITS)[0], keep_sampled(table)),
    ):
        differ = int((found.cpu() != wanted.weight_M).sum())
        report.at_most(f"triton.select.{name}.differing_rows", differ, 0, "rows")
