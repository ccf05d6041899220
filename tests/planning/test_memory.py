"""Bytes: the published arithmetic exactly, hand-counted parts, chunks, whole models, rows under a budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lrmoe.errors import PlanError
from lrmoe.planning import ExpertShape, LayerPlan, Problem, Topology, get_policy, predict_bytes
from lrmoe.planning.memory import (
    Execution,
    call_bytes,
    held_R,
    published_bytes,
    replica_bytes,
    training_execution,
)
from lrmoe.planning.model_memory import OPTIMIZERS, Training, model_bytes, rows_within
from lrmoe.planning.plan import Traffic
from lrmoe.planning.shapes import SHAPES

GIB = 2**30
QWEN = SHAPES["qwen3-30b-a3b"].expert()
SMALL = ExpertShape(hidden=8, width=4, element_bytes=2)


def problem(counts: list[list[int]], **options: Any) -> Problem:
    array = np.array(counts, dtype=np.int64)
    topology = Topology(ranks=array.shape[0], experts=array.shape[1])
    return Problem(counts_RE=array, topology=topology, **options)


def at_home(counts: list[list[int]]) -> LayerPlan:
    return get_policy("megatron")(problem(counts))


def with_replica(plan: LayerPlan, expert: int, rank: int, rows: int) -> LayerPlan:
    """The plan with `rows` of source `rank`'s own pairs of `expert` kept on `rank` instead, both passes."""
    assign = np.hstack([plan.assign_RJ, np.zeros((plan.topology.ranks, 1), dtype=np.int64)])
    assign[rank, expert] -= rows
    assign[rank, -1] = rows
    return replace(
        plan,
        instance_expert_J=np.append(plan.instance_expert_J, expert),
        instance_rank_J=np.append(plan.instance_rank_J, rank),
        assign_RJ=assign,
        backward_J=assign.sum(axis=0),
    )


def published_call(rows_of_the_fullest: int) -> LayerPlan:
    """Eight ranks, 262,144 pairs each, experts at home, the first rank with so many rows."""
    pairs, ranks = 262_144, 8
    rest = (ranks * pairs - rows_of_the_fullest) // (ranks - 1)
    load = np.array([rows_of_the_fullest, *([rest] * (ranks - 1))])
    load[-1] += ranks * pairs - load.sum()
    counts = np.zeros((ranks, 128), dtype=np.int64)
    left = np.full(ranks, pairs)
    for home in range(ranks):
        for source in range(ranks):
            take = min(int(left[source]), int(load[home] - counts[:, home * 16].sum()))
            counts[source, home * 16] += take
            left[source] -= take
    return at_home(counts.tolist())


class TestPublishedArithmetic:
    """Qwen3-30B-A3B on 8 GPUs: 262,144 pairs per GPU and layer, experts in bf16 with fp32 gradients."""

    def test_base_placement_is_0_42_gib(self) -> None:
        base = published_bytes(QWEN, published_call(262_144))["base"]
        assert QWEN.params == 4_718_592
        assert set(base.tolist()) == {16 * 4_718_592 * 6}
        assert round(base[0] / GIB, 2) == 0.42

    def test_two_replicas_are_0_05_gib(self) -> None:
        plan = with_replica(with_replica(published_call(262_144), 16, 0, 0), 32, 0, 0)
        replicas = published_bytes(QWEN, plan)["replicas"]
        assert replicas.tolist() == [2 * 4_718_592 * 6] + [0] * 7
        assert round(replicas[0] / GIB, 2) == 0.05

    def test_a_pair_takes_20_kib_of_token_buffer(self) -> None:
        tokens = published_bytes(QWEN, published_call(262_144))["tokens"]
        assert tokens.tolist() == [262_144 * 20 * 1024] * 8
        assert tokens[0] == 5 * GIB

    def test_fixed_ownership_at_its_peak_needs_12_46_and_12_88_gib(self) -> None:
        plan = published_call(round(2.492 * 262_144))
        parts = published_bytes(QWEN, plan)
        assert round(parts["tokens"][0] / GIB, 2) == 12.46
        assert round(sum(part[0] for part in parts.values()) / GIB, 2) == 12.88
        assert sum(part.max() for part in parts.values()) == sum(part[0] for part in parts.values())


