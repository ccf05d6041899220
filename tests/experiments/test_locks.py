from __future__ import annotations

from pathlib import Path

import pytest

from lrmoe.errors import ConfigError
from lrmoe.experiments.locks import alone


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
