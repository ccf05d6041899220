"""The kept set fixed in forward, over ranks: the same as if backward fixed it, whatever the plan, wire or storage."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.config import FORWARD_SCORES, LRMoEConfig
from lrmoe.distributed import Comm
from lrmoe.planning.policies import Policy
from tests.distributed.calls import even, spread
from tests.distributed.plans import Crafted, InParts, unpriced
from tests.distributed.pool import Pool
from tests.distributed.test_pruned_plans import DROPS, check_pruned
from tests.distributed.test_sharded_layer import sharded_call
from tests.distributed.truth import mine
from tests.layer.harness import build, forward, leaves, pruning, run
from tests.reference import GRADS, Case, make_case

pytestmark = pytest.mark.distributed

MODES = list(
    itertools.product(FORWARD_SCORES, ("topk", "sampled"), ("global", "local"), ("full", "retained"))
)
# Every pair of choices, the wire's among them, in a fifth of all.
EITHER_WIRE = list(itertools.product(MODES, (False, "auto")))[::5]
CASE = make_case(tokens=61, experts=8, top_k=3, hidden=8, width=6, seed=1, skew=1.5)
SPLITS = {2: [[30, 31], [61, 0]], 4: [[0, 50, 3, 8], [16, 15, 15, 15]], 8: [[8] * 7 + [5]]}
TALK = ("score", "select", "reroute")


def config_of(mode: tuple[str, str, str, str], **fields: Any) -> LRMoEConfig:
    score, estimator, selection, router_grad = mode
    chosen = {"score": score, "estimator": estimator, "selection": selection, "router_grad": router_grad}
    return pruning(**{"max_drop": 0.5, "replica_slots": 2, **chosen, **fields})


def both(
    case: Case, config: LRMoEConfig, sizes: list[int], policy: Policy | None = None, **kwargs: Any
) -> list[Any]:
    """This rank's runs with the kept set fixed in backward and in forward: new layers, so that both plan alike."""
    found = []
    for place in ("backward", "forward"):
        one = config.replace(select_in=place)
        layer = build(case, one, group=dist.group.WORLD, policy=policy)
        found.append(run(mine(case, sizes), one, group=dist.group.WORLD, layer=layer, **kwargs))
    return found


def same(case: Case, config: LRMoEConfig, sizes: list[int], what: str, **kwargs: Any) -> Any:
    """Both runs give the same bits; returns the record of the choice in forward."""
    late, early = both(case, config, sizes, **kwargs)
    for name in ("out", *GRADS):
        assert torch.equal(getattr(late.result, name), getattr(early.result, name)), f"{what}: {name}"
    for name in ("quota_E", "rows_backward_local", "nonfinite_scores", "energy_dropped", "variance_added"):
        assert getattr(late.record, name) == getattr(early.record, name), f"{what}: {name}"
    return early.record


def crafted(first: int) -> list[int]:
    """Worker: every mode on either wire under plans of their own: pairs that move, parts, recompute, idle ranks."""
    moved, ranks = [], dist.get_world_size()
    chosen = list(itertools.product(MODES, (False, "auto"))) if ranks < 8 else EITHER_WIRE
    for seed, (mode, lean) in enumerate(chosen, start=first):
        policy = Crafted(seed=seed, drop=DROPS[seed % 3])
        sizes = SPLITS[ranks][seed % len(SPLITS[ranks])]
        config = config_of(mode, lean_wire=lean, max_drop=0.9)
        record = same(CASE, config, sizes, f"plan {seed}, {mode}, lean wire {lean}", policy=policy)
        moved.append(sum(record.replicas_R))
    return moved


@pytest.mark.parametrize(("ranks", "first"), [(2, 0), pytest.param(4, 50, marks=pytest.mark.long), (8, 31)])
def test_the_same_bits_as_where_backward_selects(
    request: pytest.FixtureRequest, ranks: int, first: int
) -> None:
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    moved = pool.run(crafted, first, limit_s=120)[0]
    assert sum(copies > 0 for copies in moved) >= len(moved) // 2


def references(first: int) -> bool:
    """Worker: the pruned reference with that kept set, which is one process's."""
    for seed, mode in enumerate(MODES, start=first):
        config = config_of(mode, select_in="forward", lean_wire=(False, "auto")[seed % 2], max_drop=0.9)
        check_pruned(config, Crafted(seed=seed, drop=DROPS[seed % 3]), f"plan {seed}, {mode}")
    return True


@pytest.mark.parametrize(("ranks", "first"), [(2, 11), (4, 3)])
def test_equals_the_pruned_reference_and_keeps_one_process_set(
    request: pytest.FixtureRequest, ranks: int, first: int
) -> None:
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    assert all(pool.run(references, first, limit_s=120))


def in_parts() -> list[int]:
    """Worker: copies that kept pairs leave again, the backward in several parts."""
    chunks = []
    for (mode, lean), parts in itertools.product(EITHER_WIRE, ((1, 3), (2, 5), (4, 1))):
        policy = InParts(policy=unpriced, forward=parts[0], backward=parts[1])
        config = config_of(mode, lean_wire=lean)
        record = same(CASE, config, even(CASE, 4), f"{mode}, {lean}, {parts}", policy=policy)
        chunks.append(record.chunks)
    return chunks


def test_a_call_in_parts(pool4: Pool) -> None:
    assert set(pool4.run(in_parts, limit_s=60)[0]) == {3, 4, 5}


