from __future__ import annotations

import pytest
import torch.distributed as dist

from lrmoe.checkpoint import agreed, gathered
from lrmoe.errors import ConfigError
from tests.distributed.pool import Pool


def fail_on(rank: int, error: Exception) -> int:
    if dist.is_initialized() and dist.get_rank() == rank:
        raise error
    return dist.get_rank() if dist.is_initialized() else 0


def told(rank: int, error: Exception) -> str:
    try:
        return str(gathered(dist.group.WORLD, lambda: fail_on(rank, error)))
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"


def test_alone_the_error_is_the_actions_own() -> None:
    assert agreed(None, lambda: 3) == 3
    assert gathered(None, lambda: 3) == [3]
    with pytest.raises(ZeroDivisionError):
        agreed(None, lambda: 1 // 0)


@pytest.mark.distributed
def test_every_rank_hears_of_a_failure(pool2: Pool) -> None:
    assert pool2.run(told, 5, ConfigError("x")) == ["[0, 1]"] * 2
    assert pool2.run(told, 1, ConfigError("x=1: bad")) == ["ConfigError: x=1: bad"] * 2
    assert pool2.run(told, 0, OSError("gone")) == ["RankError: rank 0: OSError: gone"] * 2
