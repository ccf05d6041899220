"""Systems over calls: what they may know, what is measured of their plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrmoe.errors import InfeasibleError, PlanError
from lrmoe.planning.plan import LayerPlan, Traffic
from lrmoe.planning.policies import PolicyInfo
from lrmoe.planning.problem import Problem, Topology
from lrmoe.simulate.cluster import HISTORY, Calls, mean_rows, plans, simulate
from lrmoe.simulate.generators import generate
from lrmoe.simulate.measure import measure, weight_traffic
from lrmoe.simulate.scenario import SYSTEMS, Allowance, Layer, System, fairness, make_system, make_systems

TOPOLOGY = Topology(ranks=4, experts=16)
LAYER, ALLOWANCE = Layer(), Allowance()


def calls(name: str = "lognormal", steps: int = 4, skip: int = 2, **options: Any) -> Calls:
    sizes = {"ranks": 4, "experts": 16, "top_k": 2, "tokens": 256}
    counts = generate(name, **sizes, seed=1, steps=steps + skip, **options)
    return Calls(name="test", counts=list(counts), skip=skip)


def system(policy: object, inputs: str = "history") -> System:
    info = PolicyInfo(title="", source="", inputs=inputs, acts="", moves="", slots="none")
    return System(name="spy", policy=policy, info=info)  # type: ignore[arg-type]


class Spy:
    """Keeps every problem it was asked and every plan it gave."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.plans: list[LayerPlan] = []

    def __call__(self, problem: Problem) -> LayerPlan:
        self.problems.append(problem)
        self.plans.append(LayerPlan.at_home(problem, problem.counts_E, "off"))
        return self.plans[-1]


def test_a_system_knows_the_past_and_only_the_past() -> None:
    spy, sequence = Spy(), calls(steps=HISTORY + 2, skip=2)
    found = simulate([system(spy)], [sequence], TOPOLOGY, LAYER, ALLOWANCE, pressure=3)[0]
    assert len(found.calls) == HISTORY + 2
    assert len(spy.problems) == HISTORY + 4, "calls that only make history are planned too"
    for step, problem in enumerate(spy.problems):
        assert np.array_equal(problem.counts_RE, 3 * sequence.counts[step])
        history = problem.history
        assert history is not None
        assert history.step == step
        past = sequence.counts[max(0, step - HISTORY) : step]
        assert len(history.counts) == len(past)
        assert all(np.array_equal(a, 3 * b) for a, b in zip(history.counts, past, strict=True))
        assert history.previous is (spy.plans[step - 1] if step else None)


def test_sequences_do_not_know_each_other() -> None:
    spy = Spy()
    simulate([system(spy)], [calls(steps=1, skip=1)] * 2, TOPOLOGY, LAYER, ALLOWANCE)
    assert [len(p.history.counts) for p in spy.problems if p.history is not None] == [0, 1, 0, 1]


def test_what_remembers_nothing_skips_what_is_not_measured() -> None:
    spy = Spy()
    simulate([system(spy, "current counts")], [calls(steps=2, skip=3)], TOPOLOGY, LAYER, ALLOWANCE)
    assert len(spy.problems) == 2


def test_history_does_not_help_against_a_rotating_hot_spot() -> None:
    """Placement from the last call balances a steady hot rank and misses one that moves on."""
    allowance = Allowance(slots=4)
    peaks = {}
    for name in ("hot_rank", "rotating"):
        symi, ultraep = simulate(
            make_systems(["symi", "ultraep"], 4), [calls(name, boost=6.0)], TOPOLOGY, LAYER, allowance
        )
        peaks[name] = [float(np.mean([c.forward_peak for c in o.calls])) for o in (symi, ultraep)]
    assert peaks["rotating"][0] > peaks["hot_rank"][0] + 0.3
    assert peaks["rotating"][1] == pytest.approx(peaks["hot_rank"][1], abs=0.05)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_measured(name: str) -> None:
    fixed, found = simulate(make_systems(["megatron", name], 2) if name != "megatron" else
                            [make_system(name, 2)] * 2, [calls()], TOPOLOGY, LAYER, ALLOWANCE)  # fmt: skip
    assert len(found.calls) == 4
    for call, base in zip(found.calls, fixed.calls, strict=True):
        assert 1 <= call.forward_peak <= base.forward_peak + 1e-9 or name in (
            "symi",
            "eplb",
            "flexmoe",
            "laer",
            "smartmoe",
        )
        assert call.peak == max(call.forward_peak, call.backward_peak)
        assert 0 <= call.local_share <= 1
        assert call.layer_ms == pytest.approx(call.forward_ms + call.backward_ms)
        assert call.extra_slots <= 2, "no system gets more than the common number of slots"
        assert call.kept_share == pytest.approx(0.8, abs=1e-3) if name == "lrmoe" else call.kept_share == 1.0
        assert call.forward_subtotal > 4 * LAYER.expert_bytes


