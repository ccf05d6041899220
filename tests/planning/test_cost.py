"""Predicted time: hand-computed cases, what it must grow with, the published line, and calibration files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrmoe.errors import PlanError
from lrmoe.planning import ExpertShape, LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.calibration import CONSTANTS, PHASES, Calibration, Constants, fit_phase_scale
from lrmoe.planning.cost import LayerTime, predict_layer, rank_traffic, replica_copies
from lrmoe.planning.hardware import Hardware, get_hardware
from lrmoe.planning.moves import backward_moves
from lrmoe.planning.shapes import SHAPES

H100 = get_hardware("h100")
QWEN = SHAPES["qwen3-30b-a3b"].expert()

# Round numbers: 1 TFLOP/s, 1 TB/s of memory, 100 GB/s inside the node, 10 GB/s between nodes, no overheads.
ROUND = Hardware(
    name="round", about="test", memory_bytes=2**30, flops=1e12, hbm_bytes_per_s=1e12, nvlink_bytes_per_s=100e9,
    pcie_bytes_per_s=50e9, network_bytes_per_s=10e9, source="test",
)  # fmt: skip
IDEAL = Calibration(
    constants=Constants(
        gemm_efficiency=1, gemm_extra_rows=0, hbm_efficiency=1, nvlink_efficiency=1, pcie_efficiency=1,
        network_efficiency=1, nvlink_latency_us=0, pcie_latency_us=0, network_latency_us=0, peer_us=0, phase_us=0,
        plan_us=0,
    )
)  # fmt: skip
SHAPE = ExpertShape(hidden=500, width=100, element_bytes=2)  # 1 kB rows, 0.3 MFLOP per row, 300 kB of weights


def at_home(counts: np.ndarray, ranks_per_node: int | None = None, **options: Any) -> LayerPlan:
    topology = Topology(ranks=counts.shape[0], experts=counts.shape[1], ranks_per_node=ranks_per_node)
    policy = "lrmoe" if options else "megatron"
    return get_policy(policy)(Problem(counts_RE=counts.astype(np.int64), topology=topology, **options))


def loaded(peak: float, *, ranks: int = 8, experts: int = 128, pairs: int = 262_144) -> np.ndarray:
    """Counts whose first home has `peak` times the mean load; others share the rest."""
    home = np.full(ranks, (ranks - peak) / (ranks - 1))
    home[0] = peak
    return np.tile(np.repeat(home * pairs * ranks / experts / ranks, experts // ranks), (ranks, 1)).round()


def ideal(plan: LayerPlan, **options: Any) -> LayerTime:
    return predict_layer(SHAPE, ROUND, plan, calibration=IDEAL, top_k=4, planning_ms=0.0, **options)


class TestByHand:
    COUNTS = np.full((4, 4), 1000)  # every rank sends 1000 rows to every home

    def test_one_node(self) -> None:
        time = ideal(at_home(self.COUNTS))
        wire = 3000 * 1000 / 100e9 * 1e3  # 3000 rows of 1 kB leave and enter each rank
        gemm = 4000 * 6 * 500 * 100 / 1e12 * 1e3
        assert time.forward["dispatch"] == pytest.approx(wire)
        assert time.forward["experts"] == pytest.approx(gemm)
        assert time.backward["experts_backward"] == pytest.approx(2 * gemm)
        assert time.forward["pack"] == pytest.approx(2 * 4000 * 1000 / 1e12 * 1e3)
        assert time.forward["combine"] == pytest.approx(wire + 1.25 * 4000 * 1000 / 1e12 * 1e3)
        assert time.backward["exchange"] == pytest.approx(3000 * 1004 / 100e9 * 1e3)
        assert [time.backward[p] for p in ("score", "select", "reroute", "replicas")] == [0, 0, 0, 0]

    def test_two_nodes_use_both_links_side_by_side(self) -> None:
        time = ideal(at_home(self.COUNTS, ranks_per_node=2))
        assert time.forward["dispatch"] == pytest.approx(2000 * 1000 / 10e9 * 1e3)
        inside_only = np.kron(np.eye(2), np.full((2, 2), 1000))
        assert ideal(at_home(inside_only, ranks_per_node=2)).forward["dispatch"] == pytest.approx(
            1000 * 1000 / 100e9 * 1e3
        )

    def test_without_nvlink_the_node_uses_pcie(self) -> None:
        time = predict_layer(
            SHAPE, replace(ROUND, nvlink_bytes_per_s=None), at_home(self.COUNTS), calibration=IDEAL
        )
        assert time.forward["dispatch"] == pytest.approx(3000 * 1000 / 50e9 * 1e3)

    def test_one_rank_sends_nothing(self) -> None:
        time = ideal(at_home(np.full((1, 4), 1000)))
        assert time.forward["dispatch"] == time.forward["pack"] == time.backward["exchange"] == 0
        assert time.backward["return"] > 0, "input gradients are still summed per token"

    def test_the_slowest_rank_counts(self) -> None:
        skewed = self.COUNTS.copy()
        skewed[:, 0] = 4000
        assert ideal(at_home(skewed)).forward["experts"] == pytest.approx(
            4 * ideal(at_home(self.COUNTS)).forward["experts"]
        )

    def test_few_rows_are_bound_by_reading_weights(self) -> None:
        fast = replace(ROUND, flops=1e15)
        time = predict_layer(SHAPE, fast, at_home(np.full((4, 4), 1)), calibration=IDEAL)
        rows = 4 * (2 * 500 + 6 * 100) * 2
        assert time.forward["experts"] == pytest.approx((300_000 + rows) / 1e12 * 1e3)

    def test_recompute_runs_the_first_projection_again(self) -> None:
        plan = at_home(self.COUNTS)
        stash, again = (ideal(plan, stash=keep).backward["experts_backward"] for keep in (True, False))
        assert again == pytest.approx(stash * 4 / 3)

    def test_chunks_dispatch_their_inputs_again(self) -> None:
        plan = at_home(self.COUNTS)
        cut = ideal(replace(plan, forward_chunks=2, backward_chunks=2))
        whole = ideal(plan)
        assert cut.backward["exchange"] == pytest.approx(
            whole.backward["exchange"] + whole.forward["dispatch"]
        )
        assert cut.backward["experts_backward"] == pytest.approx(whole.backward["experts_backward"] * 4 / 3)

    def test_dropping_pays_for_choosing_and_saves_the_rest(self) -> None:
        whole, pruned = (ideal(at_home(self.COUNTS, max_drop=drop)) for drop in (0.0, 0.5))
        for phase in ("exchange", "experts_backward", "return"):
            assert pruned.backward[phase] == pytest.approx(whole.backward[phase] / 2, rel=0.01), phase
        assert all(pruned.backward[phase] > 0 for phase in ("score", "select", "reroute"))
        assert pruned.forward["experts"] == whole.forward["experts"]

    def test_planning_time_is_what_was_measured_or_modelled(self) -> None:
        plan = at_home(self.COUNTS)
        given = predict_layer(SHAPE, ROUND, plan, planning_ms=7.0)
        assert given.forward["plan"] == pytest.approx(7.0, abs=0.1)
        assert 0 < predict_layer(SHAPE, ROUND, plan).forward["plan"] < 0.2


def with_copies(plan: LayerPlan, expert: int, ranks: list[int]) -> LayerPlan:
    """Copies of one expert that run each rank's own pairs."""
    assign = [plan.assign_RJ]
    for rank in ranks:
        column = np.zeros((plan.topology.ranks, 1), dtype=np.int64)
        column[rank] = plan.assign_RJ[rank, expert]
        assign[0][rank, expert] = 0
        assign.append(column)
    wide = np.hstack(assign)
    return replace(
        plan,
        instance_expert_J=np.append(plan.instance_expert_J, [expert] * len(ranks)),
        instance_rank_J=np.append(plan.instance_rank_J, ranks),
        assign_RJ=wide,
        backward_J=wide.sum(axis=0),
    )


