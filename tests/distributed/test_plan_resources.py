"""What calls under any plan leave behind and send: no growth of memory, one error everywhere, every byte booked."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.errors import InputError, LRMoEError, RankError
from lrmoe.layer import MoELayer
from lrmoe.layer.buffers import release_scratch
from lrmoe.telemetry import CallRecord
from lrmoe.telemetry.tracking import StorageTracker
from tests.distributed.calls import even
from tests.distributed.plans import Crafted
from tests.distributed.pool import Pool
from tests.distributed.truth import Truth, mine
from tests.layer.harness import build, exact, forward, leaves, pruning, run
from tests.reference import GRADS, make_case

pytestmark = pytest.mark.distributed

CASE = make_case(tokens=26, experts=8, top_k=3, hidden=16, width=6, seed=2, skew=1.5)
ROUND, ROUNDS = 10, 20


def growth() -> list[tuple[int, int]]:
    """Worker: x; bytes of storages and number of tensors alive after each round."""
    group, part, policy = dist.group.WORLD, mine(CASE, even(CASE, dist.get_world_size())), Crafted(chunks=2)
    layers = [
        build(CASE, config, group=group, policy=policy)
        for config in (
            exact(),
            exact(lean_wire="auto"),
            pruning(max_drop=0.5, lean_wire="auto", warmup_steps=0),
        )
    ]
    leaf, tracker, found = leaves(part, GRADS, group), StorageTracker(), []
    tracker.ignore([*leaf.values(), part.ids, part.grad_out])
    release_scratch()
    for number in range(ROUNDS):
        for policy.seed in range(ROUND):
            layer = layers[policy.seed % len(layers)]
            with tracker if number % 6 == 1 else contextlib.nullcontext():  # it makes every operator slow
                forward(layer, part, leaf).backward(part.grad_out)
            layer.clock.advance()
            layer.telemetry.drain()
        for tensor in leaf.values():
            tensor.grad = None
        gc.collect()
        tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        if number % 6 == 1:
            found.append((tracker.current, tensors))
    return found


def test_memory_does_not_grow_over_two_hundred_calls(pool2: Pool) -> None:
    for found in pool2.run(growth, limit_s=110):
        assert len(set(found[1:])) == 1, f"bytes and tensors alive after some rounds: {found}"


def faults() -> list[tuple[str, str]]:
    """Worker: bad input on one rank before, between and after calls whose plans move experts."""
    group, rank, sizes = dist.group.WORLD, dist.get_rank(), even(CASE, dist.get_world_size())
    truth, part, policy = Truth.of(CASE), mine(CASE, sizes), Crafted()
    layer = build(CASE, exact(lean_wire="auto"), group=group, policy=policy)
    found = []
    for bad in range(dist.get_world_size()):
        policy.seed = bad + 3
        pending = forward(layer, part, leaf := leaves(part, GRADS, group))  # its backward is still to come
        try:
            ids = part.ids.double() if rank == bad else part.ids
            forward(layer, dataclasses.replace(part, ids=ids), leaves(part, GRADS, group))
        except LRMoEError as error:
            found.append((type(error).__name__, str(error)))
        pending.backward(part.grad_out)
        result = run(part, exact(), group=group, layer=layer).result
        truth.check(result, sizes, f"after a fault of rank {bad}")
        grads: dict[str, Any] = {name: tensor.grad for name, tensor in leaf.items()}
        truth.check(dataclasses.replace(result, **grads), sizes, f"across a fault of rank {bad}")
    return found


def test_bad_input_on_one_rank_between_calls_with_copies(pool4: Pool) -> None:
    found = pool4.run(faults)
    for rank, errors in enumerate(found):
        assert [kind for kind, _ in errors] == [
            InputError.__name__ if bad == rank else RankError.__name__ for bad in range(4)
        ]
        for bad, (_, text) in enumerate(errors):
            assert bad == rank or f"rank {bad} was given bad input" in text


class Spy:
    """Counts what torch.distributed is really given to send to other ranks."""

    def __init__(self) -> None:
        self.sent = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Within, collectives and messages of this process are counted."""
        to_all, batch, gather = dist.all_to_all_single, dist.batch_isend_irecv, comm_module()._ALL_GATHER

        def all_to_all(
            out: torch.Tensor, rows: torch.Tensor, receive: Any, send: list[int], **kwargs: Any
        ) -> Any:
            self.sent += (sum(send) - send[dist.get_rank()]) * rows[:1].numel()
            return to_all(out, rows, receive, send, **kwargs)

        def messages(ops: list[dist.P2POp]) -> Any:
            self.sent += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
            return batch(ops)

        def all_gather(out: torch.Tensor, row: torch.Tensor, **kwargs: Any) -> Any:
            self.sent += row.nbytes * (dist.get_world_size() - 1)
            return gather(out, row, **kwargs)

        patch = pytest.MonkeyPatch()
        with patch.context() as context:
            context.setattr(dist, "all_to_all_single", all_to_all)
            context.setattr(dist, "batch_isend_irecv", messages)
            context.setattr(comm_module(), "_ALL_GATHER", all_gather)
            yield


def comm_module() -> Any:
    """The module that calls the all-gather."""
    from lrmoe.distributed import comm

    return comm


def record_of(layer: MoELayer, part: Any) -> tuple[CallRecord, int]:
    """One call's record, and the bytes that a spy saw."""
    spy = Spy()
    with spy.watch():
        found = run(part, layer.config, group=dist.group.WORLD, layer=layer)
    return found.record, spy.sent


def booked() -> bool:
    """Worker: every byte is booked, and what one row per pair would send is what it sends."""
    part, replicas = mine(CASE, even(CASE, dist.get_world_size())), 0
    for seed in range(24):
        records = []
        for lean in (True, False):
            config = (
                exact(lean_wire=lean)
                if seed % 3
                else pruning(max_drop=0.5, router_grad="retained", lean_wire=lean)
            )
            layer = build(CASE, config, group=dist.group.WORLD, policy=Crafted(seed=seed))
            record, sent = record_of(layer, part)
            assert record.wire_bytes == sent, f"plan {seed}, lean wire {lean}: {record.bytes}"
            records.append(record)
        lean_record, plain = records
        assert plain.wire_bytes_row_per_pair == plain.wire_bytes
        assert lean_record.bytes.get("replicas", 0) == plain.bytes.get("replicas", 0)
        replicas += plain.bytes.get("replicas", 0)
        if seed % 3:  # under pruning, which pairs sit where decides which must move
            assert lean_record.wire_bytes_row_per_pair == plain.wire_bytes, f"plan {seed}"
    return replicas > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_byte_that_leaves_is_booked(request: pytest.FixtureRequest, ranks: int) -> None:
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    assert any(pool.run(booked, limit_s=60))
