"""Experiments start a pair of workers for every cell: here they are forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked import forked_workers


@pytest.fixture(scope="package", autouse=True)
def quick_start() -> Iterator[None]:
    """For all tests of this folder."""
    with forked_workers():
        yield