class TestReplicas:
    def test_one_copy_costs_weights_twice_and_gradients_once(self) -> None:
        plan = with_copies(at_home(np.full((4, 4), 1000)), 0, [1])
        time = ideal(plan)
        weights, gradient = 300_000, 600_000
        assert time.forward["replicas"] == pytest.approx(weights / 100e9 * 1e3)
        assert time.backward["replicas"] == pytest.approx((weights + gradient) / 100e9 * 1e3)
        assert time.phases["replicas"] == time.forward["replicas"] + time.backward["replicas"]

    def test_many_copies_go_out_by_a_tree(self) -> None:
        plan = with_copies(at_home(np.full((8, 8), 1000)), 0, [1, 2, 3, 4, 5, 6, 7])
        copies = replica_copies(plan, plan.moved.fetch_R)
        assert copies[0, 0] == 2, "the home sends two, whatever the fan-out"
        assert copies[0].max() == 2
        assert copies[1].max() == 0

    def test_copies_outside_the_node_use_the_network(self) -> None:
        plan = with_copies(at_home(np.full((4, 4), 1000), ranks_per_node=2), 0, [1, 2])
        copies = replica_copies(plan, plan.moved.fetch_R)
        assert copies.tolist() == [[1, 1, 0, 0], [1, 0, 1, 0]]

    def test_local_rows_leave_the_wire(self) -> None:
        home = at_home(np.full((4, 4), 1000))
        before = ideal(home).forward["dispatch"]
        copied = with_copies(home, 0, [1, 2, 3])
        after = rank_traffic(copied.topology, copied.instance_rank_J, copied.assign_RJ)
        assert after[0].tolist() == [3000, 3000, 3000, 3000]  # rank 0 still sends, and no longer receives
        assert ideal(copied).forward["dispatch"] == pytest.approx(before)


