"""Checkpoints that threads write: what is copied when, when they appear, and what their errors leave."""

from __future__ import annotations

import contextlib
import errno
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.checkpoint import BackgroundSaver, all_true, find_steps, open_latest, save
from lrmoe.errors import CheckpointError
from tests.checkpoint.common import content, experts_of
from tests.distributed.pool import Pool

LIMIT_S = 20.0
SAVING: Any = importlib.import_module("lrmoe.checkpoint.save")  # the package has a function of that name
SAVE_FILE = SAVING.save_file


@contextlib.contextmanager
def writing(act: Callable[[Path], None]) -> Iterator[None]:
    """Do something before every file of tensors is written, in the thread that writes it."""

    def write(tensors: dict[str, torch.Tensor], path: Path) -> None:
        act(path)
        SAVE_FILE(tensors, path)

    SAVING.save_file = write
    try:
        yield
    finally:
        SAVING.save_file = SAVE_FILE


def full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def published(saver: BackgroundSaver) -> Path:
    """Poll as training does."""
    end = time.monotonic() + LIMIT_S
    while (folder := saver.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return folder


def test_it_appears_when_it_is_written_with_what_was_there_when_it_began(tmp_path: Path) -> None:
    saver, held, given = BackgroundSaver(None), threading.Event(), content(1)
    with writing(lambda path: (held.wait(LIMIT_S), None)[1]):
        folder = saver.start(tmp_path, 1, given)
        for tensor in given.dense.values():
            tensor.fill_(9)
        given.experts["model/up"].values.fill_(9)
        given.state["list"].append(3)
        assert saver.poll() is None
        assert find_steps(tmp_path) == []
        assert [path.name[:22] for path in tmp_path.iterdir()] == [".partial-step-00000001"]
        held.set()
        assert published(saver) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    found = open_latest(tmp_path)
    assert found.state == {"step": 1, "list": [1, 2]}
    with found.reader() as reader:
        assert torch.equal(reader.dense("model/a"), torch.full((3,), 1.0))
        assert torch.equal(reader.experts("model/up", 0, 4), experts_of(0, 1) + 1)
    assert saver.poll() is None, "nothing is on its way any more"


def test_a_second_one_waits_for_the_first_and_old_ones_go(tmp_path: Path) -> None:
    saver, order = BackgroundSaver(None), list[str]()

    def slow(path: Path) -> None:
        time.sleep(0.1)
        order.append(path.parent.name[9:22])

    with writing(slow):
        for step in (1, 2, 3):
            saver.start(tmp_path, step, content(step), keep_last=1)
            assert len(list(tmp_path.glob(".partial-*"))) == 1, "never two on their way"
        saver.wait()
    assert order == [f"step-0000000{step}" for step in (1, 1, 2, 2, 3, 3)]
    assert find_steps(tmp_path) == [3]


@pytest.mark.parametrize("moment", ["poll", "wait", "start"])
def test_a_threads_error_is_raised_at_a_boundary(tmp_path: Path, moment: str) -> None:
    save(tmp_path, 1, content(1))
    saver = BackgroundSaver(None)
    boundary: dict[str, Callable[[], object]] = {
        "poll": lambda: published(saver),
        "wait": saver.wait,
        "start": lambda: saver.start(tmp_path, 3, content(3)),
    }
    with writing(full):
        saver.start(tmp_path, 2, content(2))
        with pytest.raises(CheckpointError, match=r"step-00000002.*cannot be written: .*No space left"):
            boundary[moment]()
    assert not saver.pending
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert open_latest(tmp_path).state["step"] == 1
    saver.start(tmp_path, 3, content(3))
    saver.wait()
    assert find_steps(tmp_path) == [1, 3]


def test_any_other_error_of_a_thread_is_a_checkpoint_error_too(tmp_path: Path) -> None:
    saver = BackgroundSaver(None)

    def wrong(path: Path) -> None:
        int(path.name)

    with writing(wrong):
        saver.start(tmp_path, 2, content(2))
        with pytest.raises(CheckpointError, match="cannot be written: ValueError: invalid literal"):
            saver.wait()


def test_a_folder_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver = BackgroundSaver(None)
    with pytest.raises(CheckpointError, match="cannot be created"):
        saver.start(tmp_path / "file", 1, content())
    assert not saver.pending


def test_what_cannot_be_copied_leaves_nothing(tmp_path: Path) -> None:
    saver, bad = BackgroundSaver(None), content(1)
    bad.experts["model/up"] = None  # type: ignore[index]  # a mapping made here
    with pytest.raises(AttributeError):
        saver.start(tmp_path, 1, bad)
    assert not saver.pending
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_one_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, content(1))
    saver = BackgroundSaver(None)
    with writing(lambda path: time.sleep(0.2)):
        saver.start(tmp_path, 2, content(2))
        saver.drop()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    saver.drop()
    assert saver.wait() is None