class TestPredictBytes:
    COUNTS = ((3, 1, 0, 2), (1, 0, 4, 1))  # two ranks, two experts each
    RUN = Execution(differentiable=True, stash=True, norms=True, input_gradient=True, weight_gradient=True)

    def test_every_part_by_hand(self) -> None:
        plan = at_home([list(row) for row in self.COUNTS])
        row, weight = 8 * 2, 3 * 8 * 4 * 2
        # rank 0 sends 6 pairs and receives 3+1+1+0 = 5; rank 1 sends 6 and receives 0+2+4+1 = 7
        for rank, received in ((0, 5), (1, 7)):
            assert predict_bytes(SMALL, plan, rank, self.RUN) == {
                "weights": 2 * weight,
                "grads": 2 * weight,
                "replicas": 0,
                "dispatched": (6 + received) * row,
                "stash": received * 2 * 4 * 2 + 6 * 4,
                "backward": 2 * (6 + received) * row,
                "outputs": (6 + received) * row,
            }

    def test_one_rank_moves_nothing(self) -> None:
        plan = at_home([[3, 2]])
        parts = predict_bytes(SMALL, plan, 0, replace(self.RUN, norms=False))
        assert (parts["dispatched"], parts["outputs"], parts["backward"]) == (0, 5 * 16, 5 * 16)

    def test_evaluation_needs_no_gradients(self) -> None:
        plan = at_home([[3, 2]])
        run = Execution(
            differentiable=False, stash=False, norms=False, input_gradient=False, weight_gradient=False
        )
        parts = predict_bytes(SMALL, plan, 0, run)
        assert (parts["grads"], parts["backward"], parts["stash"]) == (0, 0, 0)

    def test_a_replica_counts_weights_and_an_fp32_gradient(self) -> None:
        plan = with_replica(at_home([list(row) for row in self.COUNTS]), 2, 0, 0)
        assert predict_bytes(SMALL, plan, 0, self.RUN)["replicas"] == 3 * 8 * 4 * (2 + 4)
        assert predict_bytes(SMALL, plan, 1, self.RUN)["replicas"] == 0

    def test_local_rows_of_a_replica_still_count_where_they_run(self) -> None:
        home = at_home([list(row) for row in self.COUNTS])
        moved = with_replica(home, 3, 0, 2)  # rank 0 keeps its two pairs of expert 3
        before, after = (predict_bytes(SMALL, plan, 1, self.RUN)["stash"] for plan in (home, moved))
        assert before - after == 2 * 2 * 4 * 2

    def test_shares_of_quotas_beyond_int64_products(self) -> None:
        big = 2**33
        plan = at_home([[big, big], [big, big]])
        parts = predict_bytes(SMALL, plan, 0, self.RUN)
        assert parts["backward"] == 2 * (2 * big + 2 * big) * 16

    @pytest.mark.parametrize("field", ["hidden", "width", "element_bytes"])
    def test_sizes_below_one_are_refused(self, field: str) -> None:
        with pytest.raises(PlanError, match=f"{field}=0"):
            replace(SMALL, **{field: 0})


