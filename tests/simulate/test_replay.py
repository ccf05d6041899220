"""Replay: every rank's work is the real work of the plan, in values, rows and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError
from lrmoe.planning.memory import ExpertShape
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import Topology
from lrmoe.planning.seats import seats_of
from lrmoe.simulate import replay_rank
from lrmoe.simulate.cluster import Calls
from lrmoe.simulate.generators import fixed_peak, generate
from lrmoe.simulate.replay import HALF, Lane, Question, replay
from lrmoe.simulate.replay_calls import published_call, recorded_call
from lrmoe.simulate.replay_data import Data, make_data, route_tokens
from lrmoe.simulate.replay_rank import Rank, cut
from lrmoe.simulate.replay_routes import Backward, Wire, order_source, reroute
from lrmoe.simulate.replay_summary import summarise
from lrmoe.simulate.replay_times import Times
from lrmoe.simulate.scenario import SYSTEMS, Allowance, Layer
from lrmoe.telemetry.traces import Trace

CPU = torch.device("cpu")
TOPOLOGY = Topology(ranks=4, experts=16)
SHAPE = ExpertShape(hidden=12, width=8, element_bytes=8)


def question(**fields: Any) -> Question:
    counts = generate("hot_rank", ranks=4, experts=16, top_k=2, tokens=48, seed=3, steps=14, boost=20)
    given: dict[str, Any] = {
        "systems": SYSTEMS,
        "calls": Calls(name="hot rank", counts=list(counts), skip=13),
        "topology": TOPOLOGY,
        "layer": Layer(shape=SHAPE, top_k=2),
        "allowance": Allowance(max_drop=0.2),
        "config": LRMoEConfig(max_drop=0.2, seed=5),
        "dtype": "fp64",
        "device": CPU,
        "repeats": 1,
        "link_bytes_per_s": 1e6,
    }
    return Question(**{**given, **fields})


def data_of(asked: Question) -> Data:
    return make_data(
        asked.calls.counts[-1], SHAPE, 2, dtype=torch.float64, device=CPU, seed=asked.config.seed
    )


@pytest.fixture(scope="module")
def lanes() -> dict[str, Lane]:
    return {lane.name: lane for lane in replay(question())}


def expert(data: Data, e: int, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up[e].T).chunk(2, dim=1)
    return (F.silu(gate) * up) @ down[e].T


def reference(data: Data, kept: Backward) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Weight gradients, and each source's input gradient per pair, of the kept pairs; a loop over experts."""
    gate_up, down = data.gate_up.clone().requires_grad_(), data.down.clone().requires_grad_()
    x_R, total = [], torch.zeros((), dtype=torch.float64)
    for rank, source in enumerate(data.sources):
        x_NH = source.x_TH.repeat_interleave(data.slots, dim=0).requires_grad_()
        x_R.append(x_NH)
        for wire in (kept.stay, kept.moved):
            pair = wire.pair_R[rank]
            scale = source.alpha_TK.reshape(-1)[pair]
            scale = scale if wire.weight_R is None else scale * wire.weight_R[rank]
            ids = source.ids_TK.reshape(-1)[pair]
            for e in ids.unique().tolist():
                at = pair[ids == e]
                y = expert(data, e, x_NH[at], gate_up, down)
                total = total + (scale[ids == e, None] * source.g_TH[at // data.slots] * y).sum()
    grads = torch.autograd.grad(total, [gate_up, down, *x_R], materialize_grads=True)
    return grads[0], grads[1], list(grads[2:])


def check(data: Data, plan: LayerPlan, forward: Wire, kept: Backward) -> None:
    """Outputs, input gradients and summed weight gradients of all ranks against the loop."""
    d_gate_up, d_down, dx_R = reference(data, kept)
    found = torch.zeros_like(d_gate_up), torch.zeros_like(d_down)
    seats = forward.seats
    for rank in range(plan.topology.ranks):
        one = Rank(data, forward, rank, len(seats.expert_Q[seats.of(rank)]), Times(CPU))
        one.forward(norms=True)
        assert one.y_MH is not None
        pairs = [(s, p) for s, part in enumerate(forward.part(rank, forward.pair_R)) for p in part.tolist()]
        for row, (s, p) in zip(one.y_MH, pairs, strict=True):
            source = data.sources[s]
            e, x = int(source.ids_TK.reshape(-1)[p]), source.x_TH[p // data.slots][None]
            torch.testing.assert_close(row, expert(data, e, x, data.gate_up, data.down)[0])
        one.backward(kept)
        assert sum(len(dx) for dx in one.dx) == plan.backward_load_R[rank]
        for wire, dx in zip((kept.stay, kept.moved), one.dx, strict=False):
            wanted = [
                dx_R[s][p] for s, part in enumerate(wire.part(rank, wire.pair_R)) for p in part.tolist()
            ]
            torch.testing.assert_close(dx, torch.stack(wanted) if wanted else dx[:0])
        own = torch.from_numpy(seats.expert_Q[seats.of(rank)])
        for total, grad in zip(found, one.grads, strict=True):
            total.index_add_(0, own, grad)
    torch.testing.assert_close(found[0], d_gate_up)
    torch.testing.assert_close(found[1], d_down)


@pytest.mark.parametrize("name", [*SYSTEMS, HALF])
def test_every_system_computes_what_a_loop_computes(
    name: str, lanes: dict[str, Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(replay_rank.BLOCK_ROWS, "cpu", 7)  # seats are cut, blocks hold several seats
    lane = lanes[name]
    check(data_of(question()), lane.plan, lane.forward, lane.kept)
    kept = {"lrmoe": 0.8, HALF: 0.5}.get(name, 1.0)
    pairs = [torch.cat([lane.kept.stay.pair_R[r], lane.kept.moved.pair_R[r]]) for r in range(4)]
    assert all(len(p.unique()) == len(p) for p in pairs)
    assert sum(map(len, pairs)) == lane.plan.kept == -(-384 * kept // 1)


def test_pairs_that_move_are_computed_again_elsewhere() -> None:
    """A plan whose backward leaves three pairs at one of two seats of an expert."""
    asked = question()
    data = data_of(asked)
    home = LayerPlan(
        topology=TOPOLOGY,
        counts_RE=data.counts_RE,
        instance_expert_J=np.arange(16),
        instance_rank_J=TOPOLOGY.home_E,
        assign_RJ=data.counts_RE,
        quota_E=data.counts_RE.sum(axis=0),
    )
    half = data.counts_RE[:, 0] // 2
    assign = np.concatenate((data.counts_RE, half[:, None]), axis=1)
    assign[:, 0] -= half
    load = assign.sum(axis=0)
    backward = load.copy()
    backward[0], backward[16] = 3, load[0] + load[16] - 3
    plan = LayerPlan(
        topology=TOPOLOGY,
        counts_RE=data.counts_RE,
        instance_expert_J=np.append(home.instance_expert_J, 0),
        instance_rank_J=np.append(home.instance_rank_J, 2),
        assign_RJ=assign,
        quota_E=home.quota_E,
        backward_J=backward,
    )
    seats = seats_of(plan, homes=False)
    pair_R = [order_source(source.ids_TK, seats, rank)[1] for rank, source in enumerate(data.sources)]
    forward = Wire(seats=seats, counts_RQ=seats.assign_RQ, pair_R=pair_R)
    kept = reroute(forward, None, Times(CPU))
    assert int(kept.moved.counts_RQ.sum()) == load[0] - 3 > 0
    check(data, plan, forward, kept)


def test_blocks_cover_all_rows_once() -> None:
    for segments in ([0, 5, 0, 9, 1, 0], [], [0, 0], [4], [3, 3, 3]):
        for limit in (1, 3, 4, 100):
            found = list(cut(segments, limit))
            rows = [0] * len(segments)
            for block in found:
                assert sum(block.counts) == block.at.stop - block.at.start <= limit
                for seat, count in zip(range(block.seats.start, block.seats.stop), block.counts, strict=True):
                    rows[seat] += count
            assert rows == list(segments)
            assert [b.at.start for b in found] == [0, *(b.at.stop for b in found)][: len(found)]


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [9, 1, 1], [0, 0], [4, 4, 4, 4]])
def test_tokens_take_distinct_experts_with_the_given_counts(counts: list[int]) -> None:
    ids_TK = route_tokens(np.array(counts), 2, np.random.default_rng(0))
    taken = ids_TK[ids_TK >= 0]
    assert np.bincount(taken, minlength=len(counts)).tolist() == counts
    for token in ids_TK:
        own = token[token >= 0]
        assert len(set(own)) == len(own)
    assert len(ids_TK) == max(-(-sum(counts) // 2), max(counts))


def test_bytes_are_those_of_the_rows(lanes: dict[str, Lane]) -> None:
    """Inputs, stash, gradients and returned rows of the fullest rank, and the weights with fp64 gradients."""
    base, ours = lanes["megatron"], lanes["lrmoe"]
    rows = int(base.plan.forward_load_R.max())
    assert base.parts["backward"]["stash"] == rows * 16 * 8
    assert base.parts["backward"]["dispatched"] == rows * 12 * 8
    assert base.parts["backward"]["weights"] == base.parts["backward"]["grads"] == 4 * SHAPE.weight_bytes
    assert ours.parts["backward"]["stash"] <= int(ours.plan.backward_load_R.max()) * 16 * 8
    for lane in lanes.values():
        for side in ("forward", "backward"):
            assert sum(lane.parts[side].values()) == lane.most[f"{side}_subtotal"]
            assert lane.most[f"{side}_subtotal"] <= lane.most[f"{side}_memory"]
    assert base.most["backward_unpacked"] == base.most["backward_subtotal"]
    dropped = ours.plan.forward_load_R.sum() - ours.plan.kept
    extra = ours.most["backward_unpacked"] - ours.most["backward_subtotal"]
    assert 0 < extra <= dropped * (16 + 12) * 8
    assert ours.most["backward_subtotal"] < 0.75 * base.most["backward_subtotal"]


def test_summary_adds_measured_and_modelled_time(lanes: dict[str, Lane]) -> None:
    asked = question()
    found = summarise(asked, list(lanes.values()))
    systems = found["systems"]
    for figures in systems.values():
        for side in ("forward", "backward"):
            phases = figures["phases"][side]
            assert figures[f"{side}_ms"] == pytest.approx(
                sum(map(sum, (p.values() for p in phases.values())))
            )
    base = systems["megatron"]
    rows = base["phases"]["forward"]["modelled"]["dispatch"] / 1e3 * 1e6 / SHAPE.row_bytes
    counts = asked.calls.counts[-1]
    entering = counts.sum(axis=0).reshape(4, 4).sum(axis=1) - np.diag(counts.reshape(4, 4, 4).sum(axis=2))
    assert rows == pytest.approx(entering.max())
    assert systems["lrmoe"]["backward_speedup"] == pytest.approx(
        base["backward_ms"] / systems["lrmoe"]["backward_ms"]
    )
    assert systems["lrmoe"]["phases"]["backward"]["modelled"]["select"] > 0
    assert "select" not in base["phases"]["backward"]["modelled"]


def test_link_rule_makes_a_balanced_exchange_a_third() -> None:
    counts = np.full((4, 16), 6, dtype=np.int64)
    calls = Calls(name="even", counts=[counts], skip=0)
    asked = question(systems=("megatron",), calls=calls, link_bytes_per_s=None)
    (lane,) = replay(asked)
    found = summarise(asked, [lane])
    exchange = sum(sum(p["modelled"].values()) for p in found["systems"]["megatron"]["phases"].values())
    even = lane.times.mean("forward", 4) + lane.times.mean("backward", 4)
    assert exchange / (exchange + even) == pytest.approx(1 / 3)


def test_times_take_medians_and_add_the_parts_of_a_phase() -> None:
    times = Times(CPU)
    for ms in (1.0, 9.0, 2.0):
        times.add("backward", 0, "select", ms)
    times.add("backward", 0, "select_source", 4.0)
    times.add("backward", 1, "select", 5.0)
    assert times.by_phase("backward") == {"select": {0: 6.0, 1: 5.0}}
    assert times.slowest("backward") == {"select": 6.0}
    assert times.slowest("forward") == {}


def test_the_default_call_is_the_published_one() -> None:
    calls = published_call()
    counts_RE = calls.counts[-1]
    assert counts_RE.shape == (8, 128)
    assert counts_RE.sum(axis=1).tolist() == [262144] * 8
    assert abs(fixed_peak(counts_RE) - 2.49) <= 0.01


def test_a_call_of_a_trace_has_those_before_it_as_history() -> None:
    counts = np.arange(5 * 4 * 8).reshape(5, 4, 8)
    zeros = np.zeros(5, dtype=np.int64)
    trace = Trace(counts_CRE=counts, step_C=np.arange(5), micro_batch_C=zeros, layer_C=zeros)
    assert len(recorded_call(trace, None, None, None).counts) == 5
    found = recorded_call(trace, 2, 0, 3)
    assert (len(found.counts), found.skip) == (4, 3)
    np.testing.assert_array_equal(found.counts[-1], counts[3].reshape(2, 2, 8).sum(axis=1))
    for bad in ({"layer": 1, "call": None}, {"layer": None, "call": 5}):
        with pytest.raises(ConfigError, match="the trace has"):
            recorded_call(trace, None, **bad)


def test_fixed_ownership_must_be_there() -> None:
    with pytest.raises(ConfigError, match="needs megatron"):
        question(systems=("lrmoe",))
    with pytest.raises(ConfigError, match="repeats=0"):
        question(repeats=0)
    for workers in (0, 5):
        with pytest.raises(ConfigError, match=f"workers={workers}"):
            question(workers=workers)


def test_ranks_that_run_at_the_same_time_hold_and_send_the_same(lanes: dict[str, Lane]) -> None:
    threads = torch.get_num_threads()
    for lane in replay(question(workers=3, systems=("megatron", "lrmoe"))):
        alone = lanes[lane.name]
        subtotals = [name for name in alone.most if not name.endswith("memory")]
        assert {name: lane.most[name] for name in subtotals} == {name: alone.most[name] for name in subtotals}
        np.testing.assert_array_equal(lane.kept.stay.counts_RQ, alone.kept.stay.counts_RQ)
        assert lane.energy_dropped == alone.energy_dropped
        assert lane.times.by_phase("backward").keys() == alone.times.by_phase("backward").keys()
    assert torch.get_num_threads() == threads