def test_moved_pairs_carry_their_input_again() -> None:
    home = at_home(np.full((2, 2), 1000))
    copied = with_copies(home, 0, [1])
    assert backward_moves(copied).moved_RJ.sum() == 0
    back_home = replace(copied, backward_J=np.array([2000, 2000, 0]))
    moves = backward_moves(back_home)
    assert moves.moved_RJ.sum() == pytest.approx(1000)
    assert moves.rows_RJ.sum(axis=0).tolist() == pytest.approx([2000, 2000, 0])
    assert moves.rows_RJ.sum() == pytest.approx(4000)
    assert moves.moved_RJ[1, 0] == pytest.approx(1000), "rank 1's pairs leave rank 1's copy"
    assert ideal(back_home).backward["exchange"] > ideal(copied).backward["exchange"]


class TestPublished:
    """Measured on 8 Hopper GPUs: a layer's backward costs about 1.44 ms + 11.3 ms x (peak / mean)."""

    @pytest.mark.parametrize("peak", [1.0, 1.5, 2.49])
    def test_backward_is_of_the_published_size(self, peak: float) -> None:
        time = predict_layer(QWEN, H100, at_home(loaded(peak)))
        assert time.backward_ms == pytest.approx(1.44 + 11.3 * peak, rel=0.3)

    def test_backward_grows_in_a_line_with_the_peak(self) -> None:
        at = {peak: predict_layer(QWEN, H100, at_home(loaded(peak))).backward_ms for peak in (1.0, 1.5, 2.0)}
        assert at[2.0] - at[1.5] == pytest.approx(at[1.5] - at[1.0], rel=0.01)

    def test_experts_backward_is_twice_the_forward(self) -> None:
        time = predict_layer(QWEN, H100, at_home(loaded(1.0)))
        assert time.backward["experts_backward"] == pytest.approx(2 * time.forward["experts"], rel=0.02)


def test_the_public_function_gives_every_phase_in_order() -> None:
    plan = at_home(loaded(1.5), max_drop=0.2)
    phases = predict_layer(QWEN, H100, plan).phases
    assert tuple(phases) == PHASES
    assert sum(phases.values()) == pytest.approx(predict_layer(QWEN, H100, plan).total_ms)
    assert all(type(ms) is float for ms in phases.values())


@pytest.mark.parametrize(
    ("options", "said"), [({"top_k": 0}, "top_k=0"), ({"planning_ms": -1.0}, "planning_ms")]
)
def test_bad_arguments_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        predict_layer(SHAPE, ROUND, at_home(np.full((2, 2), 5)), **options)


