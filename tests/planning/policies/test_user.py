"""Policies from a user's file: functions, classes, dataclasses; and every way they can be wrong, named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrmoe.errors import InfeasibleError, PlanError
from lrmoe.planning import get_policy
from lrmoe.planning.policies import PolicyInfo, load_policy, policy_info
from lrmoe.planning.problem import History
from tests.planning.policies.helpers import ask

GOOD = """
from __future__ import annotations
from dataclasses import dataclass
from lrmoe.planning import LayerPlan, Problem, get_policy
from lrmoe.planning.policies import PolicyInfo

CONSTANT = 3

def plan(problem: Problem) -> LayerPlan:
    return get_policy("megatron")(problem)

@dataclass(frozen=True, kw_only=True)
class MyPolicy:
    option: int = 1
    INFO = PolicyInfo(
        title="Mine", source="me", inputs="current counts", acts="every call", moves="clones", slots="shared"
    )

    def __call__(self, problem: Problem) -> LayerPlan:
        return get_policy("ultraep")(problem)

class NeedsArguments:
    def __init__(self, path):
        self.path = path

    def __call__(self, problem):
        return plan(problem)

class NotCallable:
    pass

class Modest(MyPolicy):
    INFO = PolicyInfo(
        title="Modest", source="me", inputs="current counts", acts="every call", moves="nothing", slots="shared"
    )

    def __call__(self, problem: Problem) -> LayerPlan:
        return get_policy("llep")(problem)

def two(problem, more):
    return plan(problem)

def nothing():
    return None

async def later(problem):
    return plan(problem)

def returns_counts(problem):
    return problem.counts_RE

def loses_a_pair(problem):
    import dataclasses
    found = plan(problem)
    sent = found.assign_RJ.copy()
    sent[0, 0] -= 1
    return dataclasses.replace(found, assign_RJ=sent)

def other_topology(problem):
    import dataclasses
    from lrmoe.planning import Topology
    topology = Topology(ranks=problem.topology.ranks, experts=problem.topology.experts, ranks_per_node=1)
    return plan(dataclasses.replace(problem, topology=topology))

def fails(problem):
    return 1 / 0

def leaves(problem):
    raise SystemExit(0)

def says_infeasible(problem):
    from lrmoe.errors import InfeasibleError
    raise InfeasibleError("no room")

def writes_counts(problem):
    problem.counts_RE[0, 0] = 9
    return plan(problem)

def writes_history(problem):
    problem.history.counts[0][0, 0] = 9
    return plan(problem)

def writes_previous(problem):
    problem.history.previous.quota_E[0] = 9
    return plan(problem)

def lists(problem):
    import dataclasses
    return dataclasses.replace(plan(problem), quota_E=[10, 10])

def prunes(problem):
    return get_policy("lrmoe")(problem)

class Drops:
    INFO = PolicyInfo(
        title="Drops", source="me", inputs="both", acts="every call", moves="", slots="unbounded", drops=True
    )

    def __call__(self, problem):
        return prunes(problem)

def chatters(problem):
    print("hello")
    return plan(problem)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_file.py"
    path.write_text(GOOD)
    return path


def test_a_function_and_a_class_plan(file: Path) -> None:
    problem = ask([[90, 1, 1, 1], [90, 1, 1, 1]], slots=1)
    assert get_policy(f"{file}:plan")(problem).replicas_R.tolist() == [0, 0]
    assert get_policy(f"{file}:MyPolicy")(problem).replicas_R.tolist() == [0, 1]


def test_its_facts_are_its_own_or_unknown(file: Path) -> None:
    assert policy_info(f"{file}:MyPolicy").title == "Mine"
    assert policy_info(f"{file}:plan").title == "plan"
    assert "nothing about it is known" in policy_info(f"{file}:plan").note


def test_one_object_serves_until_the_file_changes(file: Path) -> None:
    first = load_policy(f"{file}:MyPolicy")
    assert load_policy(f"{file}:MyPolicy") is first
    file.write_text(GOOD.replace("ultraep", "llep"))
    os.utime(file, ns=(1, 1))
    problem = ask([[9000, 1, 1, 1], [9000, 1, 1, 1]], slots=1)
    assert load_policy(f"{file}:MyPolicy")(problem).replicas_R.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"my_file.py has no 'missing'; it defines plan, MyPolicy, NeedsArguments"),
        ("CONSTANT", "int cannot be called"),
        ("NotCallable", "NotCallable cannot be called"),
        ("NeedsArguments", r"NeedsArguments\(\) failed, and it must be built without arguments: TypeError"),
        ("two", r"one argument, the Problem; its signature is \(problem, more\)"),
        ("nothing", r"one argument, the Problem; its signature is \(\)"),
        ("later", "must be a plain function, not a coroutine"),
        ("not a name", "must look like 'my_file.py:MyPolicy'"),
    ],
)
def test_what_cannot_be_a_policy_is_refused_when_loaded(file: Path, name: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        get_policy(f"{file}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("returns_counts", "returned ndarray: must return a LayerPlan"),
        ("loses_a_pair", "returned an illegal plan: source rank 0 sends 4 pairs of expert 0 and has 5"),
        ("other_topology", "returned a plan for another topology"),
    ],
)
def test_an_illegal_answer_is_refused_before_anybody_acts_on_it(file: Path, name: str, message: str) -> None:
    policy = get_policy(f"{file}:{name}")
    with pytest.raises(PlanError, match=message) as caught:
        policy(ask(np.full((2, 2), 5)))
    assert f"my_file.py:{name}" in str(caught.value)


