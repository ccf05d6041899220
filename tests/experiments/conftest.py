"""Experiments start processes for every cell and every few jobs: here they are forked."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from lrmoe.experiments import workers
from tests.distributed.pool import context
from tests.forked import forked_workers


@pytest.fixture(scope="package", autouse=True)
def quick_start() -> Iterator[None]:
    """For all tests of this folder."""
    with forked_workers(), mock.patch.object(workers, "get_context", return_value=context()):
        yield
