"""The limit on added variance and the automatic drop over several ranks: the same decisions everywhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lrmoe.checkpoint.layers import layers_of
from lrmoe.layer import MoELayer
from lrmoe.planning.score_bins import COLUMNS
from lrmoe.telemetry import CallRecord
from tests.distributed.calls import bounds_of, even
from tests.distributed.pool import Pool
from tests.layer.harness import build, pruning, run
from tests.reference import Case, make_case

pytestmark = pytest.mark.distributed

CASE = make_case(tokens=160, experts=8, top_k=2, hidden=8, width=6, seed=5)


def drifting(call: int) -> Case:
    """Tokens' gradients whose spread grows, and routing that changes, from call to call."""
    generator = torch.Generator().manual_seed(call)
    tokens = CASE.hidden.shape[0]
    noise = torch.randn(tokens, 1, generator=generator, dtype=CASE.grad_out.dtype)
    popular = torch.rand(tokens, 8, generator=generator) + 0.1 * torch.arange(8)
    return dataclasses.replace(
        CASE, grad_out=CASE.grad_out * ((0.2 + call / 150) * noise).exp(), ids=popular.argsort(dim=1)[:, :2]
    )


def advance(layer: MoELayer, config: Any, calls: range, **kwargs: Any) -> list[CallRecord]:
    """This rank's part of some calls."""
    found = []
    at = bounds_of(even(CASE, dist.get_world_size()))[dist.get_rank()]
    for call in calls:
        run(drifting(call).tokens(*at), config, layer=layer, group=dist.group.WORLD, **kwargs)
        found.append(layer.telemetry.drain()[-1])
        layer.clock.advance()
    return found


def whole(config: Any, calls: int) -> list[tuple[list[int], dict[str, float], str, float, float]]:
    """Worker: every call's quotas, decisions, and this rank's added variance and energy."""
    layer = build(CASE, config, group=dist.group.WORLD)
    return [
        (r.quota_E, r.control, r.drop_reason, r.variance_added, r.energy)
        for r in advance(layer, config, range(calls))
    ]


def ratios(by_rank: list[list[Any]]) -> np.ndarray:
    """Added over own variance of every call, over all ranks."""
    return np.array(
        [sum(one[3] for one in call) / sum(one[4] for one in call) for call in zip(*by_rank, strict=True)]
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"selection": "local"},
        {"drop": "auto"},
        {"select_in": "forward", "score": "alpha_phi"},
        {"replica_slots": 0, "drop": "auto", "selection": "local", "lean_wire": "auto"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())) or "default",
)
def test_ranks_decide_alike_and_the_mean_keeps_to_the_limit(pool2: Pool, fields: dict[str, Any]) -> None:
    config = pruning(max_drop=0.9, max_added_variance=0.1, **fields)
    found = pool2.run(whole, config, 75, limit_s=90)
    for one, other in zip(*found, strict=True):
        assert one[:3] == other[:3]
    means = np.convolve(ratios(found), np.ones(50) / 50, "valid")
    assert means.max() <= 0.11
    assert means.min() >= 0.06, "and the limit is used"


def test_four_ranks_with_replicas_decide_alike(pool4: Pool) -> None:
    config = pruning(max_drop=0.7, max_added_variance=0.2, drop="auto", warmup_steps=5)
    found = pool4.run(whole, config, 30, limit_s=90)
    for call in zip(*found, strict=True):
        assert all(one[:3] == call[0][:3] for one in call)
    told = found[0][-1][1]
    assert told["auto_ratio"] > 0
    assert told["auto_drop"] > 0


def interrupted(config: Any) -> bool:
    """Worker: a layer restored from its own saved state goes on as the one that was not."""
    group = dist.group.WORLD
    layer = build(CASE, config, group=group)
    advance(layer, config, range(12))
    saved = json.loads(json.dumps(layer.state_dict()))
    went_on = advance(layer, config, range(12, 24))
    other = build(CASE, config, group=group, step=12)
    other.load_state_dict(saved)
    resumed = advance(other, config, range(12, 24))
    return [r.quota_E for r in went_on] == [r.quota_E for r in resumed] and [r.control for r in went_on] == [
        r.control for r in resumed
    ]


@pytest.mark.parametrize("selection", ["global", "local"])
def test_resumed_is_uninterrupted(pool2: Pool, selection: str) -> None:
    config = pruning(max_drop=0.6, max_added_variance=0.1, drop="auto", selection=selection, warmup_steps=3)
    assert all(pool2.run(interrupted, config, limit_s=60))


