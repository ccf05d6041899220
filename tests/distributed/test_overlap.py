"""What travels while experts compute: copies of weights, input gradients, gradients of copies."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.config import LRMoEConfig
from lrmoe.distributed import Comm, replicas
from lrmoe.distributed import comm as comm_module
from lrmoe.layer import backward, experts, forward, weights
from lrmoe.layer.budget import CallBudget
from tests.distributed.calls import even, rank_call
from tests.distributed.pool import Pool
from tests.distributed.test_budget import Needed, call
from tests.layer.harness import exact, pruning
from tests.reference import GRADS, Case, make_case

pytestmark = pytest.mark.distributed

SMALL = make_case(tokens=64, experts=8, top_k=3, hidden=16, width=12, dtype=torch.float64, skew=3.0)
# Several blocks of rows a rank, wide experts: what waits for later is then the largest moment of an exact call.
WIDE = make_case(tokens=4096, experts=8, top_k=4, hidden=32, width=128, dtype=torch.float32)
COPIES = {"policy": "ultraep", "replica_slots": 2}


@contextmanager
def replaced(home: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    usual = getattr(home, name)
    setattr(home, name, function)
    try:
        yield
    finally:
        setattr(home, name, usual)


def noting(said: list[str], home: Any, name: str, word: Callable[..., str | None]) -> Any:
    """Calls of a function are said first."""
    usual = getattr(home, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        text = word(*args, **kwargs)
        if text is not None:
            said.append(text)
        return usual(*args, **kwargs)

    return replaced(home, name, noted)


def order_of_events(case: Case, config: LRMoEConfig, sizes: list[int]) -> list[str]:
    """Worker: what the backward of a call starts, computes and waits for, in order."""
    said: list[str] = []
    with (
        noting(said, weights, "fetch_replicas", lambda *_, **__: "fetch"),
        noting(said, replicas.Pending, "wait", lambda *_: "fetched"),
        noting(said, backward, "start_return", lambda *_: "return"),
        noting(said, comm_module.Arriving, "wait", lambda one: None if one._work is None else "arrived"),
        noting(said, experts, "_block_backward", lambda w, *a, **k: _place(w.homes, a[5])),
        noting(said, experts, "_first_weight_gradient", lambda *_: "left"),
        noting(said, weights, "start_return", lambda *_: "give back"),
        noting(said, replicas.Returning, "wait", lambda *_: "given back"),
    ):
        rank_call(case, config, sizes, {})
    first = min(i for i, word in enumerate(said) if word in ("home", "foreign"))
    return said[max(first - 1, 0) :]


def _place(homes: int, seats: slice) -> str:
    return "foreign" if seats.start >= homes else "home"


def test_backward_travels_while_it_computes(pool2: Pool) -> None:
    """Copies arrive during the home seats; results and copies' gradients leave before the last products."""
    ranks = pool2.run(order_of_events, SMALL, exact(**COPIES), even(SMALL, 2))
    assert any("foreign" in said for said in ranks)
    for said in ranks:
        copies = ["foreign", "fetched"] if "foreign" in said else []
        order = [said.index(word) for word in ("fetch", "home", *copies, "return", "left")]
        assert order == sorted(order), said
        last = len(said) - 1 - said[::-1].index("left")
        assert said.index("return") < said.index("give back") < last, (
            "copies' gradients leave before the last"
        )
        assert last < said.index("arrived", said.index("return")), (
            "rows are waited for after the last product"
        )
        assert last < said.index("given back")
        if copies:
            assert said.index("left") < said.index("give back"), "foreign seats' gradients come first"


@pytest.mark.parametrize("fields", [{"activations": "recompute"}, {"policy": "megatron"}], ids=str)
def test_nothing_is_held_where_memory_is_short(pool2: Pool, fields: dict[str, Any]) -> None:
    """Where activations are computed again, or the budget is what the call needs without, no product is left."""
    config = exact(**{**COPIES, **fields})
    if "activations" not in fields:
        config = config.replace(layer_budget=max(pool2.run(_without, WIDE, config, even(WIDE, 2))))
    for said in pool2.run(order_of_events, WIDE, config, even(WIDE, 2)):
        assert "left" in said
        assert "left" not in said[said.index("return") :], said


def _without(case: Case, config: LRMoEConfig, sizes: list[int]) -> int:
    """Worker: what a call that leaves nothing for later is predicted to need."""
    with replaced(CallBudget, "overlaps", lambda *_: False):
        return rank_call(case, config.replace(layer_budget=2**50), sizes, {}).record.peak_predicted


CONFIGS = {
    "exact": exact(**COPIES),
    "pruned": pruning(max_drop=0.4, replica_slots=2),
    "lean": pruning(max_drop=0.4, replica_slots=2, lean_wire=True),
    "in-forward": pruning(max_drop=0.3, score="alpha", select_in="forward", replica_slots=2),
    "homeless": exact(policy="ultraep", replica_slots=4, lean_wire=True),
}