class TestCallBytes:
    PLAN = at_home([[40, 10, 20, 30], [10, 20, 30, 40]])

    def run(self, *, stash: bool = True) -> Execution:
        return training_execution(self.PLAN, stash=stash)

    def test_a_call_agrees_with_the_ledgers_view_up_to_scratch(self) -> None:
        call = call_bytes(SMALL, self.PLAN, self.run(), gradient_bytes=2)
        for rank in range(2):
            forward, backward = call.rank(rank)
            booked = predict_bytes(SMALL, self.PLAN, rank, self.run())
            for part in ("weights", "grads", "replicas", "dispatched", "stash", "outputs"):
                assert forward[part] == booked[part], part
            assert backward["backward"] == booked["backward"]
            received = int(self.PLAN.forward_load_R[rank]) * SMALL.row_bytes
            assert backward["dispatched"] == received, "what was sent is free again, what was received stays"

    def test_recompute_keeps_no_projection(self) -> None:
        kept = call_bytes(SMALL, self.PLAN, self.run(stash=False))
        assert kept.backward["stash"].tolist() == [0, 0]
        stash = call_bytes(SMALL, self.PLAN, self.run())
        assert (stash.backward["stash"] == self.PLAN.forward_load_R * 2 * 4 * 2).all()

    def test_chunks_divide_what_does_not_stay(self) -> None:
        whole = call_bytes(SMALL, self.PLAN, self.run(stash=False))
        cut = replace(self.PLAN, forward_chunks=4, backward_chunks=4)
        parts = call_bytes(SMALL, cut, self.run())
        for part in ("outputs", "scratch"):
            assert (parts.forward[part] <= whole.forward[part] // 4 + 64).all()
        assert parts.backward["stash"].tolist() == [0, 0]
        assert (parts.peak_R < whole.peak_R).all()
        # a chunk's inputs travel again in backward: a quarter of the rows sent and received
        rows = (25 + 20, 25 + 30)  # received 80 and 120 in all, sent 100
        assert parts.backward["dispatched"].tolist() == [n * SMALL.row_bytes for n in rows]

    def test_backward_shrinks_with_what_is_left_out(self) -> None:
        asked = problem(self.PLAN.counts_RE.tolist(), max_drop=0.5)
        pruned = get_policy("lrmoe")(asked)
        run = training_execution(pruned, stash=True)
        call = call_bytes(SMALL, pruned, run)
        full = call_bytes(SMALL, self.PLAN, self.run())
        assert call.backward["backward"].sum() <= 0.51 * full.backward["backward"].sum()
        assert (call.forward["outputs"] == full.forward["outputs"]).all()


class TestModelBytes:
    PLAN = at_home([[40, 10, 20, 30], [10, 20, 30, 40]])
    RUN = training_execution(PLAN, stash=True)
    PARAMS = 2 * 3 * 8 * 4  # of a rank and layer

    def test_layers_multiply_state_and_stash_but_not_transients(self) -> None:
        one, many = (model_bytes(SMALL, self.PLAN, self.RUN, Training(layers=n)) for n in (1, 5))
        for part in ("weights", "optimizer", "stash"):
            assert (many.forward[part] == 5 * one.forward[part]).all(), part
        assert (many.forward["outputs"] == one.forward["outputs"]).all()
        assert (many.forward["scratch"] == one.forward["scratch"]).all()

    def test_checkpointing_lets_one_stash_wait(self) -> None:
        one = model_bytes(SMALL, self.PLAN, self.RUN, Training(layers=1))
        many = model_bytes(SMALL, self.PLAN, self.RUN, Training(layers=5, checkpointing=True))
        assert (many.forward["stash"] == one.forward["stash"]).all()

    @pytest.mark.parametrize(("name", "size"), OPTIMIZERS.items())
    def test_optimizer_kinds(self, name: str, size: int) -> None:
        state = model_bytes(SMALL, self.PLAN, self.RUN, Training(layers=3, optimizer=name))
        assert state.forward["optimizer"].tolist() == [3 * self.PARAMS * size] * 2
        shared = model_bytes(
            SMALL, self.PLAN, self.RUN, Training(layers=3, optimizer=name, optimizer_shards=2)
        )
        assert shared.forward["optimizer"].tolist() == [3 * self.PARAMS * size // 2] * 2

    @pytest.mark.parametrize("size", [2, 4])
    def test_gradient_dtypes(self, size: int) -> None:
        found = model_bytes(SMALL, self.PLAN, self.RUN, Training(layers=3, gradient_bytes=size))
        assert found.forward["grads"].tolist() == [3 * self.PARAMS * size] * 2
        assert (found.backward["grads"] - found.forward["grads"]).tolist() == [self.PARAMS * 2] * 2

    def test_shared_slots_count_once_and_resident_slots_in_every_layer(self) -> None:
        plan = with_replica(self.PLAN, 2, 0, 0)
        shared = model_bytes(SMALL, plan, self.RUN, Training(layers=5)).forward["replicas"]
        assert shared.tolist() == [replica_bytes(SMALL, self.RUN), 0]
        none, one = np.zeros(2, dtype=np.int64), np.ones(2, dtype=np.int64)
        traffic = Traffic(fetch_R=none, refetch_R=none, return_R=none, state_R=none, resident_R=one)
        resident = replace(plan, traffic=traffic)
        found = model_bytes(SMALL, resident, self.RUN, Training(layers=5)).forward["replicas"]
        assert found.tolist() == [5 * replica_bytes(SMALL, self.RUN)] * 2
        assert held_R(resident).tolist() == [1, 1]

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"layers": 0}, "layers=0"),
            ({"layers": 1, "optimizer_shards": 0}, "optimizer_shards=0"),
            ({"layers": 1, "gradient_bytes": 8}, "gradient_bytes=8"),
            ({"layers": 1, "optimizer": "adam"}, "did you mean 'adamw'"),
        ],
    )
    def test_bad_values_are_named(self, fields: dict[str, Any], said: str) -> None:
        with pytest.raises(PlanError, match=said):
            Training(**fields)


@pytest.mark.parametrize("stash", [True, False])
@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_rows_within_a_budget_is_tight_and_safe(stash: bool, layers: int, checkpointing: bool) -> None:
    """A call whose fullest rank has exactly the rows that fit stays under the budget, within one row's charge."""
    training = Training(layers=layers, optimizer="none", checkpointing=checkpointing)
    sent, here = 100, 150
    plan = at_home([[100, 0], [50, 50]])
    assert plan.forward_load_R.tolist() == [here, 50]
    run = replace(training_execution(plan, stash=stash), norms=True)
    needed = int(model_bytes(SMALL, plan, run, training).peak_R[0])
    rows, replica = rows_within(
        needed, SMALL, pairs=sent, local_experts=1, run=run, training=training, alone=False
    )
    assert 0.9 * here <= rows <= here
    assert replica >= 1
    below, _ = rows_within(0, SMALL, pairs=sent, local_experts=1, run=run, training=training)
    assert below < 1
