from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrmoe.errors import ConfigError
from lrmoe.experiments.trajectories.trajectory import DONE, Trajectory, TrajectoryJob, run_trajectory
from lrmoe.experiments.trajectories.virtual import ExecutionSize
from lrmoe.training.loop import Trainer
from tests.training.tiny import tiny_config

RANKS, EXPERTS, SEQ, BATCH, STEPS = 4, 4, 16, 8, 24


def job(root: Path, **changes: Any) -> TrajectoryJob:
    config = tiny_config(
        root,
        train={"batch_size": BATCH, "steps": STEPS, "trace": False},
        lrmoe={"warmup_steps": 0, "replica_slots": 1},
    )
    given = {"config": config, "folder": root / "out", "size": ExecutionSize(ranks=RANKS), **changes}
    return TrajectoryJob(**given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one trajectory was trained."""
    root = tmp_path_factory.mktemp("trajectory")
    seen: list[int] = []
    run_trajectory(job(root), seen.append)
    assert seen == list(range(1, STEPS + 1))
    return root


def test_losses_are_the_trainers_and_smoothed_over_ten_steps(folder: Path) -> None:
    found = Trajectory.load(folder / "out")
    trainer = Trainer(job(folder).config, policy=job(folder).policy(BATCH * SEQ * 2 // RANKS))
    losses = [trainer.step().loss for _ in range(STEPS)]
    assert found.losses.tolist() == losses
    assert np.isnan(found.smoothed[:9]).all()
    assert found.smoothed[9:] == pytest.approx(np.convolve(losses, np.ones(10) / 10, "valid"))
    assert found.final_loss == pytest.approx(np.mean(losses[-20:]))
    assert found.kept_share == pytest.approx(0.7, abs=0.01)
    assert (found.added_variance > 0).all()
    assert (found.dropped_energy > 0).all()


def test_counts_are_those_of_every_step_by_source(folder: Path) -> None:
    found = Trajectory.load(folder / "out")
    assert found.layers == [0, 1]
    counts = found.counts(1)
    assert counts.shape == (STEPS, RANKS, EXPERTS)
    assert counts.dtype == np.int64
    assert (counts.sum(axis=2) == BATCH * SEQ * 2 // RANKS).all()
    (call,) = [call for call in found.calls(20) if call.layer == 1]
    by_source = call.ids_TK.view(RANKS, -1)
    expected = [torch.bincount(row, minlength=EXPERTS).tolist() for row in by_source]
    assert counts[19].tolist() == expected


def test_every_tenth_steps_calls_are_recorded(folder: Path) -> None:
    found = Trajectory.load(folder / "out")
    assert found.recorded == [10, 20]
    for call in found.calls(10):
        assert (call.ids_TK.shape, call.ids_TK.dtype) == ((BATCH * SEQ, 2), torch.int64)
        assert (call.alpha_TK.shape, call.alpha_TK.dtype) == ((BATCH * SEQ, 2), torch.float32)
        assert call.alpha_TK.sum(dim=1) == pytest.approx(1.0, abs=1e-5)
        assert (call.grad_norm_T.shape, call.grad_norm_T.dtype) == ((BATCH * SEQ,), torch.float32)
        assert (call.grad_norm_T > 0).all()
    with pytest.raises(ConfigError, match=r"step 11 was not recorded; recorded are \[10, 20\]"):
        found.calls(11)


def test_recording_changes_nothing(folder: Path, tmp_path: Path) -> None:
    run_trajectory(job(folder, folder=tmp_path / "bare", record_every=0))
    bare = Trajectory.load(tmp_path / "bare")
    assert bare.recorded == []
    assert bare.losses.tolist() == Trajectory.load(folder / "out").losses.tolist()


def test_gradient_norms_are_those_at_the_layers_output(folder: Path) -> None:
    """An exact run's recorded norms, against hooks on the experts modules of the same run."""
    exact = tiny_config(
        folder, train={"batch_size": BATCH, "steps": 1, "trace": False}, lrmoe={"max_drop": 0.0}
    )
    run_trajectory(job(folder, config=exact, folder=folder / "exact", record_every=1))
    trainer = Trainer(exact)
    norms: list[torch.Tensor] = []

    def note(module: Any, given: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: norms.append(grad.norm(dim=-1)))

    for name, module in trainer.model.named_modules():
        if name.endswith("experts"):
            module.register_forward_hook(note)
    trainer.step()
    for call, norm in zip(Trajectory.load(folder / "exact").calls(1), reversed(norms), strict=True):
        torch.testing.assert_close(call.grad_norm_T, norm)


def test_steps_to_is_the_first_step_at_or_below(folder: Path) -> None:
    found = Trajectory.load(folder / "out")
    target = float(found.smoothed[14])
    first = int(np.flatnonzero(found.smoothed <= target)[0]) + 1
    assert found.steps_to(target) == first <= 15
    assert found.steps_to(0.0) is None
    assert found.steps_to(math.inf) == 10


def test_a_finished_folder_is_left_alone_and_an_unfinished_one_begun_anew(tmp_path: Path) -> None:
    one = job(tmp_path, config=tiny_config(tmp_path, train={"batch_size": BATCH, "steps": 2}))
    seen: list[int] = []
    run_trajectory(one, seen.append)
    run_trajectory(one, seen.append)
    assert seen == [1, 2]
    (one.folder / DONE).unlink()
    (one.folder / "calls-00099.npz").touch()
    with pytest.raises(ConfigError, match="no finished trajectory"):
        Trajectory.load(one.folder)
    run_trajectory(one, seen.append)
    assert seen == [1, 2, 1, 2]
    assert not (one.folder / "calls-00099.npz").exists()


def test_another_job_does_not_take_a_folders_result_for_its_own(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"batch_size": BATCH, "steps": 2})
    run_trajectory(job(tmp_path, config=config))
    assert job(tmp_path, config=config).finished
    assert not job(tmp_path, config=config, quota_rule="count").finished
    assert not job(tmp_path, config=config.replace(lrmoe={"max_drop": 0.5})).finished
    assert json.loads((tmp_path / "out" / DONE).read_text())["lrmoe"]["max_drop"] == 0.3


@pytest.mark.parametrize(
    ("train", "rule", "said"),
    [
        ({"batch_size": 6}, "variance", "batch_size=6.*4 ranks"),
        ({"batch_size": 8, "accumulate": 2}, "variance", "accumulate=2"),
        ({"batch_size": 8}, "size", "quota_rule='size'.*variance, count"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, train: dict[str, Any], rule: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job(tmp_path, config=tiny_config(tmp_path, train=train), quota_rule=rule)
