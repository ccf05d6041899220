"""U20, the export: every expert once, under its global id, whatever the ranks and storage; and back at any number.

Expert e is filled with e: a file that holds one rank's experts, or counts them anew on each rank, shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.checkpoint import export_checkpoint
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from tests.checkpoint.runs import pretrained, same_tensors, tensors_in
from tests.distributed.pool import Pool
from tests.training.tiny import tiny_config

pytestmark = pytest.mark.distributed
EXPERTS, LAYERS = 4, 2
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LIMIT_S = 120.0  # the first case imports transformers in every process


def group_of() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def save_filled(config: TrainConfig) -> None:
    """Save a model whose expert e holds e everywhere, from this rank's part of it."""
    trainer = Trainer(config, group_of())
    with torch.no_grad():
        for entry in trainer.parameters.experts:
            assert entry.span is not None
            first = 0 if entry.cut is not None else entry.span[0]
            width = None if entry.cut is None else entry.cut.width(trainer.rank)
            for row, values in enumerate(entry.master):
                values[:width].fill_(float(first + row))
    trainer.save()


def loaded(config: TrainConfig) -> dict[int, set[float]]:
    """Global id -> the values of that expert in all its tensors, as a model starts with them on this rank."""
    trainer = Trainer(config, group_of())
    found: dict[int, set[float]] = {}
    for entry in trainer.parameters.experts:
        assert entry.span is not None
        first = 0 if entry.cut is not None else entry.span[0]
        width = None if entry.cut is None else entry.cut.width(trainer.rank)
        for row, values in enumerate(entry.master):
            found.setdefault(first + row, set()).update(values[:width].unique().tolist())
    return found


@pytest.mark.parametrize(("ranks", "storage"), [(1, "owned"), (2, "owned"), (4, "owned"), (2, "sharded")])
def test_every_expert_is_exported_once_and_loads_at_every_number_of_ranks(
    pool2: Pool, pool4: Pool, tmp_path: Path, ranks: int, storage: str
) -> None:
    pools = {2: pool2, 4: pool4}
    config = tiny_config(tmp_path, lrmoe={"storage": storage})
    if ranks == 1:
        save_filled(config)
    else:
        pools[ranks].run(save_filled, config, limit_s=LIMIT_S)
    export_checkpoint(config.folder, tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    names = {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight": float(expert)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for projection in PROJECTIONS
    }
    assert {name for name in found if ".experts." in name} == names.keys()
    assert all(bool((found[name] == value).all()) for name, value in names.items())
    for name, tensor in pretrained(tmp_path / "out").named_parameters():
        if ".experts." in name:
            wanted = torch.arange(EXPERTS, dtype=tensor.dtype).view(-1, 1, 1)
            assert torch.equal(tensor, wanted.expand_as(tensor)), name
    started = config.replace(model={"overrides": {}, "preset": None, "checkpoint": str(tmp_path / "out")})
    for pool in (None, pool2, pool4):
        parts = [loaded(started)] if pool is None else pool.run(loaded, started, limit_s=LIMIT_S)
        held = [expert for part in parts for expert in part]
        assert sorted(set(held)) == list(range(EXPERTS))
        assert storage == "sharded" or len(held) == EXPERTS, "every expert on one rank alone"
        assert all(values == {float(expert)} for part in parts for expert, values in part.items())


def test_the_files_do_not_tell_how_many_ranks_wrote_them(pool2: Pool, tmp_path: Path) -> None:
    for name in ("alone", "two"):
        (tmp_path / name).mkdir()
    alone, two = (tiny_config(tmp_path / name) for name in ("alone", "two"))
    save_filled(alone)
    pool2.run(save_filled, two, limit_s=LIMIT_S)
    for config in (alone, two):
        export_checkpoint(config.folder, Path(config.train.runs) / "out")
    outs = [tmp_path / name / "out" for name in ("alone", "two")]
    same_tensors(*(tensors_in(out) for out in outs))
    assert len({tuple(sorted(path.name for path in out.iterdir())) for out in outs}) == 1
