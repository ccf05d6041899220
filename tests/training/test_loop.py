from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.errors import ConfigError
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from tests.distributed.pool import Pool
from tests.training.tiny import GLM_SHAPE, float64_model, local_state, tiny_config, whole_state

EXACT = {"max_drop": 0.0, "warmup_steps": 0}
CLIP = {"warmup_steps": 0, "clip_norm": 0.2}


def trained(config: TrainConfig, steps: int, group: Any = None, *, double: bool = False) -> Trainer:
    trainer = Trainer(config, group, model=float64_model(config, group) if double else None)
    for _ in range(steps):
        trainer.step()
    return trainer


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-13, msg=name)


def test_a_step_reports_what_happened(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path, lrmoe={"warmup_steps": 1, "max_drop": 0.5}))
    first, second = trainer.step(), trainer.step()
    assert (first.step, second.step, trainer.steps_done) == (1, 2, 2)
    assert first.tokens == 2 * 16
    assert first.loss == pytest.approx(5.55, abs=0.2)  # ln 258
    assert [r.layer for r in first.records] == [0, 1]
    assert first.kept_share == 1.0
    assert second.kept_share == pytest.approx(0.5, abs=0.02)
    assert second.moe_ms_wall > 0
    assert second.lr == pytest.approx(3e-3)


def watched_steps(config: TrainConfig) -> tuple[list[float], list[list[bool]]]:
    """Worker: the figure of every step, and by rank whether the last step's calls are marked."""
    trainer = Trainer(config, dist.group.WORLD if dist.is_initialized() else None)
    steps = [trainer.step() for _ in range(12)]
    figures = [step.as_dict()["lrmoe/dropped_energy_high"] for step in steps]
    return figures, [[r.dropped_energy_high for r in records] for records in steps[-1].records_by_rank]


TOPK = {"warmup_steps": 1, "max_drop": 0.5, "estimator": "topk"}


def test_too_much_dropped_energy_is_said_and_marked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    figures, marks = watched_steps(tiny_config(tmp_path, lrmoe=TOPK))
    assert figures == [0.0] * 10 + [1.0] * 2  # one exact step, nine calls before a layer is judged
    assert marks == [[True, True]]
    said = [message for message in caplog.messages if "estimator='topk'" in message]
    assert ["layer 0" in said[0], "layer 1" in said[1], len(said)] == [True, True, 2]


@pytest.mark.distributed
def test_ranks_judge_the_dropped_energy_of_all(pool2: Pool, tmp_path: Path) -> None:
    found = pool2.run(watched_steps, tiny_config(tmp_path, lrmoe=TOPK), limit_s=90)
    assert found[0] == found[1] == ([0.0] * 10 + [1.0] * 2, [[True, True]] * 2)


def test_training_learns(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path, train={"steps": 60, "batch_size": 8}, optim={"lr": 1e-2}))
    before = trainer.evaluate()
    for _ in range(60):
        trainer.step()
    assert trainer.evaluate() < before - 2


def test_accumulation_equals_one_big_batch(tmp_path: Path) -> None:
    runs = [
        trained(
            tiny_config(
                tmp_path, lrmoe=EXACT, optim=CLIP, train={"batch_size": size, "accumulate": accumulate}
            ),
            3,
            double=True,
        )
        for size, accumulate in ((4, 1), (1, 4))
    ]
    states = [whole_state([local_state(run)]) for run in runs]
    assert_close(states[1], states[0])


def train_ranks(config: TrainConfig, steps: int) -> dict[str, Any]:
    return local_state(trained(config, steps, dist.group.WORLD, double=True))


@pytest.mark.distributed
def test_two_ranks_equal_one(pool2: Pool, tmp_path: Path) -> None:
    """Expert parallelism over two ranks ends at the weights that one process reaches on both ranks' data."""
    one = tiny_config(tmp_path, lrmoe=EXACT, optim=CLIP, train={"batch_size": 4, "accumulate": 2})
    two = one.replace(train={"batch_size": 2})
    wanted = whole_state([local_state(trained(one, 3, double=True))])
    assert_close(whole_state(pool2.run(train_ranks, two, 3)), wanted)


def three_steps(config: TrainConfig) -> list[tuple[float, float, float, int]]:
    trainer = Trainer(config, dist.group.WORLD)
    found = [trainer.step() for _ in range(3)]
    last = found[-1]
    assert len(last.records_by_rank) == 2
    assert last.records_by_rank[dist.get_rank()] == last.records
    assert sum(last.records[0].backward_load_R) == last.records[0].kept
    rows = [records[0].rows_backward_local for records in last.records_by_rank]
    assert rows == last.records[0].backward_load_R
    return [(m.loss, m.grad_norm, m.kept_share, m.wire_bytes) for m in found]