def checkpointed() -> bool:
    """Worker: both kinds of checkpointing give the bits of a plain call, and choose once."""
    sizes = even(CASE, dist.get_world_size())
    for (mode, lean), kind in itertools.product(EITHER_WIRE, ("reentrant", "non-reentrant")):
        config = config_of(mode, lean_wire=lean)
        policy = Crafted(seed=MODES.index(mode), chunks=2)
        plain = both(CASE, config, sizes, policy=policy)[1]
        again = both(CASE, config, sizes, policy=policy, checkpoint=kind)[1]
        # A first forward without gradients keeps no outputs, and so sums on the lean wire: other rounding of `out`.
        for name in GRADS if kind == "reentrant" else ("out", *GRADS):
            found, expected = getattr(again.result, name), getattr(plain.result, name)
            assert torch.equal(found, expected), f"{mode}, {lean}, {kind}: {name}"
        chosen = [one.record.bytes.get("select", 0) for one in (plain, again)]
        if mode[0] != "alpha_phi":  # its flags travel once more
            assert chosen[0] == chosen[1], f"{mode}: scores crossed again"
    return True


@pytest.mark.parametrize("ranks", [2, 4])
def test_checkpointing(request: pytest.FixtureRequest, ranks: int) -> None:
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    assert all(pool.run(checkpointed, limit_s=120))


def padded_and_idle() -> bool:
    """Worker: padding takes pairs away, also all of a rank's; ranks without tokens; a call without any."""
    sizes = [0, 50, 3, 8]
    for mode, lean in itertools.product(MODES[::5], (False, "auto")):
        config = config_of(mode, lean_wire=lean)
        for case, tokens in ((CASE, sizes), (CASE.tokens(0, 0), [0] * 4)):
            mask = torch.arange(tokens[dist.get_rank()]) % 3 != (0 if dist.get_rank() == 1 else 3)
            if dist.get_rank() == 2:
                mask = torch.zeros_like(mask)
            same(case, config, tokens, f"{mode}, {lean}, {tokens}", mask=mask)
    return True


def test_padding_idle_ranks_and_no_tokens(pool4: Pool) -> None:
    assert all(pool4.run(padded_and_idle, limit_s=60))


def on_shards() -> bool:
    """Worker: sharded storage, under plans that leave homes empty."""
    sizes = even(CASE, dist.get_world_size())
    for seed, mode in enumerate(MODES[::2]):
        config = config_of(mode, storage="sharded", lean_wire=(False, "auto")[seed % 2])
        found = [
            sharded_call(
                build(
                    CASE, config.replace(select_in=place), group=dist.group.WORLD, policy=Crafted(seed=seed)
                ),
                mine(CASE, sizes),
            )
            for place in ("backward", "forward")
        ]
        for name in ("out", *GRADS):
            assert torch.equal(getattr(found[0], name), getattr(found[1], name)), f"{mode}: {name}"
    return True


def test_sharded_storage(pool4: Pool) -> None:
    assert all(pool4.run(on_shards, limit_s=60))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(pool2: Pool, dtype: torch.dtype) -> None:
    case = CASE.to(dtype)
    assert all(pool2.run(low_precision, case, limit_s=60))


def low_precision(case: Case) -> bool:
    """Worker: narrow rows, routing weights as wide as they or wider."""
    for mode, lean in itertools.product(MODES[::3], (False, "auto")):
        same(case, config_of(mode, lean_wire=lean), even(case, 2), f"{case.hidden.dtype}, {mode}, {lean}")
    return True


def talk(config: LRMoEConfig) -> tuple[dict[str, int], int]:
    """Worker: bytes of the choice that backward sent, and its messages that ranks wait for on the host."""
    part, asked = mine(CASE, even(CASE, dist.get_world_size())), 0
    layer, leaf = build(CASE, config, group=dist.group.WORLD), leaves(part, GRADS, dist.group.WORLD)
    out = forward(layer, part, leaf)
    assert layer.last_record is not None
    before, plain = dict(layer.last_record.bytes), Comm.all_gather_ints

    def counted(comm: Comm, values: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += 1
        return plain(comm, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "all_gather_ints", counted)
        out.backward(part.grad_out)
    after = layer.last_record.bytes
    return {phase: after.get(phase, 0) - before.get(phase, 0) for phase in TALK}, asked


@pytest.mark.parametrize("score", FORWARD_SCORES)
@pytest.mark.parametrize("selection", ["global", "local"])
def test_backward_asks_nobody(pool2: Pool, score: str, selection: str) -> None:
    config = config_of((score, "sampled", selection, "retained"))
    for sent, asked in pool2.run(talk, config.replace(select_in="forward")):
        assert (sum(sent.values()), asked) == (0, 0)
    for sent, asked in pool2.run(talk, config):
        assert sum(sent.values()) > 0
        assert asked == 1


def test_the_choice_costs_a_byte_a_pair_more_than_in_backward(pool2: Pool) -> None:
    """Beside what a choice in backward sends: flags there, but no positions of kept rows back."""
    for score in FORWARD_SCORES:
        config = config_of((score, "topk", "global", "retained"), replica_slots=0)
        late, early = (
            spread(pool2, CASE, config.replace(select_in=place)).records for place in ("backward", "forward")
        )
        for one, other in zip(late, early, strict=True):
            assert sum(other.bytes.values()) <= sum(one.bytes.values())
            assert other.bytes["exchange"] < one.bytes["exchange"]