def test_figures_of_a_plan_by_hand() -> None:
    """Two ranks, two experts; a replica of expert 0 on rank 1 takes half of its pairs."""
    topology = Topology(ranks=2, experts=2)
    problem = Problem(counts_RE=np.array([[6, 0], [2, 2]]), topology=topology, slots=1, max_drop=0.4)
    plan = LayerPlan(
        topology=topology,
        counts_RE=problem.counts_RE,
        instance_expert_J=np.array([0, 0, 1]),
        instance_rank_J=np.array([0, 1, 1]),
        assign_RJ=np.array([[5, 1, 0], [0, 2, 2]]),
        quota_E=np.array([6, 1]),
        backward_J=np.array([4, 2, 1]),
    )
    plan.check(problem)
    found = measure(plan, LAYER, 0.5)
    assert (found.forward_peak, found.backward_peak, found.peak) == (1.0, 0.8, 1.0)
    assert (found.backward_rows, found.kept_share, found.replicas, found.extra_slots) == (4, 0.7, 1, 1)
    assert found.forward_subtotal == 2 * LAYER.expert_bytes + 5 * LAYER.row_bytes
    assert found.backward_subtotal == 2 * LAYER.expert_bytes + 3 * LAYER.row_bytes
    assert found.local_share == 0.9
    assert found.weight_traffic == 2 * LAYER.shape.weight_bytes + 4 * LAYER.shape.params
    assert found.plan_ms == 0.5
    assert LAYER.row_bytes == 20 * 1024
    assert LAYER.expert_bytes == 6 * 3 * 2048 * 768


def test_optimizer_states_count_as_traffic() -> None:
    problem = Problem(counts_RE=np.ones((2, 2), dtype=np.int64), topology=Topology(ranks=2, experts=2))
    home = LayerPlan.at_home(problem, problem.counts_E, "off")
    none, one = np.zeros(2, dtype=np.int64), np.array([1, 0])
    traffic = Traffic(fetch_R=none, refetch_R=none, return_R=none, state_R=one, resident_R=none)
    fields = {name: getattr(home, name) for name in home.__dataclass_fields__}
    assert weight_traffic(LayerPlan(**{**fields, "traffic": traffic}), LAYER) == 16 * LAYER.shape.params
    assert weight_traffic(home, LAYER) == 0


