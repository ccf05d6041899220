"""`lrmoe plan`: what fits, in which way, what to change when nothing does, sweeps, and errors that help."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrmoe.errors import ConfigError
from lrmoe.experiments.capacity.advice import advise, tried
from lrmoe.experiments.capacity.answer import largest_micro_batch, solve
from lrmoe.experiments.capacity.model import find_model, reserved_estimate
from lrmoe.experiments.capacity.question import Question, question_calls, scale_counts
from lrmoe.experiments.capacity.report import advice_lines, assumptions, memory_table
from lrmoe.planning import Problem
from lrmoe.planning.hardware import get_hardware
from lrmoe.planning.model_config import shape_from_config
from lrmoe.planning.model_memory import Training
from lrmoe.planning.policies import FasterMoE
from lrmoe.planning.shapes import get_shape
from lrmoe.sizes import parse_size
from tests.command import Run, in_process

GIB = 2**30
QWEN = get_shape("qwen3-30b-a3b")
TINY = shape_from_config(
    {
        "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4, "num_experts": 16,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "tiny",
)  # fmt: skip


def ask(**fields: Any) -> Question:
    base = {"model": QWEN, "hardware": get_hardware("h200"), "micro_batch": 2, "sequence": 2048, "gpus": 8}
    return Question(**{**base, **fields})


def tiny(**fields: Any) -> Question:
    """A model whose device memory never binds."""
    return ask(**{"model": TINY, "micro_batch": 4, "sequence": 256, **fields})


class TestSolve:
    def test_fixed_ownership_has_the_peak_that_was_asked_for(self) -> None:
        answer = solve(ask(policy="megatron", peak=2.49))
        assert answer.fixed_peak == pytest.approx(2.49, abs=0.01)
        assert answer.forward_peak == answer.backward_peak == answer.fixed_peak
        assert answer.plan.kept == answer.plan.pairs == 8 * 2 * 2048 * 8

    def test_ours_needs_less_of_everything_than_fixed_ownership(self) -> None:
        ours, fixed = (solve(ask(policy=p, peak=2.49, activations="stash")) for p in ("lrmoe", "megatron"))
        assert ours.fits
        assert ours.forward_peak < 1.1
        assert ours.backward_peak < 0.75
        assert ours.call_need < 0.6 * fixed.call_need
        assert ours.time.backward_ms < 0.5 * fixed.time.backward_ms

    def test_the_plan_is_legal_and_within_its_slots(self) -> None:
        answer = solve(ask(slots=1))
        problem = Problem(
            counts_RE=answer.counts_RE,
            topology=answer.plan.topology,
            slots=1,
            max_drop=answer.question.max_drop,
        )
        answer.plan.check(problem)
        assert answer.plan.replicas_R.max() <= 1

    @pytest.mark.parametrize("policy", ["megatron", "ultraep", "eplb", "symi", "llep"])
    def test_every_kind_of_policy_is_planned(self, policy: str) -> None:
        answer = solve(tiny(policy=policy))
        assert answer.fits
        assert answer.plan.pairs == 8 * 4 * 256 * 2

    @pytest.mark.parametrize("policy", ["fastermoe", "llep"])
    @pytest.mark.parametrize("slots", [0, 1, 3])
    def test_policies_without_a_limit_keep_to_the_slots(self, policy: str, slots: int) -> None:
        answer = solve(ask(policy=policy, slots=slots, peak=2.49))
        assert min(slots, 1) <= int(answer.beyond_R.max()) <= slots

    @pytest.mark.parametrize(
        ("policy", "copies"), [("smartmoe", 0), ("eplb", 16), ("symi", 16), ("megatron", 0)]
    )
    def test_an_expert_that_lives_elsewhere_is_no_copy(self, policy: str, copies: int) -> None:
        assert int(solve(ask(policy=policy, peak=2.49)).beyond_R.sum()) == copies

    def test_policies_decide_with_the_figures_of_the_model(self) -> None:
        answer = solve(
            ask(model=get_shape("mixtral-8x7b"), policy="fastermoe", micro_batch=1, sequence=1024, peak=1.7)
        )
        problem = Problem(counts_RE=answer.counts_RE, topology=answer.plan.topology, slots=2)
        assert FasterMoE().shadows(problem), "experts of the default size would be worth a shadow"
        assert answer.beyond_R.sum() == 0

    def test_the_table_says_which_elements_are_assumed(self) -> None:
        assert "bf16 (assumed), gradients in fp32" in memory_table(solve(ask())).note
        assert "gradients in bf16" in memory_table(solve(ask(gradient_bytes=2))).note

    def test_the_longest_sequences_do_not_overflow(self) -> None:
        answer = solve(ask(micro_batch=1, sequence=2**30))
        assert not answer.fits
        assert answer.device_need > 2**30 * 8 * 2048 * 2

    def test_parts_add_up_to_the_device(self) -> None:
        answer = solve(ask())
        forward, backward = answer.model.rank(answer.rank)
        most = max(sum(forward.values()), sum(backward.values()))
        assert answer.device_need == most + answer.reserved_bytes
        assert answer.budget_need == most - forward["optimizer"]

    def test_equal_questions_get_equal_answers(self) -> None:
        assert solve(ask()).plan.fingerprint() == solve(ask()).plan.fingerprint()
        assert solve(ask(seed=1)).plan.fingerprint() != solve(ask()).plan.fingerprint()

    def test_one_rank(self) -> None:
        answer = solve(tiny(gpus=1, slots=0))
        assert (answer.forward_peak, answer.time.forward["dispatch"]) == (1.0, 0.0)

    def test_data_parallel_copies_share_the_optimizer_state(self) -> None:
        alone, shared = (solve(ask(gpus=gpus, ep=8)) for gpus in (8, 32))
        assert shared.optimizer_bytes * 4 == alone.optimizer_bytes
        assert shared.model.forward["weights"][0] == alone.model.forward["weights"][0]


class TestModes:
    """Less is kept for backward, step by step, as memory shrinks; each step is one that fits."""

    def free(self, **fields: Any) -> int:
        """Bytes of the MoE part when everything may be kept."""
        return solve(tiny(activations="stash", checkpointing="none", **fields)).budget_need

    def test_without_a_limit_everything_is_kept(self) -> None:
        answer = solve(tiny())
        assert (answer.run.stash, answer.checkpointing, answer.chunks) == (True, False, 1)

    def test_a_little_less_recomputes(self) -> None:
        answer = solve(tiny(budget=self.free() - 1))
        assert answer.fits
        assert not (
            answer.run.stash and not answer.checkpointing and answer.chunks == 1 and answer.plan.exact
        )

    def test_needs_fall_from_mode_to_mode(self) -> None:
        needs = [
            solve(tiny(activations=a, checkpointing=c)).budget_need
            for c, a in (("none", "stash"), ("none", "recompute"), ("layer", "stash"), ("layer", "recompute"))
        ]
        assert needs == sorted(needs, reverse=True)
        assert len(set(needs)) == 4

    def test_far_less_runs_in_chunks(self) -> None:
        leanest = solve(tiny(activations="recompute", checkpointing="layer")).budget_need
        fixed = solve(tiny(micro_batch=1, sequence=1)).budget_need
        answer = solve(tiny(budget=fixed + int(0.8 * (leanest - fixed))))
        assert answer.fits
        assert answer.chunks > 1

    def test_a_layer_budget_binds_one_call(self) -> None:
        free = solve(tiny()).call_need
        answer = solve(tiny(layer_budget=int(0.8 * free)))
        assert answer.fits
        assert answer.call_need <= 0.8 * free

    def test_nothing_fits_in_a_byte(self) -> None:
        answer = solve(tiny(budget=1))
        assert not answer.fits
        need, limit = answer.limits["budget"]
        assert need > limit == 1

    def test_fixed_ownership_cannot_be_chunked_by_a_budget(self) -> None:
        leanest = solve(tiny(policy="megatron", activations="recompute", checkpointing="layer")).budget_need
        assert not solve(tiny(policy="megatron", budget=leanest - 1)).fits


class TestLargest:
    def test_it_fits_and_the_next_does_not(self) -> None:
        question = ask(hardware=get_hardware("h100"), gpus=16, sequence=8192)
        largest = largest_micro_batch(question)
        assert largest >= 1
        assert solve(question.change(micro_batch=largest)).fits
        assert not solve(question.change(micro_batch=largest + 1)).fits

    def test_zero_where_not_even_the_weights_fit(self) -> None:
        assert largest_micro_batch(ask(hardware=get_hardware("rtx4090"))) == 0

    def test_more_memory_never_allows_less(self) -> None:
        sizes = [largest_micro_batch(ask(hardware=get_hardware(name))) for name in ("h100", "h200", "b200")]
        assert sizes == sorted(sizes)


class TestAdvice:
    def test_every_suggestion_fits_when_followed(self) -> None:
        question = ask(hardware=get_hardware("h100"), micro_batch=4, sequence=8192)
        answer = solve(question)
        assert not answer.fits
        advice = {a.change: a.micro_batch for a in advise(answer)}
        assert "--gpus 16" in advice
        assert solve(question.change(gpus=16)).fits
        assert solve(question.change(gpus=16, micro_batch=advice["--gpus 16"])).fits
        assert any(change.startswith(("--optimizer", "--grads")) for change in advice)
        assert all(size >= 1 for size in advice.values())

    def test_many_more_gpus_are_found_where_they_fit(self) -> None:
        question = ask(model=get_shape("deepseek-v3"), micro_batch=1, sequence=4096)
        advice = {a.change for a in advise(solve(question))}
        assert "--gpus 128" in advice
        assert not solve(question.change(gpus=64)).fits

    def test_few_experts_are_shared_by_fewer_ranks(self) -> None:
        question = ask(model=get_shape("mixtral-8x7b"), hardware=get_hardware("a100-80"))
        assert "--gpus 32 --ep 8" in tried(question)
        assert "--gpus 1024 --ep 8" in tried(question)
        assert any(a.change.endswith("--ep 8") for a in advise(solve(question)))

    def test_where_nothing_helps_what_was_tried_is_said(self) -> None:
        answer = solve(ask(reserved=2**50))
        assert advise(answer) == []
        said = " ".join(advice_lines(answer, []))
        for option in ("--gpus 1024 --ep 128", "--hardware b200", "--grads bf16", "--micro-batch 1"):
            assert option in said

    def test_a_budget_that_is_too_small_is_answered_with_one_that_is_not(self) -> None:
        question = tiny(budget=1000)
        changes = [a.change for a in advise(solve(question)) if a.change.startswith("--budget")]
        assert len(changes) == 1
        assert solve(question.change(budget=int(changes[0].split()[1]))).fits


class TestQuestion:
    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"gpus": 256}, "gpus=256: Qwen3-30B-A3B has 128 experts"),
            ({"gpus": 256}, r"add --ep 128 \(valid --ep on 256 GPUs: 1, 2, 4, 8, 16, 32, 64, 128\)"),
            ({"gpus": 24, "ep": 12}, r"take --ep 8 \(valid --ep on 24 GPUs: 1, 2, 4, 8\)"),
            ({"gpus": 12, "ep": 12}, "ep=12: .*multiple of the ranks"),
            ({"gpus": 8, "ep": 16}, "ep=16: must divide gpus=8"),
            ({"gpus": 0}, "gpus=0"),
            ({"micro_batch": -1}, "micro_batch=-1"),
            ({"sequence": 0}, "sequence=0"),
            ({"sequence": 10**12}, "sequence=1000000000000: .*at most 1,073,741,824"),
            ({"gpus": 10**9}, "gpus=1000000000: at most 4096 ranks"),
            ({"gpus": 2**21, "ep": 8}, "gpus=2097152: must be at most 1,048,576"),
            ({"gpus": 9, "ep": 1}, "gpus=9: do not fill 2 nodes of 8 evenly; give --nodes"),
            ({"budget": 0}, "budget=0"),
            ({"layer_budget": 0}, "layer_budget=0"),
            ({"reserved": -1}, "reserved=-1"),
            ({"slots": -1}, "slots=-1"),
            ({"slots": 1000}, "slots=1000: must be at most 112"),
            ({"max_drop": 1.0}, "max_drop=1.0"),
            ({"headroom": 1.0}, "headroom=1.0"),
            ({"nodes": 3}, "nodes=3: must divide gpus=8"),
            ({"policy": "lrmo"}, "policy='lrmo'"),
            ({"activations": "keep"}, "activations='keep': must be one of auto, stash, recompute"),
            ({"optimizer": "adam"}, "did you mean 'adamw'"),
            ({"skew": "gauss"}, "skew='gauss'"),
            ({"peak": 9.0}, "peak=9.0"),
            ({"peak": 2.0, "skew": "zipf"}, "only lognormal"),
        ],
    )
    def test_bad_values_are_named(self, fields: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            ask(**fields)

    def test_nodes_follow_the_hardware_and_split_the_group(self) -> None:
        assert ask(gpus=16).topology.ranks_per_node == 8
        assert ask(gpus=16, ep=8).topology.ranks_per_node is None
        assert ask(gpus=16, nodes=4).topology.nodes == 4

    def test_history_comes_before_the_planned_call(self) -> None:
        assert question_calls(tiny(policy="lrmoe")).shape == (1, 8, 16)
        assert len(question_calls(tiny(policy="eplb"))) > 5

    def test_every_source_has_exactly_its_pairs(self) -> None:
        for size in (1, 3, 1000):
            calls = question_calls(tiny(micro_batch=size))
            assert (calls.sum(axis=2) == size * 256 * 2).all()

    def test_scaling_keeps_the_distribution(self) -> None:
        counts = np.random.default_rng(0).multinomial(1000, np.full(10, 0.1), size=4)
        for pairs in (1, 7, 1000, 12_345):
            scaled = scale_counts(counts, pairs)
            assert scaled.sum(axis=1).tolist() == [pairs] * 4
            assert np.abs(scaled - counts * pairs / 1000).max() <= 1
        assert scale_counts(np.zeros((2, 3), dtype=np.int64), 5).sum() == 0


class TestReserved:
    def parts(self, **fields: Any) -> dict[str, int]:
        given = {"tokens": 4096, "gpus": 8, "training": Training(layers=48), **fields}
        return reserved_estimate(QWEN, **given)

    def test_state_is_sharded_over_all_gpus(self) -> None:
        few, many = self.parts(), self.parts(gpus=16)
        assert few["weights"] == -(-QWEN.other_params // 8) * 2
        assert many["optimizer"] == pytest.approx(few["optimizer"] / 2, rel=1e-6)

    def test_checkpointing_keeps_inputs_and_one_layer(self) -> None:
        kept = self.parts(training=Training(layers=48, checkpointing=True))["activations"]
        assert kept == 4096 * 2 * (48 * 2048 + -(-QWEN.token_elements // 48))
        assert kept < self.parts()["activations"] / 4

    def test_given_memory_replaces_the_estimate(self) -> None:
        assert solve(ask(reserved=7 * GIB)).reserved_bytes == 7 * GIB


class TestModels:
    def test_a_configuration_file_and_its_folder(self, tmp_path: Path) -> None:
        config = {
            "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4, "num_experts": 16,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        for path in (tmp_path, tmp_path / "config.json"):
            assert find_model(str(path)).experts == 16
        assert find_model(str(tmp_path)).name == tmp_path.name

    def test_what_a_file_leaves_out_comes_from_its_class(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        (tmp_path / "mixtral.json").write_text(json.dumps({"model_type": "mixtral", "num_hidden_layers": 2}))
        shape = find_model(str(tmp_path / "mixtral.json"))
        assert (shape.name, shape.experts, shape.moe_layers) == ("mixtral", 8, 2)

        assert "hidden_size=4096" in shape.defaults
        assert "num_hidden_layers=2" not in shape.defaults

    def test_what_is_taken_for_granted_is_named(self, tmp_path: Path) -> None:
        config = {
            "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4, "num_experts": 16,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        shape = find_model(str(tmp_path))
        assert shape.defaults == ("tie_word_embeddings=False", "num_key_value_heads=4")
        said = assumptions(solve(ask(model=shape)))
        assert said[0].endswith("from defaults: tie_word_embeddings=False, num_key_value_heads=4.")
        assert "defaults" not in " ".join(assumptions(solve(ask())))

    @pytest.mark.parametrize(("value", "said"), [("32.5", "32.5"), ('"32"', "'32'"), ("null", "null")])
    def test_an_impossible_size_is_not_completed(self, tmp_path: Path, value: str, said: str) -> None:
        (tmp_path / "config.json").write_text(
            f'{{"model_type": "qwen3_moe", "num_experts": {value}, "num_hidden_layers": 2}}'
        )
        with pytest.raises(ConfigError, match=f"num_experts={said}: must be an integer"):
            find_model(str(tmp_path))

    def test_presets_of_the_trainer(self) -> None:
        pytest.importorskip("transformers")
        shape = find_model("glm4-moe-tiny")
        assert (shape.experts, shape.moe_layers, shape.dense_layers) == (16, 3, 1)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "not JSON"),
            ("[]", "one JSON object"),
            ('{"hidden_size": 4}', "not a Mixture-of-Experts model"),
        ],
    )
    def test_bad_files_say_what_is_wrong(self, tmp_path: Path, text: str, said: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=said):
            find_model(str(tmp_path))

    def test_no_such_file_or_model(self) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            find_model("nowhere.json")
        with pytest.raises(ConfigError, match=r"did you mean 'GLM-4\.5-Air'"):
            find_model("glm-4.5-airr")

    @pytest.mark.parametrize(
        ("text", "size"),
        [("60GiB", 60 * GIB), ("1.5 GiB", GIB * 3 // 2), ("512mib", 2**29), ("80GB", 80 * 10**9), ("1000", 1000),
         ("50%", 500)],
    )  # fmt: skip
    def test_sizes(self, text: str, size: int) -> None:
        assert parse_size("budget", text, 1000) == size

    @pytest.mark.parametrize("text", ["0", "9" * 400, "0%", "-1GiB", "3GX", "", "GiB", "101%", "1e9"])
    def test_bad_sizes(self, text: str) -> None:
        with pytest.raises(ConfigError, match="budget="):
            parse_size("budget", text, 1000)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Call `lrmoe plan` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return in_process(monkeypatch, capsys, "plan")


def test_the_documented_example_is_what_the_command_prints() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(root / "tools" / "fill_plan.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


class TestCommand:
    def test_a_readable_answer(self, run: Run) -> None:
        done = run("--hardware", "h200", "--micro-batch", "2", "--seq", "8192", "--peak", "2.49")
        assert done.code == 0, done.err
        for text in ("Qwen3-30B-A3B on 8 x h200", "scratch", "experts_backward", "modelled", "fits: device"):
            assert text in done.out
        assert "400 Gb/s per GPU" in done.out
        assert not list(Path.cwd().iterdir()), "one question writes no file"

    def test_json_holds_every_figure_and_the_whole_plan(self, run: Run) -> None:
        done = run("--hardware", "h200", "--json")
        assert done.code == 0, done.err
        lines = [json.loads(line) for line in done.out.splitlines()]
        assert all(line.keys() == {"name", "value", "unit", "better", "context"} for line in lines)
        values = {
            line["name"].removeprefix("plan.qwen3-30b-a3b.h200.gpus8."): line["value"] for line in lines
        }
        parts = (
            sum(value for name, value in values.items() if name.startswith("bytes.")) - values["bytes.device"]
        )
        assert parts == values["bytes.device"]
        report = lines[0]["context"]["report"]
        assert values["fits"] == 1
        assert len(report["quotas"]) == 128
        assert sum(report["forward_load"]) == sum(report["counts"])
        assert len(report["foreign_experts"]) == report["copies_beyond_one"] <= 16
        assert report["reserved_is"] == "estimated"
        assert values["ms.layer_call"] == pytest.approx(
            sum(sum(report["ms"][side].values()) for side in ("forward", "backward"))
        )

    def test_nothing_fits_is_code_3_with_numbers_and_advice(self, run: Run) -> None:
        done = run("--hardware", "rtx4090", "--model", "Qwen3-235B-A22B")
        assert done.code == 3
        assert done.err.startswith("error: does not fit: device on rank ")
        assert "available 21.60 GiB" in done.err
        assert "What would fit:" in done.out

    def test_a_calibration_labels_its_phases(self, run: Run) -> None:
        Path("c.json").write_text(
            json.dumps({"schema": 1, "hardware": "h200", "phase_scale": {"experts": 1.1}})
        )
        done = run("--hardware", "h200", "--calibration", "c.json")
        assert done.code == 0, done.err
        row = next(line for line in done.out.splitlines() if "experts  " in line)
        assert "calibrated" in row
        refused = run("--hardware", "h100", "--calibration", "c.json")
        assert refused.code == 2
        assert "measured on 'h200'" in refused.err

    def test_a_sweep_is_one_table_and_a_csv_file(self, run: Run) -> None:
        done = run("--sweep", "gpus=8,16,256", "--hardware", "h100,h200", "--csv", "out/t.csv")
        assert done.code == 0, done.err
        with Path("out/t.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [(r["hardware"], r["gpus"]) for r in rows] == [
            (h, g) for h in ("h100", "h200") for g in ("8", "16", "256")
        ]
        assert [r["fits"] for r in rows if r["gpus"] == "256"] == ["-", "-"]
        assert all(int(r["largest_micro_batch"]) >= 1 for r in rows if r["fits"] == "yes")
        assert {r["kind"] for r in rows if r["fits"] == "yes"} == {"modelled"}
        assert "gpus=256" in done.out
        assert "multiple of the ranks" in done.out

    def test_an_option_swept_twice_adds_values_and_each_counts_once(self, run: Run) -> None:
        done = run(
            "--hardware", "h200,h200", "--sweep", "gpus=8,8", "--sweep", "gpus=16,256", "--csv", "t.csv"
        )
        assert done.code == 0, done.err
        with Path("t.csv").open(encoding="utf-8") as file:
            assert [row["gpus"] for row in csv.DictReader(file)] == ["8", "16", "256"]
        assert "\ngpus=256: Qwen3-30B-A3B has 128 experts" in done.out
        assert "add --ep 128" in done.out

    def test_a_skew_that_one_case_cannot_have_is_a_row(self, run: Run) -> None:
        done = run(
            "--model", "Mixtral-8x7B,Qwen3-30B-A3B", "--hardware", "b200", "--gpus", "8", "--peak", "2.5"
        )
        assert done.code == 0, done.err
        assert "--peak=2.5: sigma 8 reaches no more than" in done.out

    def test_several_devices_are_a_sweep_too(self, run: Run) -> None:
        done = run("--hardware", "h200,b200", "--json")
        assert done.code == 0, done.err
        lines = [json.loads(line) for line in done.out.splitlines()]
        assert [line["name"] for line in lines] == [
            f"plan.qwen3-30b-a3b.{name}.gpus8.largest_micro_batch" for name in ("h200", "b200")
        ]
        assert Path("runs/plan/capacity.csv").exists()

    def test_a_table_of_a_given_name_is_replaced_only_when_asked(self, run: Run) -> None:
        Path("t.csv").write_text("mine")
        sweep = ("--hardware", "h200,b200", "--csv", "t.csv")
        refused = run(*sweep)
        assert refused.code == 2
        assert "--overwrite" in refused.err
        assert Path("t.csv").read_text() == "mine"
        assert run(*sweep, "--overwrite").code == 0
        assert Path("t.csv").read_text().startswith("model,")

    def test_the_folder_of_another_run_takes_no_table(self, run: Run) -> None:
        sweep = ("--hardware", "h200,b200")
        assert [run(*sweep).code, run(*sweep).code] == [0, 0]
        Path("runs/plan/metrics.jsonl").write_text("{}")
        refused = run(*sweep)
        assert refused.code == 2
        assert "runs/plan holds an earlier run" in refused.err

    def test_a_sweep_in_which_nothing_fits_is_code_3(self, run: Run) -> None:
        assert run("--sweep", "gpus=1,2", "--hardware", "rtx4090").code == 3

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--model", "qwen3-30b-a3"), "did you mean 'Qwen3-30B-A3B'"),
            (("--hardware", "h1000"), "did you mean 'h100'"),
            (("--budget", "0"), "budget='0'"),
            (("--layer-budget", "-5GiB"), "--layer-budget='-5GiB'"),
            (("--gpus", "3"), "gpus=3"),
            (("--gpus", "256"), "gpus=256"),
            (("--seq", "-8"), "--seq=-8"),
            (("--seq", "9" * 30), "at most 1,073,741,824"),
            (("--gpus", "9" * 9), "--gpus=9"),
            (("--network-gbps", "0"), "--network-gbps=0.0"),
            (("--grads", "fp8"), "grads='fp8'"),
            (("--calibration", "none.json"), "none.json"),
            (("--sweep", "gpu=8"), "did you mean 'gpus'"),
            (("--sweep", "microbatch=8"), "did you mean 'micro-batch'"),
            (("--sweep", "gpus=8,x"), "gpus='x'"),
            (("--sweep", "gpus="), "at least one"),
            (("--sweep", "policy=lrmoe,lrmo"), "--policy='lrmo'"),
            (("--sweep", "gpus=8", "--policy", "lrmo"), "--policy='lrmo'"),
            (("--slots", "1000"), "--slots=1000: must be at most 112"),
            (("--sweep", "gpus=3,5"), "no case can be planned"),
            (("--hardware", ","), "at least one"),
        ],
    )
    def test_bad_usage_is_code_2_and_says_what(self, run: Run, arguments: tuple[str, ...], said: str) -> None:
        done = run(*arguments)
        assert done.code == 2
        assert said in done.err
        assert "Traceback" not in done.err
