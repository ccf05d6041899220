"""Tiles by shape, when kernels are used, and what keeps triton from being loaded."""

from __future__ import annotations

import ast
import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lrmoe import ops
from lrmoe.ops import triton as package
from lrmoe.ops.triton import launch, missing, off, tile, usable
from tests.ops.triton.inputs import DEVICE

SOURCES = sorted(Path(package.__file__).parent.glob("*.py"))


@pytest.mark.parametrize(
    ("width", "columns", "rows"),
    [
        (0, 1, 32), (1, 1, 32), (5, 8, 32), (33, 16, 32), (64, 64, 32), (192, 64, 32), (768, 256, 16),
        (1024, 1024, 4), (1408, 512, 8), (2048, 1024, 4), (4096, 1024, 4), (2**31, 1024, 4),
    ],
)  # fmt: skip
def test_tiles_follow_from_the_width(width: int, columns: int, rows: int) -> None:
    assert tile(width) == launch.Tile(rows=rows, columns=columns)


def test_tiles_are_powers_of_two_and_cover_everything() -> None:
    for width in range(1, 3000, 7):
        for elements in (2048, 4096):
            block = tile(width, elements=elements)
            for side in (block.rows, block.columns):
                assert side & (side - 1) == 0
            assert block.rows * block.columns <= elements
            assert 0 <= block.parts(width) * block.columns - width < block.columns
            assert 0 <= block.programs(width) * block.rows - width < block.rows
            assert block.parts(width) * block.columns <= max(1.5 * width, width + 15)
    assert tile(768, rows=1).rows == 1
    assert tile(768).programs(0) == 0


def test_a_program_has_as_many_warps_as_have_16_bytes_a_thread() -> None:
    one = tile(1536, rows=1)
    assert (one.columns, one.warps(torch.bfloat16), one.warps(torch.float32)) == (512, 2, 4)
    assert tile(1024).warps(torch.float32) == 4
    assert tile(1).warps(torch.bfloat16) == 1


def test_grids_stay_within_what_cuda_takes() -> None:
    """First axis below 2^31 programs for 2^32 rows, second below 2^16 for the widest rows."""
    assert tile(512).programs(2**32) < 2**31
    assert tile(2**25).parts(2**25) < 2**16


def test_cpu_tensors_and_other_dtypes_stay_with_torch() -> None:
    assert usable(torch.ones(2)) == "tensors are on cpu, kernels need cuda"
    assert usable(torch.ones(2, device="meta")) == "tensors are on meta, kernels need cuda"


def test_a_tensor_that_only_looks_like_one_stays_with_torch() -> None:
    with FakeTensorMode():
        found = usable(torch.empty(2, device="cuda"))
    assert found == "kernels read memory, which a FakeTensor may not have"


class _Cuda:
    """A CUDA tensor as far as `usable` looks at it."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> None:
        self.dtype, self.requires_grad = dtype, requires_grad


def cuda_tensor(dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> Any:
    return _Cuda(dtype, requires_grad=requires_grad)


def test_cuda_tensors_are_taken_unless_something_speaks_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = [None]
    monkeypatch.setattr(launch, "_device_trouble", lambda device: found[0])
    assert usable(cuda_tensor()) is None
    assert usable(cuda_tensor(torch.float64)) == "no kernel for float64"
    leaf = cuda_tensor(requires_grad=True)
    assert "not differentiable" in (usable(leaf) or "")
    with torch.no_grad():
        assert usable(leaf) is None
    with off():
        assert usable(cuda_tensor()) == "switched off"
    found[0] = "no compiler"
    assert usable(cuda_tensor()) == "no compiler"
    monkeypatch.setattr(launch, "missing", lambda: "no triton")
    assert usable(cuda_tensor()) == "no triton"


def test_a_device_is_tried_once_and_its_trouble_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch._device_trouble.cache_clear()
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "_trial", lambda device: "RuntimeError: no compiler")
    with caplog.at_level(logging.WARNING, logger=launch.__name__):
        assert launch._device_trouble(device) == launch._device_trouble(device) == "RuntimeError: no compiler"
    assert len(caplog.records) == 1
    launch._device_trouble.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert launch._device_trouble(device) == "compute capability 7.5 is below 8.0"
    launch._device_trouble.cache_clear()


@pytest.mark.skipif(missing() is not None, reason="triton is not installed")
def test_the_trial_runs_a_kernel_and_looks_at_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, device = importlib.import_module("lrmoe.ops.triton.rows"), torch.device(DEVICE)
    assert launch._trial(device) is None
    monkeypatch.setattr(rows, "row_norms", lambda rows: torch.tensor([5.0]))
    assert launch._trial(device) == "wrong numbers (5.0 instead of 6.0)"

    def broken(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(rows, "row_norms", broken)
    assert launch._trial(device) == "RuntimeError: no compiler"


def _imports_triton(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "triton" in text else ():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.split(".")[0] == "triton" for name in names):
            return True
    return False


def test_triton_is_imported_by_kernels_alone() -> None:
    folder = Path(package.__file__).parent
    found = {path for path in folder.parents[1].rglob("*.py") if _imports_triton(path)}
    assert folder / "rows.py" in found
    assert {path.parent for path in found} == {folder}
    assert found.isdisjoint({folder / "__init__.py", folder / "launch.py"})


def test_cpu_work_does_not_ask_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> str:
        raise AssertionError("triton was asked for")

    monkeypatch.setattr(launch, "missing", asked)
    h, index = torch.ones(2, 4), torch.arange(2)
    phi = ops.gated_activation(h, "silu")
    ops.gated_activation_backward(phi.clone(), h, torch.ones(2), "silu")
    ops.row_norms(ops.gather_rows(h, index))
    ops.combine(ops.place_rows(h, index, h.clone()), index, index + 1)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_argument_of_a_kernel_is_annotated_with_a_fixed_width(path: Path) -> None:
    """Triton reads `int` as 32 bits and cuts a larger stride without a word."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            for argument in node.args.args:
                assert argument.annotation is not None
                allowed = {"tl.tensor", "tl.tensor | None", "tl.constexpr"}
                assert ast.unparse(argument.annotation) in allowed, f"{node.name}: {argument.arg}"