def test_it_is_held_to_the_slots_it_claims(file: Path) -> None:
    policy = get_policy(f"{file}:Modest")
    counts = np.array([[9000, 9000, 9000, 0, 0, 0]] * 2)
    assert policy(ask(counts, slots=3)).replicas_R.tolist() == [0, 2]
    with pytest.raises(PlanError, match=r"puts 5 experts on rank 1: slots='shared' of its INFO allows 4"):
        policy(ask(counts, slots=1))


def test_facts_that_tables_cannot_read_are_refused() -> None:
    facts: dict[str, Any] = {"title": "x", "source": "x", "acts": "x", "moves": "x"}
    with pytest.raises(
        PlanError, match="slots='two': must be one of 'none', 'shared', 'resident', 'unbounded'"
    ):
        PolicyInfo(**facts, inputs="history", slots="two")
    with pytest.raises(PlanError, match="inputs='all': must be one of"):
        PolicyInfo(**facts, inputs="all", slots="none")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "failed with ZeroDivisionError: division by zero"),
        ("leaves", "failed with SystemExit: 0"),
        ("says_infeasible", "failed with InfeasibleError: no room"),
        ("lists", "illegal plan: quota_E has dtype list"),
        ("writes_counts", "failed with ValueError: assignment destination is read-only"),
        ("writes_history", "failed with ValueError: assignment destination is read-only"),
        ("writes_previous", "failed with ValueError: assignment destination is read-only"),
    ],
)
def test_what_fails_inside_names_the_policy_and_the_call(file: Path, name: str, message: str) -> None:
    past = ask(np.full((2, 2), 5))
    history = History(counts=(past.counts_RE,), previous=get_policy("megatron")(past), step=7)
    problem = ask(np.full((2, 2), 5), history=history)
    with pytest.raises(PlanError, match=message) as caught:
        get_policy(f"{file}:{name}")(problem)
    assert str(caught.value).startswith(f"policy='{file}:{name}', call 7 (2 ranks, 2 experts): ")
    assert problem.counts_RE.tolist() == past.counts_RE.tolist() == [[5, 5], [5, 5]]
    assert problem.counts_RE.flags.writeable


def test_under_a_budget_a_policy_may_say_that_nothing_fits(file: Path) -> None:
    with pytest.raises(InfeasibleError, match="no room"):
        get_policy(f"{file}:says_infeasible")(ask([[1]], budget_rows=1))


def test_only_a_policy_that_says_so_leaves_pairs_out(file: Path) -> None:
    problem = ask(np.full((2, 2), 50), max_drop=0.2)
    assert get_policy(f"{file}:Drops")(problem).kept == 160
    with pytest.raises(PlanError, match="leaves 40 of 200 pairs out; a policy that does needs drops=True"):
        get_policy(f"{file}:prunes")(problem)


def test_what_it_prints_goes_to_stderr(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("print('loading')\n" + GOOD.replace("from __future__ import annotations\n", ""))
    get_policy(f"{file}:chatters")(ask([[1]]))
    out, err = capsys.readouterr()
    assert (out, err) == ("", "loading\nhello\n")


def test_files_that_do_not_load_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no file .*absent.py"):
        get_policy(f"{tmp_path}/absent.py:Name")
    with pytest.raises(PlanError, match="must look like"):
        get_policy("somewhere:Name")
    broken = tmp_path / "broken.py"
    broken.write_text("def plan(problem:\n")
    with pytest.raises(PlanError, match=r"loading .*broken.py failed: SyntaxError"):
        get_policy(f"{broken}:plan")
    leaving = tmp_path / "leaving.py"
    leaving.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(PlanError, match=r"loading .*leaving.py failed: SystemExit: 0"):
        get_policy(f"{leaving}:plan")
    raising = tmp_path / "raising.py"
    raising.write_text("import does_not_exist_anywhere\n")
    with pytest.raises(PlanError, match=r"loading .*raising.py failed: ModuleNotFoundError"):
        get_policy(f"{raising}:plan")
