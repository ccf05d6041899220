"""Run a reference case spread over the ranks of a pool, and put the ranks' results together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.telemetry import CallRecord
from tests.distributed.pool import Pool
from tests.layer.harness import keep_weights, run
from tests.reference import GRADS, Case, Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankRun:
    """What one rank hands back."""

    result: Result
    record: CallRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """One call over all ranks: the whole result, and every rank's record."""

    result: Result
    records: list[CallRecord]
    ranks: list[Result]

    @property
    def quota_E(self) -> list[int]:
        return [int(q) for q in self.records[0].quota_E]


def bounds_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Token range of each rank."""
    ends = [sum(sizes[: r + 1]) for r in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def even(case: Case, ranks: int) -> list[int]:
    """Token counts as equal as they can be."""
    tokens = case.hidden.shape[0]
    return [tokens // ranks + (r < tokens % ranks) for r in range(ranks)]


def rank_call(case: Case, config: LRMoEConfig, sizes: Sequence[int], kwargs: dict[str, Any]) -> RankRun:
    """Runs in a worker: this rank's tokens, this rank's experts."""
    found = run(case.tokens(*bounds_of(sizes)[dist.get_rank()]), config, group=dist.group.WORLD, **kwargs)
    return RankRun(result=found.result, record=found.record)


def merge(results: Sequence[Result]) -> Result:
    """Tokens and experts of all ranks, in rank order."""

    def joined(name: str) -> Tensor | None:
        parts = [getattr(one, name) for one in results]
        return None if parts[0] is None else torch.cat(parts)

    return Result(**{name: joined(name) for name in ("out", *GRADS)})  # type: ignore[arg-type]


def spread(
    pool: Pool, case: Case, config: LRMoEConfig, *, sizes: Sequence[int] | None = None, **kwargs: Any
) -> Spread:
    """Run `case` on all ranks of the pool, `sizes[r]` tokens on rank r."""
    sizes = even(case, pool.world_size) if sizes is None else sizes
    assert sum(sizes) == case.hidden.shape[0]
    ranks = pool.run(rank_call, case, config, sizes, kwargs)
    results = [one.result for one in ranks]
    return Spread(result=merge(results), records=[one.record for one in ranks], ranks=results)


def spread_kept(pool: Pool, case: Case, config: LRMoEConfig, **kwargs: Any) -> Tensor:
    """Weights of all pairs in backward over all ranks, (T,K) float64."""
    return keep_weights(spread(pool, case, config.replace(router_grad="retained"), **kwargs).result, case)