def recomputed(checkpoint: str) -> bool:
    """Worker: checkpointing changes no decision and no state."""
    config = pruning(max_drop=0.6, max_added_variance=0.1, drop="auto")
    plain, again = (build(CASE, config, group=dist.group.WORLD) for _ in range(2))
    one = advance(plain, config, range(6))
    two = advance(again, config, range(6), checkpoint=checkpoint)
    same = [r.quota_E for r in one] == [r.quota_E for r in two]
    return same and plain.state_dict() == again.state_dict()


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_a_recompute_teaches_nothing_twice(pool2: Pool, checkpoint: str) -> None:
    assert all(pool2.run(recomputed, checkpoint, limit_s=60))


def saved_states(selection: str) -> dict[str, Any]:
    """Worker: this rank's state after some calls."""
    config = pruning(max_drop=0.6, max_added_variance=0.1, selection=selection)
    layer = build(CASE, config, group=dist.group.WORLD)
    advance(layer, config, range(5))
    return layer.state_dict()


def own_part(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Worker: what a checkpoint of one layer gives this rank."""
    stored = [{"layers": {"it": state}} for state in states]
    return layers_of(stored, dist.get_rank(), dist.get_world_size())["layers"]["it"]


def goes_on(selection: str, states: list[dict[str, Any]]) -> tuple[list[int], int, float]:
    """Worker: another number of ranks takes the states over; the first call's quotas and what it knows."""
    group = dist.group.WORLD
    config = pruning(max_drop=0.6, max_added_variance=0.1, selection=selection)
    layer = build(CASE, config, group=group, step=5)
    layer.load_state_dict(own_part(states))
    unsent = layer.controller.learned.calls
    found = advance(layer, config, range(5, 6))[0]
    return found.quota_E, unsent, -1.0 if found.variance_known is None else found.variance_known


@pytest.mark.parametrize("selection", ["global", "local"])
def test_another_number_of_ranks_takes_over_what_means_the_same_there(
    pool2: Pool, pool4: Pool, selection: str
) -> None:
    states = pool2.run(saved_states, selection, limit_s=60)
    rows = len(states[0]["score_sums"])
    assert rows == (4 if selection == "global" else 0)
    assert all(len(row) == COLUMNS for row in states[0]["score_sums"])
    found = pool4.run(goes_on, selection, states, limit_s=60)
    assert all(one == found[0] for one in found)
    assert found[0][1] == 0, "what two ranks had not sent means nothing to four"
    assert (found[0][2] >= 0) == (selection == "global")


def other_way(estimator: str, selection: str, states: list[dict[str, Any]]) -> tuple[list[int], float]:
    """Worker: a layer of another configuration goes on from these states; its first quotas, and scores it knows of."""
    limit = {"max_added_variance": 0.1} if estimator == "sampled" else {}
    config = pruning(max_drop=0.6, estimator=estimator, selection=selection, **limit)
    layer = build(CASE, config, group=dist.group.WORLD, step=5)
    layer.load_state_dict(own_part(states))
    known = float(layer.controller.learned.sums_XF.sum())
    return advance(layer, config, range(5, 6))[0].quota_E, known


def states_of(estimator: str, selection: str) -> dict[str, Any]:
    """Worker: this rank's state after some calls."""
    config = pruning(max_drop=0.6, estimator=estimator, selection=selection)
    layer = build(CASE, config, group=dist.group.WORLD)
    advance(layer, config, range(5))
    return layer.state_dict()


WAYS = [("sampled", "global"), ("sampled", "local"), ("topk", "global")]


@pytest.fixture(scope="module")
def pool1() -> Iterator[Pool]:
    """One gloo process."""
    pool = Pool(1)
    yield pool
    pool.close()


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_a_run_goes_on_with_another_estimator_or_selection_or_number_of_ranks(
    request: pytest.FixtureRequest, ranks: tuple[int, int]
) -> None:
    """What was learned carries over where it means the same, and begins anew elsewhere."""
    before, after = (request.getfixturevalue(f"pool{size}") for size in ranks)
    for one in WAYS:
        states = before.run(states_of, *one, limit_s=60)
        for other in WAYS:
            found = after.run(other_way, *other, states, limit_s=60)
            assert all(quota == found[0][0] for quota, _ in found), f"{one} to {other}"
            by_home = [
                way == ("sampled", "global") or (way[0] == "sampled" and size == 1)
                for way, size in zip((one, other), ranks, strict=True)
            ]
            same = one == other == ("sampled", "local") and ranks[0] == ranks[1]
            assert (found[0][1] > 0) == (all(by_home) or same), f"{one} to {other}"
