"""U33: counts that a device copies to the host are read when they are there, also with a single expert."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lrmoe
from tests.cases.on_device import NEEDS_CUDA, check_on_device

PACKAGE = Path(lrmoe.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
HOST = ("torch.from_numpy", "torch.tensor")  # what makes a tensor of the host


@NEEDS_CUDA
def test_two_hundred_calls_behind_a_long_queue() -> None:
    check_on_device("U33")


def hasty_copies(source: str) -> Iterator[str]:
    """Copies that are started without waiting, unless what is copied was made on the host in the same expression."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        waits = {k.arg: k.value for k in node.keywords}.get("non_blocking")
        if waits is None or (isinstance(waits, ast.Constant) and not waits.value):
            continue
        of = node.func.value
        made_here = isinstance(of, ast.Call) and ast.unparse(of.func) in HOST
        if node.func.attr != "to" or not made_here:
            yield ast.unparse(node)


def test_only_what_lies_on_the_host_is_copied_without_waiting() -> None:
    """A copy to the host that is not waited for shows on devices only, and there now and then.

    One module may: `ops.host`, which waits for the copy before it hands the values out (tests/ops/test_host.py).
    """
    found = {path: list(hasty_copies(path.read_text(encoding="utf-8"))) for path in SOURCES}
    places = {path.relative_to(PACKAGE).as_posix(): copies for path, copies in found.items() if copies}
    assert places == {
        "ops/host.py": [
            "_pinned(host).to(device, non_blocking=True)",
            "self._host.copy_(values, non_blocking=True)",
        ]
    }


@pytest.mark.parametrize(
    "copy",
    [
        "counts.to('cpu', non_blocking=True)",
        "counts.cpu().copy_(other, non_blocking=True)",
        "host.copy_(counts, non_blocking=True)",
        "counts.to(device, torch.int64, non_blocking=wait)",
    ],
)
def test_the_check_sees_copies_of_what_may_lie_on_a_device(copy: str) -> None:
    assert list(hasty_copies(copy)) == [copy]