def test_an_illegal_plan_is_refused() -> None:
    def lossy(problem: Problem) -> LayerPlan:
        return LayerPlan.at_home(problem, problem.counts_E // 2, "off")

    with pytest.raises(PlanError, match="left out"):
        simulate([system(lossy)], [calls()], TOPOLOGY, LAYER, Allowance(max_drop=0.0))


def test_calls_that_do_not_fit_are_kept_apart() -> None:
    count = 0

    def every_other(problem: Problem) -> LayerPlan:
        nonlocal count
        count += 1
        if count % 2:
            raise InfeasibleError("rank 0 needs more")
        return LayerPlan.at_home(problem, problem.counts_E, "off")

    found = simulate([system(every_other)], [calls(steps=4, skip=0)], TOPOLOGY, LAYER, ALLOWANCE)[0]
    assert (len(found.calls), found.infeasible) == (2, ("rank 0 needs more",) * 2)


def test_a_budget_becomes_rows() -> None:
    budget = 4 * LAYER.expert_bytes + 1000 * LAYER.row_bytes
    allowance = Allowance(budget_bytes=budget)
    problem, _, _ = next(plans(make_system("megatron", 2), calls(), TOPOLOGY, LAYER, allowance))
    assert problem.budget_rows == 1000
    assert problem.replica_rows == -(-LAYER.expert_bytes // LAYER.row_bytes)
    with pytest.raises(InfeasibleError, match="the 4 home experts of a rank take"):
        Allowance(budget_bytes=4 * LAYER.expert_bytes).budget_rows(LAYER, TOPOLOGY)


def test_systems_without_a_limit_get_the_common_slots() -> None:
    llep, fastermoe = make_systems(["llep", "fastermoe"], 3)
    assert llep.limited is not None
    assert fastermoe.limited is not None
    assert fairness(llep, LAYER, Allowance(slots=3), [])["slots per rank beyond E / R"].startswith(
        "3 (put on it"
    )
    assert make_system("ultraep", 3).limited is None


def test_fairness_tells_what_plans_did_not_what_a_name_promises() -> None:
    exact = {
        "calls": 2,
        "kept_share": 1.0,
        "overflow_share": 0.0,
        "forward_chunks": 1.0,
        "backward_chunks": 1.0,
    }
    pruned = {**exact, "kept_share": 0.75, "overflow_share": 0.125, "backward_chunks": 2.5}
    missed: dict[str, float] = {"calls": 0, "infeasible_calls": 2}

    def seen(name: str, *found: dict[str, float]) -> tuple[str, str, str]:
        entry = fairness(make_system(name, 2), LAYER, ALLOWANCE, found)
        return entry["estimator"], entry["drops in forward"], entry["chunks"]

    assert seen("lrmoe", exact) == ("exact backward", "no", "offered under a budget, none used")
    assert seen("symi", exact, missed) == ("exact backward", "by option, off here", "not offered")
    assert seen("symi", exact, pruned)[:2] == ("backward kept 75%", "12.5% of pairs")
    assert seen("lrmoe", pruned)[2] == "offered under a budget, 2.5 used"
    assert seen("lrmoe", missed)[0] == "no call planned"


def test_what_a_users_policy_says_of_itself_is_a_claim(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lrmoe.planning.policies import PolicyInfo, get_policy\n"
        "class Says:\n"
        "    INFO = PolicyInfo(title='', source='', inputs='history', acts='now', moves='', slots='none')\n"
        "    def __call__(self, problem):\n"
        "        return get_policy('megatron')(problem)\n"
        "def silent(problem):\n"
        "    return get_policy('megatron')(problem)\n"
    )
    says, silent, ours = make_systems([f"{tmp_path}/mine.py:Says", f"{tmp_path}/mine.py:silent", "symi"], 2)
    entries = [fairness(system, LAYER, ALLOWANCE, []) for system in (says, silent, ours)]
    assert [e["plans from"] for e in entries] == ["claims: history", "claims nothing", "history"]
    assert entries[0]["acts"] == "claims: now"


def test_one_rank_needs_no_slots() -> None:
    topology = Topology(ranks=1, experts=4)
    sequence = Calls(name="one", counts=[np.array([[3, 0, 5, 2]])])
    for outcome in simulate(make_systems(list(SYSTEMS), 2), [sequence], topology, LAYER, ALLOWANCE):
        assert outcome.calls[0].forward_peak == 1.0, outcome.system.name


def test_an_empty_call_has_no_load() -> None:
    sequence = Calls(name="empty", counts=[np.zeros((4, 16), dtype=np.int64)] * 2)
    for outcome in simulate(make_systems(list(SYSTEMS), 2), [sequence], TOPOLOGY, LAYER, ALLOWANCE):
        assert outcome.calls[0].peak == 1.0, outcome.system.name
        assert outcome.calls[0].row_traffic == 0


def test_mean_rows_are_of_measured_calls() -> None:
    sequence = Calls(name="", counts=[np.full((2, 2), 9), np.full((2, 2), 1)], skip=1)
    assert mean_rows([sequence], 2) == 2.0
