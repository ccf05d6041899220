"""Numbers between host and device: nothing is copied on a CPU; elsewhere pinned buffers, and one event to wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lrmoe.ops import Reading, host, upload

CUDA = torch.device("cuda", 1)


class Device:
    """Stands for a GPU: copies arrive when the event after them is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []

    def event(self, device: torch.device) -> Device:
        self.log.append(f"record on {device}")
        return self

    def synchronize(self) -> None:
        self.log.append("wait")
        for to, values in self.queue:
            to.copy_(values)


class OnDevice:
    """A tensor of the device."""

    def __init__(self, values: torch.Tensor, device: Device) -> None:
        self.values, self.of = values, device
        self.device, self.shape, self.dtype = CUDA, values.shape, values.dtype

    def numel(self) -> int:
        return self.values.numel()

    def cpu(self) -> torch.Tensor:
        self.of.log.append("copy at once")
        return self.values


class Room:
    """Pinned memory of the host."""

    def __init__(self, like: OnDevice) -> None:
        self.of, self.values = like.of, torch.full(like.shape, -1, dtype=like.dtype)

    def copy_(self, source: OnDevice, *, non_blocking: bool) -> None:
        self.of.log.append(f"copy, non_blocking={non_blocking}")
        self.of.queue.append((self.values, source.values))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(host, "_room", Room)
    monkeypatch.setattr(host, "_recorded", made.event)
    return made


def read(values: Any) -> Reading:
    return Reading(values)


def test_a_reading_waits_for_one_event_after_its_copy(device: Device) -> None:
    reading = read(OnDevice(torch.arange(6).view(2, 3), device))
    assert device.log == ["copy, non_blocking=True", "record on cuda:1"]
    found: Any = reading.wait()
    assert found.values.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert reading.wait() is found
    assert device.log == ["copy, non_blocking=True", "record on cuda:1", "wait"]


def test_a_reading_of_nothing_waits_for_nothing(device: Device) -> None:
    assert read(OnDevice(torch.zeros(0, 4), device)).wait().shape == (0, 4)
    assert device.log == ["copy at once"]


def test_on_a_cpu_values_are_read_where_they_lie() -> None:
    values = torch.arange(4)
    assert read(values).wait().data_ptr() == values.data_ptr()


def test_on_a_cpu_an_array_is_taken_as_it_lies() -> None:
    array = np.arange(6, dtype=np.int64)
    found = upload(array, torch.device("cpu"))
    assert found.dtype == torch.int64
    assert found.data_ptr() == array.ctypes.data
    assert upload(array[::2], torch.device("cpu")).tolist() == [0, 2, 4]
    assert upload([], torch.device("cpu")).shape == (0,)
    assert upload(np.zeros((0, 3)), torch.device("cpu")).shape == (0, 3)


def test_an_upload_starts_from_pinned_memory_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.device, bool]] = []

    class Pinned:
        def to(self, device: torch.device, *, non_blocking: bool) -> str:
            asked.append((device, non_blocking))
            return "there"

    monkeypatch.setattr(host, "_pinned", lambda tensor: Pinned())
    found: Any = upload(np.arange(3), CUDA)
    assert found == "there"
    assert asked == [(CUDA, True)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_there_and_back_on_a_gpu() -> None:
    device = torch.device("cuda")
    for size in (0, 1, 100_000):
        array = np.arange(size)
        there = upload(array, device)
        array[:] = -1
        assert read(there * 2).wait().tolist() == list(range(0, 2 * size, 2))
