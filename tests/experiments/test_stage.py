"""The stage: recorded routing at another size, history as of every step, a file that goes on where it stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lrmoe.experiments.stage import lines as stage_lines
from lrmoe.experiments.stage.history import EveryStep
from lrmoe.experiments.stage.inputs import Routed, Rows, StageSize
from lrmoe.experiments.stage.lanes import reference_of, system_config
from lrmoe.experiments.stage.lines import MAIN, STASH, UNCOUNTED, Call, link_of
from lrmoe.experiments.stage.run import Block, Stage, pending
from lrmoe.experiments.systems.registry import SYSTEMS, get_system
from lrmoe.layer.past import PastCalls
from lrmoe.planning import Problem, Topology
from lrmoe.planning.policies import get_policy
from tests.distributed.pool import Pool
from tests.experiments import stage_cases
from tests.experiments.staged import call

HISTORY = [name for name, system in SYSTEMS.items() if system.info.inputs in ("history", "both")]
LIMIT_S = 240.0  # the first case of a pool imports transformers
JUDGED = ("megatron", "symi", "ultraep", "lrmoe-sampled50", "lrmoe-topk20")


def block(**last_step: int) -> Block:
    """A block of systems and their last steps."""
    return Block(
        model="tiny", aux=0.0, seed=0, folders=dict.fromkeys(last_step, Path("x")), last_step=last_step
    )


def test_pairs_are_repeated_until_gemms_dominate() -> None:
    assert StageSize(width=128).repeats(512) == 43
    assert StageSize(width=64, pairs_over_width=10).repeats(640) == 1


def test_a_rank_gets_its_tokens_repeated_as_recorded() -> None:
    whole = stage_cases.Synthetic(0).routed(1, 0)
    mine = whole.of_rank(1, 4, 3)
    tokens = stage_cases.ROWS * stage_cases.LENGTH // 4
    expected = whole.ids_TK[tokens : 2 * tokens]
    assert torch.equal(mine.ids_TK, torch.cat([expected] * 3))
    assert torch.equal(mine.grad_norm_T[-tokens:], whole.grad_norm_T[tokens : 2 * tokens])
    counts = stage_cases.Synthetic(0).counts(0)[0, 1]
    assert (np.bincount(mine.ids_TK.flatten(), minlength=stage_cases.EXPERTS) == 3 * counts).all()


@pytest.mark.parametrize(("tokens", "slots", "experts"), [(24, 4, 32), (10, 3, 8)])
def test_balanced_counts_are_equal_and_no_token_has_an_expert_twice(
    tokens: int, slots: int, experts: int
) -> None:
    routed = Routed(
        ids_TK=torch.zeros(tokens, slots, dtype=torch.int64),
        alpha_TK=torch.rand(tokens, slots),
        grad_norm_T=torch.rand(tokens),
    )
    made = routed.balanced(experts, 5)
    counts = np.bincount(made.ids_TK.flatten(), minlength=experts)
    assert made.ids_TK.shape == (tokens, slots)
    assert counts.max() - counts.min() <= (0 if tokens * slots % experts == 0 else 2)
    assert all(len(set(row)) == slots for row in made.ids_TK.tolist())
    assert torch.equal(made.alpha_TK, routed.alpha_TK)


def test_rows_depend_on_their_key_alone() -> None:
    rows, again, other = Rows.draw(4, 8, 1, 2), Rows.draw(4, 8, 1, 2), Rows.draw(4, 8, 1, 3)
    assert torch.equal(rows.x_TH, again.x_TH)
    assert not torch.equal(rows.x_TH, other.x_TH)
    assert torch.allclose(rows.direction_TH.norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("name", HISTORY)
def test_a_policy_sees_every_step_and_its_plans_are_those_of_running_each(name: str) -> None:
    policy, topology = get_policy(name), Topology(ranks=4, experts=stage_cases.EXPERTS)
    counts = stage_cases.Synthetic(0).counts(0) * 100

    def ask(counts_RE: np.ndarray) -> Problem:
        return Problem(counts_RE=counts_RE, topology=topology, slots=2)

    past, plans = PastCalls(name), []
    for counts_RE in counts:
        plans.append(policy(replace(ask(counts_RE), history=past.history())))
        past.add(plans[-1])
    skips = EveryStep(policy, name, counts, ask)
    alone = []
    for step in range(7, len(counts) + 1, 7):
        skips.prepare(step)
        skips.prepare(step)  # a warm-up runs the same step
        assert skips(ask(counts[step - 1])).fingerprint() == plans[step - 1].fingerprint()
        assert skips.previous is not None
        assert skips.previous.fingerprint() == plans[step - 2].fingerprint()
        alone.append(policy(ask(counts[step - 1])).fingerprint() == plans[step - 1].fingerprint())
    assert not all(alone), "history matters in this case"
    with pytest.raises(ValueError, match="step=3: steps up to"):
        skips.prepare(3)


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HISTORY)
def test_a_skipped_step_changes_neither_plans_nor_what_they_move(pool4: Pool, name: str) -> None:
    for plans, skipped, sent, skipped_sent in pool4.run(
        stage_cases.as_if_every_step, name, 10, limit_s=LIMIT_S
    ):
        assert skipped == plans
        assert skipped_sent == sent
        assert len(plans) == stage_cases.STEPS // 10


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_systems_execute_the_same_calls_and_prune_their_own(pool4: Pool) -> None:
    found = pool4.run(stage_cases.played, JUDGED, (10, 20), limit_s=LIMIT_S)
    calls: list[Call] = found[0]
    assert [c.key for c in calls] == [c.key for c in found[3]], "all ranks have all figures"
    by_system = {
        name: [c for c in calls if c.system == name] for name in dict.fromkeys(c.system for c in calls)
    }
    assert list(by_system) == [*JUDGED, *dict.fromkeys(map(reference_of, JUDGED))]
    assert all(len(by_system[name]) == 4 for name in JUDGED)
    pairs = {c.pairs for c in calls}
    assert len(pairs) == 1
    assert pairs.pop() >= 4 * 20 * 8
    shares = {"lrmoe-sampled50": 0.5, "lrmoe-topk20": 0.8}
    for name, own in by_system.items():
        share = shares.get(name.removeprefix("balanced:"), 1.0)
        assert all(abs(c.kept / c.pairs - share) < 0.01 for c in own), name
    fixed, symi = by_system["megatron"], by_system["symi"]
    assert all(f.forward_peak > s.forward_peak for f, s in zip(fixed, symi, strict=True))
    assert all(c.phase_bytes["replicas"] > 0 for c in symi)
    for name, own in by_system.items():
        if name.startswith("balanced:"):
            assert [(c.step, c.layer) for c in own] == [(10, 0)]
            assert own[0].forward_peak == pytest.approx(1.0, abs=0.02)
            assert own[0].replicas == own[0].phase_bytes.get("replicas", 0) == 0


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_stopped_stage_goes_on_where_it_was(pool4: Pool, tmp_path: Path) -> None:
    out = tmp_path / "stage.jsonl"
    pool4.run(stage_cases.played, ("megatron", "symi"), (10, 20), str(out), limit_s=LIMIT_S)
    lines = out.read_text().splitlines(keepends=True)
    assert len(lines) == 2 * 2 * 2 + 1, "two steps of two layers and two systems, and the balanced call"
    whole = Block(model="tiny", aux=0.0, seed=3, folders={}, last_step={"megatron": 40, "symi": 25})
    stage = Stage(blocks=[whole], out=out, balanced_every=2)
    assert [(s.number, s.systems, s.balanced) for s in pending(stage, 2, stage_lines.read(out))] == [
        (30, ("megatron",), True),
        (40, ("megatron",), False),
    ]
    out.write_text("".join(lines[:-1]) + lines[-1][:40])  # torn in the last line
    torn = pending(stage, 2, stage_lines.read(out))
    assert [s.number for s in torn] == [20, 30, 40]
    pool4.run(stage_cases.played, ("megatron", "symi"), (20,), str(out), limit_s=LIMIT_S)
    assert [s.number for s in pending(stage, 2, stage_lines.read(out))] == [30, 40]
    keys = [c.key for c in stage_lines.read(out)]
    assert len(keys) == len(set(keys))


def test_nothing_is_pending_where_every_system_has_arrived(tmp_path: Path) -> None:
    stage = Stage(blocks=[block(megatron=19, lrmoe=20)], out=tmp_path / "x")
    done = [call(system=name, step=10, layer=n) for name in ("megatron", "lrmoe") for n in (0, 1)]
    assert [s.systems for s in pending(stage, 2, done)] == [("lrmoe",)]
    done += [call(system="lrmoe", step=20, layer=n) for n in (0, 1)]
    assert pending(stage, 2, done) == []


def test_a_system_may_take_part_seldom_and_with_other_activations_beside(tmp_path: Path) -> None:
    main = replace(block(megatron=60, eplb=60), stride={"eplb": 3})
    stashed = replace(block(megatron=60), activations=STASH, stride={"megatron": 2})
    stage = Stage(blocks=[main, stashed], out=tmp_path / "x")
    steps = pending(stage, 1, [])
    assert [(s.number, s.systems) for s in steps if s.block is main] == [
        (number, ("megatron", "eplb") if number in (10, 40) else ("megatron",))
        for number in range(10, 61, 10)
    ]
    assert [s.number for s in steps if s.block is stashed] == [10, 30, 50]
    left = pending(stage, 1, [call(step=10), call(step=10, activations=STASH), call(step=30)])
    assert [(s.number, s.block.activations) for s in left] == [
        *((number, MAIN) for number in (10, 20, 40, 50, 60)),
        *((number, STASH) for number in (30, 50)),
    ]


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_activations_are_those_of_the_block(pool4: Pool) -> None:
    held: dict[str, list[tuple[str, int]]] = {}
    for activations in (MAIN, STASH):
        calls: list[Call] = pool4.run(
            stage_cases.played, ("megatron", "lrmoe-sampled50"), (10,), None, activations, limit_s=LIMIT_S
        )[0]
        assert {c.activations for c in calls} == {activations}
        held[activations] = [(c.system, c.buffer_bytes) for c in calls]
    for (system, ours), (_, theirs) in zip(held[MAIN], held[STASH], strict=True):
        # Of the pruned reference both hold 63 KB, and measured bytes differ by some 100 from run to run.
        assert system == "balanced:lrmoe-sampled50" or abs(ours - theirs) > 0.04 * ours
    settings = {name: system_config(get_system("symi"), 0, name).activations for name in (MAIN, STASH)}
    assert settings == {"recompute": "recompute", "stash": "stash"}


def test_the_critical_path_leaves_out_what_a_reference_is_free_of() -> None:
    assert call().critical_ms(1e6) == pytest.approx(9 + 4)
    assert call().critical_ms(1e6, UNCOUNTED) == pytest.approx(6 + 3)


def test_the_link_makes_exchange_a_third_of_a_balanced_call() -> None:
    calls = [call(system="balanced:megatron"), call(system="balanced:megatron", model="other", cpu_ms=80.0)]
    calls.append(call(system="balanced:megatron", activations=STASH, cpu_ms=20.0))
    assert link_of([*calls, call(cpu_ms=1e6)], "balanced:megatron") == {
        ("tiny", MAIN): 600_000,
        ("other", MAIN): 300_000,
        ("tiny", STASH): 1_200_000,
    }


def test_lines_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "stage.jsonl"
    assert stage_lines.read(path) == []
    stage_lines.append(path, [call(), call(step=20)])
    with path.open("a") as out:
        out.write(json.dumps({"step": 3}) + "\n{")
    stage_lines.append(path, [call(kept=51)])
    assert stage_lines.read(path) == [call(kept=51), call(step=20)]


def test_exact_systems_are_held_against_the_exact_balanced_call() -> None:
    assert reference_of("symi") == "balanced:megatron"
    assert reference_of("lrmoe-sampled50") == "balanced:lrmoe-sampled50"


def test_calls_of_trajectories_that_are_trained_anew_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "stage.jsonl"
    stage_lines.forget(path, {("tiny", 0.0, 0)})
    assert not path.exists()
    stage_lines.append(path, [call(), call(seed=1), call(aux=0.001)])
    stage_lines.forget(path, {("tiny", 0.0, 0), ("tiny", 0.001, 5)})
    assert stage_lines.read(path) == [call(seed=1), call(aux=0.001)]
    stage_lines.forget(path, {("tiny", 0.0, 1), ("tiny", 0.001, 0)})
    assert stage_lines.read(path) == []
