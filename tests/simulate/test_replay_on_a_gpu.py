"""A replay as it works on a GPU: no operand lies elsewhere, and what is timed waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from lrmoe.ops import triton as kernels
from lrmoe.simulate import replay as replays
from lrmoe.simulate.replay import HALF, OURS, replay
from lrmoe.simulate.replay_summary import summarise
from tests.layer.pretend import CUDA, pretending
from tests.simulate.test_replay import question


class SameThread:
    """A pool without threads: only this one pretends."""

    def __init__(self, workers: int) -> None:
        assert workers == 1, "one rank at a time on a GPU"

    def __enter__(self) -> SameThread:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given))
        return done


@pytest.mark.parametrize("activations", ["recompute", "stash"])
def test_every_rank_of_every_system(activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    systems = ("megatron", "symi", "ultraep", OURS)
    plain = summarise(asked := question(systems=systems, activations=activations), replay(asked))["systems"]
    monkeypatch.setattr(replays, "ThreadPoolExecutor", SameThread)
    with pretending() as there, kernels.off():
        asked = question(systems=systems, activations=activations, device=CUDA)
        found = summarise(asked, replay(asked))["systems"]
        phases = {where.split(":")[0] for _, where in there.waits}
    assert found.keys() == {*systems, HALF}
    for name, figures in found.items():
        assert figures["forward_memory"] == 2**20, "by the allocator"
        assert figures["kept_share"] == plain[name]["kept_share"]
        assert figures["forward_subtotal"] == plain[name]["forward_subtotal"]
        assert (
            figures["phases"]["backward"]["measured"].keys()
            == plain[name]["phases"]["backward"]["measured"].keys()
        )
    assert not phases & {"experts.py", "buffers.py", "grouped.py", "activation.py"}, there.waits
