"""On CUDA a replay runs everything once before it times: what is compiled there counts for nobody."""

from __future__ import annotations

import pytest
import torch

from lrmoe.simulate import replay as replays
from lrmoe.simulate.replay import HALF, OURS, replay
from lrmoe.simulate.replay_memory import Held
from lrmoe.simulate.replay_times import warm_ups
from tests.simulate.test_replay import question


def test_only_cuda_has_warm_ups() -> None:
    assert [warm_ups(torch.device(name)) for name in ("cpu", "cuda")] == [0, 1]


def test_a_warm_up_leaves_times_bytes_and_progress_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, runs, told = question(systems=("megatron", OURS), repeats=2), [0], [0]
    plain = {lane.name: lane for lane in replay(asked)}
    right = Held.replace

    def counted(held: Held, part: str, *tensors: torch.Tensor) -> None:
        runs[0] += part == "backward"
        right(held, part, *tensors)

    def progress(text: str, done: int, total: int) -> None:
        told[0] += 1
        assert done == told[0] <= total

    monkeypatch.setattr(Held, "replace", counted)
    monkeypatch.setattr(replays, "warm_ups", lambda device: 1)
    found = {lane.name: lane for lane in replay(asked, progress)}
    ranks, lanes = asked.topology.ranks, {"megatron": 2, OURS: 2, HALF: 1}
    assert runs[0] == ranks * sum(lanes.values()) + len(lanes), "each lane once more, on one rank"
    for name in lanes:
        assert found[name].most == plain[name].most
        numbers, wanted = (
            {key: len(values) for key, values in one[name].times._samples.items()} for one in (found, plain)
        )
        assert numbers == wanted
