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
from lrmoe.layer import experts
from lrmoe.planning.memory import ExpertShape
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import Topology
from lrmoe.planning.seats import Seats, seats_of
from lrmoe.simulate.cluster import Calls
from lrmoe.simulate.generators import fixed_peak, generate
from lrmoe.simulate.measure import extra_slots
from lrmoe.simulate.replay import HALF, Lane, Question, replay
from lrmoe.simulate.replay_calls import published_call, recorded_call
from lrmoe.simulate.replay_data import Data, make_data, route_tokens
from lrmoe.simulate.replay_link import backward_bytes, forward_bytes
from lrmoe.simulate.replay_rank import Rank
from lrmoe.simulate.replay_routes import Backward, Wire, order_by_expert, reroute, sending_order
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


@pytest.fixture(scope="module")
def stashed() -> dict[str, Lane]:
    return {lane.name: lane for lane in replay(question(activations="stash"))}


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
        pair, scale = kept.wire.pair_R[rank], kept.scale_R[rank]
        ids = source.ids_TK.reshape(-1)[pair]
        for e in ids.unique().tolist():
            at = pair[ids == e]
            y = expert(data, e, x_NH[at], gate_up, down)
            total = total + (scale[ids == e, None] * source.g_TH[at // data.slots] * y).sum()
    grads = torch.autograd.grad(total, [gate_up, down, *x_R], materialize_grads=True)
    return grads[0], grads[1], list(grads[2:])


def check(data: Data, plan: LayerPlan, seats: Seats, forward: Wire, kept: Backward, *, stash: bool) -> None:
    """Outputs, input gradients and summed weight gradients of all ranks against the loop."""
    d_gate_up, d_down, dx_R = reference(data, kept)
    found = torch.zeros_like(d_gate_up), torch.zeros_like(d_down)
    for rank in range(plan.topology.ranks):
        one = Rank(data, seats, forward, rank, len(seats.expert_Q[seats.of(rank)]), Times(CPU))
        one.forward(stash=stash, norms=True)
        assert one.y_MH is not None
        pairs = [(s, p) for s, part in enumerate(forward.part(rank, forward.pair_R)) for p in part.tolist()]
        for row, (s, p) in zip(one.y_MH, pairs, strict=True):
            source = data.sources[s]
            e, x = int(source.ids_TK.reshape(-1)[p]), source.x_TH[p // data.slots][None]
            torch.testing.assert_close(row, expert(data, e, x, data.gate_up, data.down)[0])
        one.backward(kept)
        assert len(one.dx) == plan.backward_load_R[rank]
        parts = kept.wire.part(rank, kept.wire.pair_R)
        wanted = [dx_R[s][p] for s, part in enumerate(parts) for p in part.tolist()]
        torch.testing.assert_close(one.dx, torch.stack(wanted) if wanted else one.dx[:0])
        own = torch.from_numpy(seats.expert_Q[seats.of(rank)])
        for total, home, slots in zip(found, one.grads[:2], one.grads[2:], strict=True):
            rows = [t for t in (home, slots) if t is not None]
            total.index_add_(0, own, torch.cat(rows))
    torch.testing.assert_close(found[0], d_gate_up)
    torch.testing.assert_close(found[1], d_down)


@pytest.mark.parametrize("activations", ["recompute", "stash"])
@pytest.mark.parametrize("name", [*SYSTEMS, HALF])
def test_every_system_computes_what_a_loop_computes(
    name: str,
    activations: str,
    lanes: dict[str, Lane],
    stashed: dict[str, Lane],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experts, "BLOCK_ROWS", 7)  # a few seats at a time
    stash = activations == "stash"
    lane = (stashed if stash else lanes)[name]
    check(data_of(question()), lane.plan, lane.seats, lane.forward, lane.kept, stash=stash)
    kept = {"lrmoe": 0.8, HALF: 0.5}.get(name, 1.0)
    pairs = lane.kept.wire.pair_R
    assert all(len(p.unique()) == len(p) for p in pairs)
    assert sum(map(len, pairs)) == lane.plan.kept == -(-384 * kept // 1)


@pytest.mark.parametrize("stash", [True, False])
def test_pairs_that_move_are_computed_again_elsewhere(stash: bool) -> None:
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
    order_R = [
        order_by_expert(source.ids_TK, 16, len(source.ids_TK) * 2)[: int(n)]
        for source, n in zip(data.sources, data.counts_RE.sum(axis=1), strict=True)
    ]
    place_R = [sending_order(seats, rank, CPU) for rank in range(4)]
    pair_R = [order[place] for order, place in zip(order_R, place_R, strict=True) if place is not None]
    forward = Wire(counts_RV=seats.assign_RQ, starts_R=seats.starts_R, pair_R=pair_R)
    kept = reroute(data, plan, seats, order_R, place_R, None, Times(CPU), stash=stash)
    assert kept.moved == load[0] - 3 > 0
    assert kept.again is not None
    assert int(kept.again.counts_RV.sum()) == (kept.moved if stash else plan.kept)
    check(data, plan, seats, forward, kept, stash=stash)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [9, 1, 1], [0, 0], [4, 4, 4, 4]])
def test_tokens_take_distinct_experts_with_the_given_counts(counts: list[int]) -> None:
    ids_TK = route_tokens(np.array(counts), 2, np.random.default_rng(0))
    taken = ids_TK[ids_TK >= 0]
    assert np.bincount(taken, minlength=len(counts)).tolist() == counts
    for token in ids_TK:
        own = token[token >= 0]
        assert len(set(own)) == len(own)
    assert len(ids_TK) == max(-(-sum(counts) // 2), max(counts))


def test_bytes_are_those_of_the_rows(lanes: dict[str, Lane], stashed: dict[str, Lane]) -> None:
    """Inputs, stash, gradients and returned rows of the fullest rank, and the weights with fp64 gradients."""
    for found in (lanes, stashed):
        for lane in found.values():
            for side in ("forward", "backward"):
                assert sum(lane.parts[side].values()) == lane.most[f"{side}_subtotal"]
                assert lane.most[f"{side}_subtotal"] <= lane.most[f"{side}_memory"]
    base, ours = lanes["megatron"], lanes["lrmoe"]
    rows, kept = int(base.plan.forward_load_R.max()), int(ours.plan.backward_load_R.max())
    assert base.parts["backward"]["weights"] == base.parts["backward"]["grads"] == 4 * SHAPE.weight_bytes
    assert base.parts["backward"]["backward"] == 3 * rows * SHAPE.row_bytes
    assert not any(base.parts["backward"].get(part) for part in ("stash", "dispatched", "replicas"))
    assert ours.parts["backward"]["backward"] <= 3 * kept * SHAPE.row_bytes
    slots = [2 * int(extra) * SHAPE.weight_bytes for extra in extra_slots(ours.plan)]
    assert ours.parts["backward"]["replicas"] > 0
    assert ours.parts["backward"]["replicas"] in slots
    assert ours.most["backward_subtotal"] < 0.75 * base.most["backward_subtotal"]
    whole = stashed["lrmoe"]
    assert stashed["megatron"].parts["backward"]["stash"] == rows * 16 * 8
    assert stashed["megatron"].parts["backward"]["dispatched"] == rows * SHAPE.row_bytes
    # Nothing of the stash goes when pairs are left out: it is read by index until backward has ended.
    assert whole.parts["backward"]["stash"] > 16 * 8 * int(whole.plan.forward_load_R.min())


def test_gradients_have_the_dtypes_of_the_layer() -> None:
    """Of home seats the compute dtype, of slots fp32: what travels home is summed there."""
    bf16 = ExpertShape(hidden=12, width=8, element_bytes=2)
    asked = question(dtype="bf16", layer=Layer(shape=bf16, top_k=2), systems=("megatron", "lrmoe", "symi"))
    found = {lane.name: lane for lane in replay(asked)}
    held = found["megatron"].parts["backward"]
    assert held["grads"] == held["weights"] == 4 * bf16.weight_bytes
    extra = [int(n) * 3 * bf16.weight_bytes for n in extra_slots(found["lrmoe"].plan)]
    assert found["lrmoe"].parts["backward"]["replicas"] in extra
    held = found["symi"].parts["backward"]  # no homes: all seats are slots
    assert held["grads"] == held["weights"] == 0
    assert held["replicas"] == 6 * 3 * bf16.weight_bytes


def test_inputs_travel_again_where_nothing_stayed(lanes: dict[str, Lane], stashed: dict[str, Lane]) -> None:
    shape = SHAPE
    for found, again in ((lanes, 1), (stashed, 0)):
        lane = found["megatron"]
        sent = backward_bytes(lane.plan, lane.seats, lane.kept, shape, scored=False)
        forward = forward_bytes(lane.plan, lane.seats, shape, scored=False)
        per_row = sent["exchange"] / np.maximum(forward["dispatch"] / shape.row_bytes, 1)
        np.testing.assert_allclose(per_row, (1 + again) * shape.row_bytes + 4)


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
    assert found["settings"]["activations"] == "recompute"
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
    times.add("backward", 0, "order", 4.0)
    times.add("backward", 0, "pack", 3.0)
    times.add("backward", 1, "select", 5.0)
    assert times.by_phase("backward") == {"select": {0: 2.0, 1: 5.0}, "pack": {0: 7.0}}
    assert times.slowest("backward") == {"select": 5.0, "pack": 7.0}
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
    with pytest.raises(ConfigError, match="activations='all'"):
        question(activations="all")
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
        np.testing.assert_array_equal(lane.kept.wire.counts_RV, alone.kept.wire.counts_RV)
        assert lane.energy_dropped == alone.energy_dropped
        assert lane.times.by_phase("backward").keys() == alone.times.by_phase("backward").keys()
    assert torch.get_num_threads() == threads
