"""Folders of checkpoints that cannot be used are found out on every rank before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from lrmoe.checkpoint.places import try_root
from lrmoe.errors import CheckpointError
from tests.distributed.pool import Pool


def said_by(roots: tuple[str, str]) -> str:
    """Worker: what trying this rank's folder says."""
    try:
        try_root(Path(roots[dist.get_rank()]), dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_a_shared_folder_is_made_and_left_empty(pool2: Pool, tmp_path: Path) -> None:
    root = tmp_path / "new" / "checkpoints"
    assert pool2.run(said_by, (str(root), str(root))) == ["", ""]
    assert list(root.iterdir()) == []


@pytest.mark.distributed
def test_folders_that_ranks_do_not_share_are_an_error_on_all(pool2: Pool, tmp_path: Path) -> None:
    mine, yours = str(tmp_path / "mine"), str(tmp_path / "yours")
    said = pool2.run(said_by, (mine, yours))
    assert (
        said == [f"{yours}: not the same folder on all ranks; must lie on a file system that they share"] * 2
    )
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.distributed
def test_a_folder_that_cannot_be_made_is_an_error_on_all(pool2: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    root = str(tmp_path / "file" / "checkpoints")
    for said in pool2.run(said_by, (root, root)):
        assert said.startswith(f"{root}: checkpoints cannot be written there: ")
