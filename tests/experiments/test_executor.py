"""Recording a trainer's layer calls, and executing them again in other layers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lrmoe.errors import InfeasibleError, LRMoEError
from lrmoe.experiments.compare.executor import Executor, differs_by
from lrmoe.layer import MoELayer
from tests.distributed.pool import Pool
from tests.experiments import rig_cases
from tests.training.tiny import tiny_config

EPS = torch.finfo(torch.float32).eps
LIMIT_S = 120  # the first case of a pool imports transformers


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Where the corpus lies before several ranks look for it."""
    tiny_config(tmp_path)
    return str(tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_executed_system_gives_what_the_trainer_gives(pool2: Pool, folder: str, accumulate: int) -> None:
    found = pool2.run(rig_cases.run, folder, 3, {"accumulate": accumulate}, limit_s=LIMIT_S)
    alone = pool2.run(rig_cases.losses_alone, folder, 3, {"accumulate": accumulate}, limit_s=LIMIT_S)
    for rank in range(2):
        assert found[rank]["losses"] == alone[rank], "watching changes no bit of the training"
        assert found[rank]["shapes"] == [(0, 1)] * (3 * accumulate)
        for step, records in enumerate(found[rank]["records"]):
            assert [r[:3] for r in records] == [
                (step, b, layer) for b in range(accumulate) for layer in (0, 1)
            ]
            assert all(kept == pairs > 0 for _, _, _, kept, pairs in records)
        assert found[rank]["bytes"] > 0
    assert found[0]["worst"] == found[1]["worst"]


@pytest.mark.distributed
@pytest.mark.parametrize("tensor", ["output", "x", "alpha", "gate_up", "down"])
def test_a_wrong_result_on_one_rank_is_an_error_on_all(pool2: Pool, folder: str, tensor: str) -> None:
    outcomes = pool2.outcomes(rig_cases.run, folder, 2, {}, tensor, limit_s=LIMIT_S)
    name = tensor if tensor == "output" else f"gradient of {tensor}"
    for outcome in outcomes:
        assert isinstance(outcome.error, LRMoEError)
        assert f"system 'again', step 2, layer 1, rank 0: the {name} differs" in str(outcome.error)


@pytest.mark.distributed
def test_checkpointed_layers_are_recorded_once(pool2: Pool, folder: str) -> None:
    for kind in ("reentrant", "non_reentrant"):
        found = pool2.run(rig_cases.run, folder, 2, {"activation_checkpointing": kind}, limit_s=LIMIT_S)
        assert found[0]["shapes"] == [(0, 1)] * 2


@pytest.mark.distributed
def test_recorded_weights_and_gradients_are_the_trainers_own(pool2: Pool, folder: str) -> None:
    assert pool2.run(rig_cases.weight_gradient, folder, limit_s=LIMIT_S) == [(True, True)] * 2


@pytest.mark.distributed
def test_what_lean_wires_saved_is_known_of_every_rank(pool2: Pool) -> None:
    assert pool2.run(rig_cases.gathered, limit_s=LIMIT_S) == [[10, 11]] * 2


def test_differences_are_in_eps_of_the_largest_entry() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert differs_by(expected.clone(), expected) == 0
    assert differs_by(expected + torch.tensor([8 * EPS, 0]), expected) == pytest.approx(2)
    assert differs_by(torch.zeros(2), torch.zeros(2)) == 0
    assert differs_by(torch.ones(2), torch.zeros(2)) == float("inf")
    assert differs_by(torch.tensor([1.0, float("nan")]), expected) == float("inf")
    assert differs_by(expected, torch.tensor([1.0, float("inf")])) == float("inf")
    assert differs_by(torch.zeros(3), expected) == float("inf")
    lost = torch.tensor([1.0, float("nan")])
    assert differs_by(lost, lost.clone()) == 0, (
        "a training that has lost its numbers is not the system's fault"
    )


def test_a_system_that_does_not_fit_its_budget_ends_alone() -> None:
    def refuse(*_: object) -> MoELayer:
        raise InfeasibleError("rank 3 needs 5 bytes")

    executor = Executor("big", refuse, None)
    executor.execute([SimpleNamespace(layer=SimpleNamespace(layer=0))])  # type: ignore[list-item]  # a stand-in
    assert executor.infeasible == "rank 3 needs 5 bytes"
