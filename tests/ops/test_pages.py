"""Large new buffers ask for large pages: aligned, inside the buffer, and only on a CPU where it pays."""

from __future__ import annotations

import pytest
import torch

from lrmoe.ops import pages


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(address, bytes, advice) of every request."""
    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr(pages, "_advise", lambda: lambda *request: found.append(request))
    return found


def test_a_large_buffer_asks_for_the_whole_pages_inside_it(asked: list[tuple[int, int, int]]) -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    buffer = pages.empty((3, 2**20 + 1), like)
    assert (buffer.shape, buffer.dtype) == ((3, 2**20 + 1), torch.bfloat16)
    ((address, size, advice),) = asked
    assert advice == 14
    assert address % 4096 == size % 4096 == 0
    assert buffer.data_ptr() <= address < buffer.data_ptr() + 4096
    assert buffer.nbytes - 2 * 4096 < size <= buffer.data_ptr() + buffer.nbytes - address


def test_small_buffers_and_other_devices_ask_for_nothing(asked: list[tuple[int, int, int]]) -> None:
    assert pages.empty((16,), torch.empty(0), dtype=torch.float64).dtype == torch.float64
    assert pages.empty((2**22,), torch.empty(0, device="meta")).device.type == "meta"
    assert asked == []


def test_where_the_system_has_no_such_request_buffers_are_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrmoe.ops.pages.sys.platform", "another")
    pages._advise.cache_clear()
    try:
        assert pages._advise() is None
        assert float(pages.empty((2**21,), torch.empty(0)).fill_(2).sum()) == 2**22
    finally:
        pages._advise.cache_clear()


def test_a_buffer_holds_what_is_written() -> None:
    buffer = pages.empty((2**21,), torch.empty(0, dtype=torch.int64))
    torch.arange(2**21, out=buffer)
    assert int(buffer[-1]) == 2**21 - 1
    assert int(buffer.sum()) == 2**20 * (2**21 - 1)
