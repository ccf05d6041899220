"""The compiled CPU passes: accuracy, special values, independence of a row, and what happens where there are none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lrmoe.doctor import paths
from lrmoe.ops import combine, cpu, fuses, gated_activation, gated_activation_backward, row_norms
from lrmoe.ops.activation import ACTIVATIONS
from lrmoe.ops.cpu import build, library

KINDS = list(ACTIVATIONS)
NUMBERS = [torch.float32, torch.bfloat16]
compiled = pytest.mark.skipif(not cpu.state()[0], reason=f"compiled passes: {cpu.state()[1]}")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def backward_of(h: Tensor, dphi: Tensor, kind: str) -> tuple[Tensor, ...]:
    return gated_activation_backward(dphi.clone(), h, torch.linspace(0.5, 2, len(h)), kind)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_slopes_are_right_to_a_few_units_in_the_last_place(level: int | None, kind: str) -> None:
    gate = torch.cat(
        [torch.linspace(-12, 12, 4001), torch.logspace(-30, 1.9, 500), -torch.logspace(-30, 1.9, 500)]
    )
    h = torch.stack([gate, torch.ones_like(gate)], dim=1)
    exact, ones = h.double().requires_grad_(), torch.ones(len(h))
    truth = ACTIVATIONS[kind][0](exact[:, 0])
    (slope,) = torch.autograd.grad(truth.sum(), exact)
    found, _, dot = gated_activation_backward(torch.ones(len(h), 1), h, ones, kind)
    # Far out on the left a value is a difference of nearly equal numbers: there a unit is one of its argument.
    unit = torch.finfo(torch.float32).eps * torch.maximum(
        truth.detach().abs(), 0.5 * gate.double().abs().clamp(max=8)
    )
    for name, one in (("value", gated_activation(h, kind)[:, 0]), ("dot", dot), ("d up", found[:, 1])):
        error = ((one.double() - truth.detach()).abs() / unit.clamp(min=1e-44)).max()
        assert float(error) <= 4, f"{name}: {float(error)} units"
    assert float((found[:, 0].double() - slope[:, 0]).abs().max()) <= 8 * torch.finfo(torch.float32).eps


@compiled
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_are_those_of_torch(level: int | None, kind: str, dtype: torch.dtype) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 0.0, -0.0, 1.0, -90.0, 90.0])
    h = torch.cartesian_prod(odd, odd).to(dtype)
    dphi, scale = torch.ones(len(h), 1, dtype=dtype), torch.ones(len(h))
    found = gated_activation(h, kind), *gated_activation_backward(dphi.clone(), h, scale, kind)
    with cpu.limited(None):
        plain = gated_activation(h, kind), *gated_activation_backward(dphi.clone(), h, scale, kind)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.isinf() * one.sign(), other.isinf() * other.sign())


@compiled
@pytest.mark.parametrize("level", range(len(cpu.LEVELS)), ids=cpu.LEVELS, indirect=True)
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("width", [1, 65, 200])
def test_a_row_does_not_depend_on_threads_neighbours_or_place(
    level: int | None, width: int, dtype: torch.dtype
) -> None:
    rows = 300
    h, dphi = normal(rows, 2 * width, dtype=dtype), normal(rows, width, seed=1, dtype=dtype)
    index, ends = torch.arange(rows).flip(0), torch.arange(1, rows // 3 + 1) * 3
    weight, norm = torch.linspace(-1, 1, rows), torch.empty(rows)
    whole = (gated_activation(h, "gelu", norm_N=norm), norm, *backward_of(h, dphi, "gelu"))
    sums = combine(dphi, index, ends, weight)
    with threads(2):
        other = torch.empty(rows)
        again = (gated_activation(h, "gelu", norm_N=other), other, *backward_of(h, dphi, "gelu"))
        assert torch.equal(sums, combine(dphi, index, ends, weight))
    assert all(torch.equal(one, two) for one, two in zip(whole, again, strict=True))
    room = torch.zeros(2 * width + 3, dtype=dtype)
    one = room[3:].view(1, -1).copy_(h[17])  # at an address that is a multiple of nothing
    assert torch.equal(gated_activation(one, "gelu")[0], whole[0][17])
    assert torch.equal(row_norms(whole[0][17:18]), row_norms(whole[0])[17:18])
    assert torch.equal(row_norms(whole[0]), norm)


@compiled
@pytest.mark.parametrize("dtype", NUMBERS)
def test_rows_with_room_between_them(level: int | None, dtype: torch.dtype) -> None:
    h, dphi, scale = normal(9, 20, dtype=dtype), normal(9, 10, seed=1, dtype=dtype), torch.ones(9)
    wide = torch.full((9, 40), float("nan"), dtype=dtype)
    given, phi, dh = wide[:, 3:23].copy_(h), torch.zeros(9, 15, dtype=dtype), torch.zeros(9, 25, dtype=dtype)
    gated_activation(given, "silu", out=phi[:, 2:12])
    expected = gated_activation_backward(dphi.clone(), h, scale, "silu")
    found = gated_activation_backward(dphi.clone(), given, scale, "silu", out=dh[:, 4:24])
    assert torch.equal(phi[:, 2:12], gated_activation(h, "silu"))
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert not phi[:, :2].any()
    assert not phi[:, 12:].any()
    assert not dh[:, :4].any()
    assert not dh[:, 24:].any()


@compiled
def test_phi_takes_the_place_of_its_gradient() -> None:
    h, dphi = normal(5, 8), normal(5, 4, seed=1)
    _, phi, _ = gated_activation_backward(dphi, h, torch.ones(5), "silu")
    assert phi.data_ptr() == dphi.data_ptr()
    assert fuses(h.device, torch.float32)
    assert not fuses(h.device, torch.float64)


@compiled
def test_what_the_library_cannot_serve_takes_torchs_operators() -> None:
    h = normal(4, 6)
    leaf = h.clone().requires_grad_()
    gated_activation(leaf, "silu").sum().backward()  # a graph needs operators that autograd knows
    assert leaf.grad is not None
    assert cpu.gate(h.half(), "silu", h.half()[:, :3].contiguous(), None) is None
    assert cpu.gate(h.t().contiguous().t(), "silu", torch.empty(4, 3), None) is None
    assert cpu.gate(h, "silu", torch.empty(4, 2), None) is None
    assert cpu.gate(h, "silu", torch.empty(4, 3), torch.empty(3)) is None
    assert cpu.gate_backward(torch.empty(4, 3), h, torch.ones(4).double(), "silu", torch.empty(4, 6)) is None
    assert cpu.combine(h, torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64), None) is None
    with pytest.raises(IndexError, match=r"valid: indices in \[0, 4\), ends in \[0, 1\]"):
        combine(h, torch.tensor([4]), torch.tensor([1]))
    with pytest.raises(IndexError):
        combine(h, torch.tensor([0]), torch.tensor([2]))


@compiled
def test_tensors_whose_memory_is_not_theirs_take_torchs_operators() -> None:
    h = normal(4, 6)
    signs = torch._neg_view(h)
    torch.testing.assert_close(gated_activation(signs, "silu"), gated_activation(-h, "silu"))
    assert row_norms(torch._efficientzerotensor((4, 4))).tolist() == [0.0] * 4
    expected = gated_activation(h, "silu")
    silu = partial(gated_activation, kind="silu")
    torch.testing.assert_close(torch.func.functionalize(silu)(h), expected)
    torch.testing.assert_close(torch.func.vmap(silu)(h[None])[0], expected)
    torch.testing.assert_close(torch.func.jvp(silu, (h,), (h,))[0], expected)


@compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_records_the_passes() -> None:
    trace = torch.jit.trace(lambda rows: gated_activation(rows, "silu"), normal(4, 6))
    other = normal(4, 6, seed=1)
    torch.testing.assert_close(trace(other), gated_activation(other, "silu"))


def test_switched_off_within_and_on_again_after() -> None:
    with cpu.limited(None):
        assert cpu.norms(normal(2, 2)) is None
        assert not fuses(torch.device("cpu"), torch.float32)
    assert (cpu.norms(normal(2, 2)) is None) is not cpu.state()[0]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs GCC")
def test_a_library_is_built_where_there_is_gcc(tmp_path: Path) -> None:
    target = tmp_path / "folder" / build.LIBRARY
    build.build(target)
    found, text = library._load(target)
    assert found is not None
    assert text in cpu.LEVELS
    assert [path.name for path in target.parent.iterdir()] == [build.LIBRARY]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs GCC")
def test_a_compiler_may_have_arguments_and_an_empty_name_is_none() -> None:
    gcc = str(shutil.which("gcc"))
    assert build._compiler("gcc -m64 -g") == [gcc, "-m64", "-g"]
    assert build._compiler("env gcc")[1:] == ["gcc"]
    assert build._compiler("") == build._compiler(" ") == build._compiler(None) == [gcc]


def test_the_command_says_what_it_built_or_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "build", lambda target, compiler: f"/bin/{compiler}")
    assert build.main("some-gcc") == 0
    assert capsys.readouterr().out == f"built {tmp_path / build.LIBRARY} with /bin/some-gcc\n"

    def refuse(target: Path, compiler: str | None) -> str:
        raise build.BuildError("no C compiler")

    monkeypatch.setattr(build, "build", refuse)
    assert build.main() == 1
    assert capsys.readouterr().err == "not built: no C compiler\n"


def test_no_compiler_and_one_that_is_not_gcc_are_named(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match=r"^no C compiler \(no-such-compiler\)$"):
        build.build(tmp_path / build.LIBRARY, "no-such-compiler")
    other = tmp_path / "other"
    for body, what in (
        ("echo '#define __clang__ 1'", "is not GCC"),
        ("echo broken >&2; exit 3", "failed: broken"),
    ):
        other.write_text(f"#!/bin/sh\n{body}\n")
        other.chmod(0o755)
        with pytest.raises(build.BuildError, match=what):
            build.build(tmp_path / build.LIBRARY, str(other))
    assert not (tmp_path / build.LIBRARY).exists()


def test_why_there_is_no_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    assert "not built" in library._load(tmp_path / "none.so")[1]
    assert "cannot be loaded" in library._load(broken)[1]
    monkeypatch.setattr(paths, "state", lambda: (False, "not built"))
    assert paths._compiled().text == "not built; torch's operators serve"
    monkeypatch.setattr(paths, "state", lambda: (True, "AVX2"))
    assert paths._compiled().state == "ok"


@compiled
def test_a_library_of_other_sources_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = tmp_path / "old.so"
    shutil.copyfile(build.SOURCES / build.LIBRARY, old)
    monkeypatch.setattr(library, "checksum", lambda: "0" * 16)
    assert library._load(old) == (
        None,
        "built from other sources (python -m lrmoe.ops.cpu builds anew)",
    )
    assert "not used" in caplog.text
    assert "python -m lrmoe.ops.cpu" in caplog.text