class TestCalibration:
    PLAN = at_home(loaded(1.5), max_drop=0.2)

    def test_a_file_comes_back_as_it_was(self, tmp_path: Path) -> None:
        made = Calibration(
            constants=Constants(gemm_efficiency=0.71),
            measured=frozenset({"gemm_efficiency"}),
            phase_scale={"dispatch": 1.2},
            hardware="h100",
            about="eight of them",
        )
        made.save(tmp_path / "c.json")
        read = Calibration.load(tmp_path / "c.json")
        assert read == made
        assert read.fingerprint() == made.fingerprint() != Calibration().fingerprint()

    def test_a_measured_phase_is_scaled_and_labelled(self) -> None:
        scaled = Calibration(phase_scale={"dispatch": 2.0}, hardware="h100")
        plain, found = (predict_layer(QWEN, H100, self.PLAN, calibration=c) for c in (None, scaled))
        assert found.forward["dispatch"] == pytest.approx(2 * plain.forward["dispatch"])
        assert found.forward["experts"] == plain.forward["experts"]
        assert found.labels["dispatch"] == "calibrated"
        assert {found.labels[p] for p in PHASES if p != "dispatch"} == {"modelled"}
        assert set(plain.labels.values()) == {"modelled"}

    def test_a_phase_is_calibrated_once_all_its_constants_are(self) -> None:
        some = Calibration(measured=frozenset({"gemm_efficiency"}))
        assert predict_layer(QWEN, H100, self.PLAN, calibration=some).labels["experts"] == "modelled"
        every = Calibration(measured=frozenset(CONSTANTS))
        labels = predict_layer(QWEN, H100, self.PLAN, calibration=every).labels
        assert set(labels.values()) == {"calibrated"}

    def test_it_is_frozen(self) -> None:
        scale = {"plan": 1.0}
        calibration = Calibration(phase_scale=scale)
        scale["plan"] = 5.0
        assert calibration.phase_scale["plan"] == 1.0
        with pytest.raises(TypeError):
            calibration.phase_scale["plan"] = 2.0  # type: ignore[index]

    def test_measurements_of_another_device_are_refused(self) -> None:
        other = Calibration(hardware="l40s")
        with pytest.raises(PlanError, match="measured on 'l40s' and hardware='h100'"):
            predict_layer(QWEN, H100, self.PLAN, calibration=other)

    def test_scales_are_median_ratios_that_undo_a_known_error(self) -> None:
        modelled = [predict_layer(QWEN, H100, at_home(loaded(p))).phases for p in (1.0, 1.5, 2.0)]
        measured = [{**call, "experts": 1.3 * call["experts"], "score": 9.0} for call in modelled]
        measured[0]["experts"] *= 50  # one call that was disturbed
        scale = fit_phase_scale(modelled, measured)
        assert scale["experts"] == pytest.approx(1.3)
        assert scale["dispatch"] == pytest.approx(1.0)
        assert "score" not in scale, "nothing was modelled there"
        again = predict_layer(QWEN, H100, at_home(loaded(1.5)), calibration=Calibration(phase_scale=scale))
        assert again.forward["experts"] == pytest.approx(measured[1]["experts"])

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"schema": 2}, "schema=2"),
            ({"schema": 1, "constant": {}}, "did you mean 'constants'"),
            ({"schema": 1, "constants": {"gemm_eficiency": 1}}, "did you mean 'gemm_efficiency'"),
            ({"schema": 1, "constants": {"gemm_efficiency": 0}}, "gemm_efficiency=0"),
            (
                {"schema": 1, "constants": {"hbm_efficiency": 1.2}},
                r"hbm_efficiency=1\.2: must lie in \(0, 1\]",
            ),
            ({"schema": 1, "constants": {"plan_us": "fast"}}, "plan_us='fast'"),
            ({"schema": 1, "constants": {"plan_us": -1}}, "plan_us=-1"),
            ({"schema": 1, "constants": [1]}, "constants"),
            ({"schema": 1, "phase_scale": {"experts": 0}}, "phase_scale.experts=0"),
            ({"schema": 1, "phase_scale": {"expert": 1}}, "did you mean 'experts'"),
        ],
    )
    def test_a_bad_file_says_what_is_wrong(
        self, tmp_path: Path, values: dict[str, object], said: str
    ) -> None:
        (tmp_path / "c.json").write_text(json.dumps(values))
        with pytest.raises(PlanError, match=said):
            Calibration.load(tmp_path / "c.json")

    def test_no_file_or_no_json(self, tmp_path: Path) -> None:
        with pytest.raises(PlanError, match="No such file"):
            Calibration.load(tmp_path / "none.json")
        (tmp_path / "c.json").write_text("{")
        with pytest.raises(PlanError, match="not JSON"):
            Calibration.load(tmp_path / "c.json")
        (tmp_path / "c.json").write_text("[]")
        with pytest.raises(PlanError, match="one JSON object"):
            Calibration.load(tmp_path / "c.json")
