"""Buffers that come back: whose memory they are, when they return, and how many wait."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from lrmoe.ops.pool import Pool
from lrmoe.ops.workspace import Workspace, _lasting


def small_pool(keep: int = 4096) -> Pool:
    return Pool(keep_bytes=keep, smallest_bytes=256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_is_contiguous_of_the_asked_dtype_and_size(dtype: torch.dtype) -> None:
    found = small_pool().take((9, 32), torch.empty(0, dtype=dtype))
    assert (found.shape, found.dtype, found.is_contiguous()) == ((9, 32), dtype, True)
    assert found.untyped_storage().nbytes() == found.nbytes
    assert found.data_ptr() % 64 == 0


def test_memory_returns_when_the_last_tensor_on_it_dies() -> None:
    pool, like = small_pool(), torch.empty(0)
    first = pool.take((10, 10), like)
    at, view = first.data_ptr(), first[2:]
    del first
    assert pool.waiting_bytes == 0
    other = pool.take((10, 10), like)
    assert other.data_ptr() != at
    del view
    assert pool.take((10, 10), like).data_ptr() == at


def test_two_living_tensors_never_share_memory() -> None:
    pool, like = small_pool(), torch.empty(0)
    living = [pool.take((100,), like).fill_(n) for n in range(6)]
    assert [set(t.tolist()) for t in living] == [{float(n)} for n in range(6)]


def test_autograd_gives_back_what_it_saved() -> None:
    pool, leaf = small_pool(), torch.ones(100, requires_grad=True)
    kept = pool.take((100,), leaf).fill_(2)
    at = kept.data_ptr()
    loss = (leaf * kept).sum()
    del kept
    assert pool.waiting_bytes == 0
    loss.backward()
    del loss
    assert leaf.grad is not None
    assert leaf.grad.eq(2).all()
    assert pool.take((100,), leaf).data_ptr() == at


def test_a_smaller_call_fits_and_a_larger_or_much_smaller_one_takes_another() -> None:
    pool, like = Pool(keep_bytes=4096, smallest_bytes=128), torch.empty(0)
    at = pool.take((100,), like).data_ptr()
    held = pool.take((65,), like)
    assert held.nbytes == 260
    assert held.data_ptr() == at
    del held
    others = [pool.take((count,), like) for count in (101, 49)]
    assert at not in {other.data_ptr() for other in others}
    assert pool.waiting_bytes == 400


def test_at_most_the_limit_waits_and_the_longest_unused_goes_first() -> None:
    pool, like = small_pool(keep=900), torch.empty(0)
    first, second, third = (pool.take((n,), like) for n in (100, 110, 120))
    at = third.data_ptr()
    del first
    assert pool.waiting_bytes == 400
    del second
    assert pool.waiting_bytes == 400 + 440
    del third
    assert pool.waiting_bytes == 480
    assert pool.take((110,), like).data_ptr() == at
    pool.release()
    assert pool.waiting_bytes == 0


def test_what_dies_beyond_the_limit_goes_at_once_without_another_call() -> None:
    pool = small_pool(keep=1000)
    many, one = [pool.take((100,), torch.empty(0)) for _ in range(8)], pool.take((100,), torch.empty(0))
    held = [weakref.ref(base) for _, base in pool._lent.values()]
    del many
    assert sum(base() is not None for base in held) == 3  # two of 400 bytes wait, and one is lent
    del one
    assert sum(base() is not None for base in held) == 2


def test_small_and_foreign_tensors_are_plain() -> None:
    pool = small_pool()
    assert pool.take((3,), torch.empty(0)).shape == (3,)
    assert pool.take((100, 100), torch.empty(0, device="meta")).device.type == "meta"
    assert pool.take((0, 100), torch.empty(0)).shape == (0, 100)
    assert pool.waiting_bytes == 0


def test_a_buffer_made_under_inference_mode_serves_training() -> None:
    pool = small_pool()
    with torch.inference_mode():
        at = pool.take((100,), torch.empty(0)).data_ptr()
    leaf = torch.ones(100, requires_grad=True)
    kept = pool.take((100,), leaf)
    assert kept.data_ptr() == at
    (leaf * kept.fill_(3)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.eq(3).all()


def test_threads_take_and_free_at_once() -> None:
    pool, wrong = small_pool(keep=20_000), []

    def work(number: int) -> None:
        for n in range(200):
            tensor = pool.take((64 + (n * 7 + number) % 40,), torch.empty(0)).fill_(number)
            if not tensor.eq(number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert pool.waiting_bytes <= 20_000


def test_a_workspace_lends_lasting_buffers_and_keeps_none_under_a_budget() -> None:
    space, shape, like = Workspace(), (2048, 1024), torch.empty(0)
    space.release()
    first, second = space.lasting(shape, like), space.lasting(shape, like)
    assert first.data_ptr() != second.data_ptr()
    at = second.data_ptr()
    del second
    assert space.lasting(shape, like).data_ptr() == at
    with space.fresh():
        assert _lasting.waiting_bytes == 0
        third = space.lasting(shape, like)
        del third
        assert _lasting.waiting_bytes == 0
    del first
    assert _lasting.waiting_bytes > 0
    space.release()
    assert _lasting.waiting_bytes == 0
