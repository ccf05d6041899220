"""Fixtures shared by all tests: one pool of gloo processes per world size, started when first used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    """Two gloo processes."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    """Four gloo processes."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool8() -> Iterator[Pool]:
    """Eight gloo processes."""
    pool = Pool(8)
    yield pool
    pool.close()
