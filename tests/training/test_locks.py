from __future__ import annotations

import errno
import fcntl
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from lrmoe.errors import ConfigError
from lrmoe.training.locks import alone


def test_a_second_run_in_a_folder_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    with (
        alone(folder, setting="name", command="ablate"),
        pytest.raises(ConfigError, match="name='mine': another `lrmoe ablate` is at work"),
        alone(folder, setting="name", command="ablate"),
    ):
        pytest.fail("two at a time")
    with alone(folder, setting="name", command="ablate"):
        assert folder.is_dir()


def test_an_error_inside_is_not_taken_for_a_lock_that_is_held(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError, match="own"), alone(tmp_path, setting="name", command="ablate"):
        raise BlockingIOError("own")


def test_one_that_ends_in_time_is_waited_for(tmp_path: Path) -> None:
    first = ExitStack()
    first.enter_context(alone(tmp_path, setting="name", command="train"))
    end = threading.Timer(0.2, first.close)
    end.start()
    with alone(tmp_path, setting="name", command="train", patience_s=60.0):
        end.join()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(file: object, how: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with alone(tmp_path, setting="name", command="train"):
        assert (tmp_path / ".lock").is_file()
