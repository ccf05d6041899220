"""Where blocks put what they make: into parts of one buffer, or as the only block's own memory."""

from __future__ import annotations

import torch

from lrmoe.layer.buffers import Sink


def zeros() -> torch.Tensor:
    return torch.zeros(4, 2)


def test_parts_are_views_of_one_buffer_made_at_the_first() -> None:
    sink = Sink(zeros)
    assert sink.there is None
    for at in (slice(0, 3), slice(3, 4)):
        part = sink.part(at)
        assert part is not None
        sink.put(part.fill_(at.stop))
    assert sink.whole.tolist() == [[3, 3], [3, 3], [3, 3], [4, 4]]
    assert sink.there is sink.whole


def test_an_only_block_brings_its_own() -> None:
    sink, made = Sink(zeros), torch.ones(4, 2)
    assert sink.part(slice(0, 4), alone=True) is None
    assert sink.put(made) is made
    assert sink.whole is made


def test_a_buffer_that_is_there_is_filled_also_by_an_only_block() -> None:
    sink = Sink(zeros)
    sink.take()
    part = sink.part(slice(0, 4), alone=True)
    assert part is not None
    assert part.data_ptr() == sink.whole.data_ptr()
    sink.put(part.fill_(7))
    assert bool((sink.whole == 7).all())


def test_nothing_was_put() -> None:
    assert Sink(lambda: torch.empty(0, 2)).whole.shape == (0, 2)