def test_a_writer_that_was_left_behind_reaches_no_later_checkpoint(
    tmp_path: Path,
) -> None:
    """As after a kill: the same step is saved again while an old thread still writes."""
    save(tmp_path, 1, content(1))
    left, there, go = BackgroundSaver(None), threading.Event(), threading.Event()

    def hold(path: Path) -> None:
        there.set()
        go.wait(LIMIT_S)

    with writing(hold):
        left.start(tmp_path, 2, content(7))
        pending = left._pending
        assert pending is not None
        assert there.wait(LIMIT_S)
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == ["step-00000001"]
    again = BackgroundSaver(None)
    again.start(tmp_path, 2, content(2))
    go.set()
    with pytest.raises(CheckpointError, match="cannot be written"):
        pending.files.result(LIMIT_S)
    again.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert open_latest(tmp_path).state["step"] == 2


def slow_rank(root: str) -> dict[str, Any]:
    """The second rank's thread waits for a file."""
    rank, go = dist.get_rank(), Path(root) / "go"
    saver = BackgroundSaver(dist.group.WORLD)

    def hold(path: Path) -> None:
        while rank == 1 and not go.exists():
            time.sleep(0.01)

    with writing(hold):
        saver.start(Path(root) / "saved", 5, content(5, rank, 2))
        if rank == 0:
            assert saver._pending is not None
            saver._pending.files.result(LIMIT_S)
        early = saver.poll()
        dist.barrier()
        go.touch()
        late = published(saver)
    return {"early": early, "late": late.name, "pending": saver.pending}


def one_full_disk(root: str) -> list[str]:
    """The second rank cannot write, at three boundaries; what each rank is told, and whether it can go on."""
    rank, said = dist.get_rank(), []
    saver = BackgroundSaver(dist.group.WORLD)
    for step in (2, 3):
        with writing(full if rank == 1 and step == 2 else lambda path: None):
            saver.start(Path(root), step, content(step, rank, 2))
            try:
                said.append(published(saver).name)
            except CheckpointError as error:
                said.append(str(error))
    return said


@pytest.mark.distributed
def test_all_ranks_publish_at_the_same_boundary(pool2: Pool, tmp_path: Path) -> None:
    told = {"early": None, "late": "step-00000005", "pending": False}
    assert pool2.run(slow_rank, str(tmp_path)) == [told, told]
    with open_latest(tmp_path / "saved").reader() as reader:
        assert torch.equal(reader.experts("model/up", 0, 4), experts_of(0, 1) + 5)


@pytest.mark.distributed
def test_one_ranks_full_disk_is_everybodys_error(pool2: Pool, tmp_path: Path) -> None:
    save(tmp_path, 1, content(1))
    first, second = pool2.run(one_full_disk, str(tmp_path))
    assert first == second
    assert "No space left" in first[0]
    assert first[1] == "step-00000003"
    assert find_steps(tmp_path) == [1, 3]


def only_first() -> list[bool]:
    group = dist.group.WORLD
    return [all_true(group, dist.get_rank() == 0), all_true(group, True), all_true(None, False)]


@pytest.mark.distributed
def test_agreement_on_a_flag(pool2: Pool) -> None:
    assert pool2.run(only_first) == [[False, True, False]] * 2