def with_and_without(config: LRMoEConfig, case: Case, sizes: list[int]) -> bool:
    """Worker: the same bits whether or not products wait."""
    one = rank_call(case, config, sizes, {}).result
    with replaced(backward, "_overlaps", lambda *_: False):
        two = rank_call(case, config, sizes, {}).result
    return all(torch.equal(getattr(one, name), getattr(two, name)) for name in ("out", *GRADS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_changes_no_bit(pool4: Pool, name: str, dtype: torch.dtype) -> None:
    for sizes in (even(SMALL, 4), [0, 33, 31, 0]):
        assert pool4.run(with_and_without, CONFIGS[name], SMALL.to(dtype), sizes) == [True] * 4


def needed(case: Case, config: LRMoEConfig, sizes: list[int], overlaps: bool) -> Needed:
    """Worker: a call under the tracker."""
    if overlaps:
        return call(case, config, sizes)
    with replaced(CallBudget, "overlaps", lambda *_: False):
        return call(case, config, sizes)


@pytest.mark.parametrize("name", ["exact", "pruned", "in-forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_held_is_predicted(pool4: Pool, name: str, dtype: torch.dtype) -> None:
    case, config, sizes = WIDE.to(dtype), CONFIGS[name].replace(layer_budget=2**50), even(WIDE, 4)
    held, plain = (
        pool4.run(needed, case, config, sizes, overlaps, limit_s=120) for overlaps in (True, False)
    )
    for one in (*held, *plain):
        assert one.needed <= one.predicted <= 1.02 * one.needed
    if name == "exact":  # a pruned call's largest moment lies in its forward, and nothing is added to it
        assert any(one.predicted > other.predicted for one, other in zip(held, plain, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """Which buffers of an exchange are alive."""

    meanwhile: list[bool]
    afterwards: list[bool]
    abandoned: int
    works: int


def buffers_of_an_exchange(waits: bool) -> Buffers:
    """Worker: an exchange that is started, and waited for or not."""
    comm = Comm(dist.group.WORLD)
    before = len(comm_module.abandoned)
    rows = torch.full((2, 3), float(comm.rank))
    arriving = comm.start_all_to_all(rows, [1, 1], [1, 1])
    memory = [weakref.ref(tensor.untyped_storage()) for tensor in (rows, arriving.received)]
    del rows
    gc.collect()
    meanwhile = [one() is not None for one in memory]
    if waits:
        assert arriving.wait()[:, 0].tolist() == [0.0, 1.0]
    dist.barrier()
    del arriving
    gc.collect()
    return Buffers(
        meanwhile=meanwhile,
        afterwards=[one() is not None for one in memory],
        abandoned=len(comm_module.abandoned) - before,
        works=sum(isinstance(one, dist.Work) for held in comm_module.abandoned[before:] for one in held),
    )


def test_buffers_live_as_long_as_the_exchange(pool2: Pool) -> None:
    for found in pool2.run(buffers_of_an_exchange, True):
        assert found == Buffers(meanwhile=[True, True], afterwards=[False, False], abandoned=0, works=0)


def test_an_exchange_that_nobody_waited_for_keeps_its_buffers(pool2: Pool) -> None:
    """A backend may still write into them: after an error between start and wait, say."""
    for found in pool2.run(buffers_of_an_exchange, False):
        assert found == Buffers(meanwhile=[True, True], afterwards=[True, True], abandoned=1, works=1)


# Held by what goes after the module's other globals when the interpreter ends.
UNDER_WAY = """
import torch
from lrmoe.distributed import comm
comm.arriving = comm.Arriving(torch.empty(2, 3), torch.ones(2, 3), work=object(), name="experts")
"""


def test_a_process_may_end_while_an_exchange_is_under_way() -> None:
    ended = subprocess.run([sys.executable, "-c", UNDER_WAY], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


# Each copy is more than what one read of a socket takes.
HEAVY = make_case(tokens=24, experts=8, top_k=3, hidden=128, width=128, dtype=torch.float32, skew=3.0)


def call_after_an_error(where: str) -> bool:
    """Worker: all ranks fail while copies are on their way, and go on; the next call has the bits of any other."""

    def fails(*_: Any, **__: Any) -> None:
        raise ArithmeticError(where)

    config, sizes, home = exact(**COPIES), even(HEAVY, 2), forward if where == "forward" else backward
    usual = rank_call(HEAVY, config, sizes, {}).result
    with replaced(home, f"experts_{where}", fails), pytest.raises(ArithmeticError):
        rank_call(HEAVY, config, sizes, {})
    after = rank_call(HEAVY, config, sizes, {}).result
    return all(torch.equal(getattr(usual, name), getattr(after, name)) for name in ("out", *GRADS))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_copies_that_nobody_waited_for_do_not_stop_the_next_call(pool2: Pool, where: str) -> None:
    assert pool2.run(call_after_an_error, where, limit_s=20) == [True, True]
