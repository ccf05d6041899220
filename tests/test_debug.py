"""Debug mode: every fault is named on every rank, a call without fault is not changed by a bit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

import lrmoe
from lrmoe import debug
from lrmoe.cli import app
from lrmoe.config import LRMoEConfig
from lrmoe.debug._find import digests
from lrmoe.debug._poison import PoisonEmpty, poison, poisoned
from lrmoe.distributed import probe
from lrmoe.errors import CheckError
from lrmoe.layer.routing import Layout
from lrmoe.ops import grouped
from tests.distributed.plans import Crafted
from tests.distributed.pool import Pool
from tests.layer.harness import build, exact, leaves, pruning, run
from tests.reference import GRADS, Case, make_case
from tests.training.tiny import tiny_config

CASE = make_case(tokens=20, experts=4, top_k=2, hidden=8, width=6, dtype=torch.float32)
NAN, INF = float("nan"), float("inf")


def changed(name: str, at: tuple[int, ...], value: float) -> Case:
    """CASE with one number replaced."""
    tensor = getattr(CASE, name).clone()
    tensor[at] = value
    return dataclasses.replace(CASE, **{name: tensor})


# What a number that is not finite is called, in global ids: rank 1 holds experts 2 and 3.
NUMBERS: dict[str, tuple[Case, str]] = {
    "input": (changed("hidden", (5, 3), NAN), "hidden_states: token 5 holds nan"),
    "routing weight": (changed("weights", (6, 1), INF), "top_k_weights: token 6, slot 1, holds inf"),
    "gate_up": (changed("gate_up", (3, 2, 1), NAN), "gate_up_proj: expert 3 holds nan"),
    "down": (changed("down", (2, 0, 0), -INF), "down_proj: expert 2 holds -inf"),
    "gradient": (changed("grad_out", (7, 0), NAN), "the gradient at the output: token 7 holds nan"),
}


def raised(case: Case, config: LRMoEConfig, **kwargs: Any) -> str:
    """The message of the check that fails, or an empty one."""
    with debug.checked():
        try:
            run(case, config, **kwargs)
        except CheckError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("what", NUMBERS)
def test_the_first_number_that_is_not_finite_is_named(what: str) -> None:
    case, text = NUMBERS[what]
    found = raised(case, exact())
    assert text in found
    assert found.startswith("MoE layer 0, backward" if what == "gradient" else "MoE layer 0, forward")


def test_an_overflow_inside_an_expert_is_named_by_expert_and_phase() -> None:
    case = dataclasses.replace(CASE, down=CASE.down * 1e38)
    assert "phase experts: output: a row of expert " in raised(case, exact())


def test_tokens_without_an_expert_may_hold_anything() -> None:
    ids = CASE.ids.clone()
    ids[5] = -1
    case = dataclasses.replace(changed("hidden", (5, 3), NAN), ids=ids)
    assert raised(case, exact()) == ""
    with debug.checked(finite=False):
        run(NUMBERS["input"][0], exact())  # only what was never written is looked for


@contextmanager
def skipped_segment() -> Iterator[None]:
    """A grouped product that forgets its first expert."""
    segments = grouped._segments

    def others(counts: Any) -> Any:
        return list(segments(counts))[1:]

    with mock.patch.object(grouped, "_segments", others):
        yield


def test_a_row_that_no_expert_wrote_is_found() -> None:
    with skipped_segment():
        assert "output: a row of expert 0 was never written" in raised(CASE, exact())


def test_a_weight_gradient_that_nobody_wrote_is_found() -> None:
    def forgetful(*args: Any, out: Tensor, **_: Any) -> Tensor:
        return out

    with mock.patch("lrmoe.layer.experts.grouped_mm_weight", forgetful):
        assert "the gradient of gate_up_proj: expert 0 was never written" in raised(CASE, exact())


CONFIGS = [
    exact(),
    pruning(max_drop=0.4),
    pruning(max_drop=0.4, select_in="forward", score="alpha", lean_wire=True),
]


def same_bits(config: LRMoEConfig, group: Any = None, **kwargs: Any) -> dict[str, int]:
    """A call with and without checks gives the same bits; how many checks there were."""
    plain = run(CASE, config, group=group, **kwargs).result
    with debug.checked() as checks:
        found = run(CASE, config, group=group, **kwargs).result
    for name in ("out", *GRADS):
        assert torch.equal(getattr(plain, name), getattr(found, name)), name
    return dict(checks.made)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("checkpoint", [None, "reentrant"])
def test_nothing_changes_where_nothing_is_wrong(config: LRMoEConfig, checkpoint: str | None) -> None:
    made = same_bits(config, checkpoint=checkpoint)
    assert made["plan"] >= 1
    assert made["kept"] >= 1
    assert made["finite"] >= 12
    assert made["poison"] >= 4


def several_ranks() -> list[dict[str, int]]:
    """Worker."""
    policy = Crafted(layout="many", seed=3)
    group = dist.group.WORLD
    found = [same_bits(config, group) for config in CONFIGS]
    for config in (exact(), exact(lean_wire=True)):
        kwargs = {"layer": build(CASE, config, group=group, policy=policy)}
        found.append(same_bits(config, group, **kwargs))
    return found


@pytest.mark.distributed
def test_nothing_changes_on_several_ranks(pool2: Pool) -> None:
    for made in pool2.run(several_ranks):
        assert all(one["exchange"] >= 4 and one["plan"] >= 1 for one in made)


def _unlike_plans(rank: int) -> dict[str, Any]:
    group = dist.group.WORLD
    return {"layer": build(CASE, exact(), group=group, policy=Crafted(seed=rank, layout="many"))}


@contextmanager
def lost_row(rank: int) -> Iterator[None]:
    """Rank 1 packs one row less than it says."""
    from lrmoe.layer import wire

    packed = wire._packed
    with mock.patch.object(wire, "_packed", lambda *args: packed(*args)[:-1] if rank == 1 else packed(*args)):
        yield


@contextmanager
def other_count(rank: int) -> Iterator[None]:
    """Rank 1 waits for one row more than it gets."""
    make = Layout.build

    def more(*args: Any) -> Layout:
        layout = make(*args)
        first = layout.receive_R[0] + (rank == 1)
        return dataclasses.replace(layout, receive_R=[first, *layout.receive_R[1:]])

    with mock.patch.object(Layout, "build", more):
        yield


@contextmanager
def changed_row(rank: int) -> Iterator[None]:
    """What arrives at rank 1 is not what was sent."""
    exchange = dist.all_to_all_single

    def damaged(to: Tensor, *args: Any, **kwargs: Any) -> Any:
        done = exchange(to, *args, **kwargs)
        if rank == 1 and to.shape[1] == 32 and to.shape[0]:
            to[0, 0] ^= 1
        return done

    with mock.patch.object(dist, "all_to_all_single", damaged):
        yield


@contextmanager
def dropped_pair(rank: int) -> Iterator[None]:
    """Rank 1 leaves out one pair more than the ranks agreed on."""
    from lrmoe.layer import backward
    from lrmoe.layer.pruning import select_pairs as select

    def fewer(*args: Any) -> Tensor | None:
        weight = select(*args)
        if rank == 1 and weight is not None:
            weight[weight.nonzero()[0]] = 0
        return weight

    with mock.patch.object(backward, "select_pairs", fewer):
        yield


FAULTS: dict[str, tuple[Callable[[int], Any] | None, str]] = {
    "plan": (None, "phase plan: plans differ between ranks: rank 1 from rank 0, in "),
    "lost row": (lost_row, r"forward: rank 1: \d+ rows packed, \d+ to be sent \(phase dispatch\)"),
    "count": (other_count, r"phase dispatch: rank 0 sends (\d+) rows to rank 1, which waits for \d+"),
    "changed row": (changed_row, r"rank 1: rows from rank 0 are not those that it sent \(phase dispatch\)"),
    "dropped pair": (
        dropped_pair,
        r"backward: rank 0: \d+ pairs of expert \d+ kept, its quota is \d+ \(phase reroute\) \| rank 1: ",
    ),
}


def fault_on_one_rank(name: str) -> tuple[str, bool]:
    """Worker: the message, and whether the group still works."""
    rank, group = dist.get_rank(), dist.group.WORLD
    fault = FAULTS[name][0]
    config = pruning(max_drop=0.5) if name == "dropped pair" else exact()
    kwargs = _unlike_plans(rank) if fault is None else {}
    if fault is None:
        text = raised(CASE, config, group=group, **kwargs)
    else:
        with fault(rank):
            text = raised(CASE, config, group=group)
    run(CASE, exact(), group=group)
    return text, True


@pytest.mark.distributed
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_named_on_every_rank(pool2: Pool, name: str) -> None:
    (first, _), (second, _) = pool2.run(fault_on_one_rank, name, limit_s=20)
    assert first == second
    assert re.search(FAULTS[name][1], first), first


def numbers_on_one_rank(what: str) -> str:
    """Worker: only rank 1 has the bad number, in its own tokens or experts."""
    case = NUMBERS[what][0] if dist.get_rank() == 1 else CASE
    text = raised(case, exact(), group=dist.group.WORLD)
    run(CASE, exact(), group=dist.group.WORLD)
    return text


@pytest.mark.distributed
@pytest.mark.parametrize("what", NUMBERS)
def test_a_bad_number_on_one_rank_is_named_on_every_rank(pool2: Pool, what: str) -> None:
    first, second = pool2.run(numbers_on_one_rank, what, limit_s=20)
    assert first == second
    assert f"rank 1: {NUMBERS[what][1]}" in first


def test_enable_lasts_until_disable_and_contexts_nest() -> None:
    nobody = probe.current()
    checks = lrmoe.debug.enable(finite=False)
    with debug.checked() as inner:
        assert probe.current() is inner
        with debug.checked():
            assert probe.current() is not inner
    assert probe.current() is checks
    lrmoe.debug.enable()
    lrmoe.debug.disable()
    lrmoe.debug.disable()
    assert probe.current() is nobody


def test_an_error_of_another_kind_leaves_no_finding_behind() -> None:
    def broken(*_: Any, **__: Any) -> None:
        looking: Any = probe.current()
        looking._findings.add("something")
        raise ZeroDivisionError

    with debug.checked():
        with mock.patch("lrmoe.layer.function.walk_forward", broken), pytest.raises(ZeroDivisionError):
            run(CASE, exact())
        run(CASE, exact())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_mark_is_a_nan_that_no_operation_makes(dtype: torch.dtype) -> None:
    with PoisonEmpty():
        marked = [torch.empty(3, dtype=dtype), torch.zeros(2, 2, dtype=dtype).new_empty(4)]
    for tensor in marked:
        assert bool(torch.isnan(tensor).all())
        assert bool(poisoned(tensor).all())
    computed = torch.tensor([INF], dtype=dtype) - INF
    assert bool(torch.isnan(computed).all())
    assert not bool(poisoned(computed).any())
    assert not bool(poisoned(torch.full((3,), NAN, dtype=dtype)).any())


def test_integers_are_poisoned_with_their_largest_value() -> None:
    with PoisonEmpty():
        assert torch.empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
    flags = torch.zeros(2, dtype=torch.bool)
    poison(flags)
    assert not bool(flags.any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_a_digest_changes_with_any_bit_and_with_the_order(dtype: torch.dtype) -> None:
    rows = torch.arange(24).to(dtype).view(6, 4)
    first, second = digests(rows, [2, 4])
    changed = rows.clone()
    changed[3, 2] += 1
    assert digests(changed, [2, 4])[0] == first
    assert digests(changed, [2, 4])[1] != second
    assert digests(rows[[1, 0, 2, 3, 4, 5]], [2, 4])[0] != first
    assert digests(rows, [0, 6])[0] == 0
    many = torch.arange(5000).to(dtype).view(2500, 2)  # several blocks
    assert digests(many, [2500]) != digests(many.flip(0), [2500])


def test_a_frozen_part_is_no_fault() -> None:
    layer = build(CASE, exact())
    with debug.checked():
        leaf = leaves(CASE, ["d_hidden"])
        out = layer(leaf["d_hidden"], CASE.ids, *(leaf[n] for n in GRADS[1:]), training=True)
        out.backward(CASE.grad_out)
    assert leaf["d_gate_up"].grad is None


def test_a_checked_training_run_has_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[debug.Checks] = []
    make = debug.Checks

    def kept(**kwargs: Any) -> debug.Checks:
        made.append(make(**kwargs))
        return made[-1]

    monkeypatch.setattr(debug, "Checks", kept)
    losses = {}
    for name, more in (("plain", []), ("checked", ["--checked"])):
        tiny_config(tmp_path, train={"name": name, "steps": 3}).write(tmp_path / "run.toml")
        done = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "run.toml"), *more])
        assert done.exit_code == 0, done.exception
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses[name] = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert losses["checked"] == losses["plain"]
    assert len(losses["plain"]) == 3
    assert len(made) == 1
    assert made[0].made["plan"] >= 3