@pytest.mark.distributed
def test_ranks_report_the_same_step(pool2: Pool, tmp_path: Path) -> None:
    ranks = pool2.run(three_steps, tiny_config(tmp_path, lrmoe={"warmup_steps": 1, "max_drop": 0.5}))
    assert ranks[0] == ranks[1]
    bytes_full, bytes_pruned = ranks[0][0][3], ranks[0][1][3]
    assert 0 < bytes_pruned < bytes_full


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
def test_activation_checkpointing_changes_nothing(tmp_path: Path, kind: str) -> None:
    plain = trained(tiny_config(tmp_path), 3)
    again = trained(tiny_config(tmp_path, train={"activation_checkpointing": kind}), 3)
    for a, b in zip(plain.parameters.entries, again.parameters.entries, strict=True):
        torch.testing.assert_close(a.master, b.master, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overrides", [None, GLM_SHAPE])
def test_router_aux_loss_reaches_the_router(tmp_path: Path, overrides: dict[str, Any] | None) -> None:
    model = {} if overrides is None else {"preset": "glm4-moe-tiny", "overrides": overrides}
    runs = [
        trained(tiny_config(tmp_path, model=model, lrmoe=EXACT, train={"router_aux_loss": c}), 2)
        for c in (0.0, 1.0)
    ]
    without, added = (
        next(e.master for e in r.parameters.entries if e.name.endswith("mlp.gate.weight")) for r in runs
    )
    assert not torch.allclose(without, added)


def test_the_loss_of_a_step_is_that_of_the_text_alone(tmp_path: Path) -> None:
    """Before any update the balancing loss has changed nothing, and a target loss means the same with it."""
    first = [
        Trainer(tiny_config(tmp_path, lrmoe=EXACT, train={"router_aux_loss": c, "accumulate": 2})).step().loss
        for c in (0.0, 1.0)
    ]
    assert first[0] == pytest.approx(first[1], rel=1e-6)


def test_bfloat16_keeps_float32_masters(tmp_path: Path) -> None:
    trainer = trained(tiny_config(tmp_path, train={"dtype": "bfloat16", "accumulate": 2}), 3)
    for entry in trainer.parameters.entries:
        assert entry.parameter.dtype == torch.bfloat16
        assert entry.master.dtype == torch.float32
        assert torch.equal(entry.parameter, entry.master.bfloat16())
    full = trained(tiny_config(tmp_path, train={"accumulate": 2}), 3)
    name = "model.layers.0.self_attn.q_proj.weight"
    masters = [next(e.master for e in t.parameters.entries if e.name == name) for t in (trainer, full)]
    torch.testing.assert_close(masters[0], masters[1], rtol=0, atol=6e-3)  # three steps of at most 3e-3


def poison(trainer: Trainer) -> None:
    """Make this rank's next gradient of an expert not finite."""
    entry = trainer.parameters.experts[0]
    entry.parameter.register_hook(lambda grad: grad * float("inf"))


def skip_on_one(config: TrainConfig) -> tuple[bool, int, bool]:
    trainer = Trainer(config, dist.group.WORLD)
    before = local_state(trainer)
    if dist.get_rank() == 1:
        poison(trainer)
    skipped = trainer.step().skipped
    same = all(torch.equal(before[e.name][0], e.master) for e in trainer.parameters.entries)
    return skipped, trainer.steps_skipped, same


@pytest.mark.distributed
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(skip_on_one, tiny_config(tmp_path)) == [(True, 1, True)] * 2


def test_trainers_do_not_disturb_each_other(tmp_path: Path) -> None:
    alone = [m.loss for m in (lambda t: [t.step() for _ in range(3)])(Trainer(tiny_config(tmp_path)))]
    first = Trainer(tiny_config(tmp_path))
    other = Trainer(tiny_config(tmp_path, train={"seed": 5}), corpus=first.corpus)
    losses = []
    for _ in range(3):
        losses.append(first.step().loss)
        other.step()
    assert losses == alone


def test_a_vocabulary_that_is_too_small(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    small = config.replace(model={"overrides": {**config.model.overrides, "vocab_size": 100}})
    with pytest.raises(ConfigError, match="vocab_size is 100"):
        Trainer(small)


def build_with_missing_corpus(config: TrainConfig) -> str:
    if dist.get_rank() == 1:
        config = config.replace(data={"path": "no-such-text"})
    try:
        Trainer(config, dist.group.WORLD)
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.distributed
def test_a_corpus_that_one_rank_cannot_read_fails_all(pool2: Pool, tmp_path: Path) -> None:
    said = pool2.run(build_with_missing_corpus, tiny_config(tmp_path))
    assert said == ["data.path='no-such-text': no such file or directory"] * 2
