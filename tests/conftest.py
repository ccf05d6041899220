"""Fixtures shared by all tests: one pool of gloo processes per world size, started when first used."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Kernels run in triton's interpreter, on CPU tensors; triton looks once, when it is imported, which torch.compile does.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.distributed.pool import Pool

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several workers begin with what takes longest: modules that use a pool, then those that start processes."""
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: (not _uses_a_pool(item.path), item.get_closest_marker("distributed") is None)
        )


def pytest_collection_finish() -> None:
    """What imports and collection made is no garbage: half a million objects that no collection need go through."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Give a module to one worker, for its fixtures, and all that use a pool to one, for the pool's processes."""
    return _ByModule(config, log)


class _ByModule(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        return "pools" if _uses_a_pool(self.config.rootpath / path) else path


@functools.cache
def _uses_a_pool(path: Path) -> bool:
    return "from tests.distributed.pool import" in path.read_text(encoding="utf-8")


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


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two gloo processes of one module alone, whose tests may end them."""
    pool = Pool(2)
    yield pool
    pool.close()
