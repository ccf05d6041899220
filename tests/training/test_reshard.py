"""Saved in one layout, gone on in another: {1, 2} x {1, 2, 4} ranks, both storages; benchmarks/reshard.py has all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.training.resharding import Went, compare, load_in, save_in

STORAGES = ("owned", "sharded")
LIMIT_S = 120


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_every_layout_goes_on_where_the_unbroken_run_goes(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    through: dict[tuple[int, str], list[Went]] = {}
    alone = save_in(tmp_path, 1, STORAGES)
    through |= {(1, storage): [alone[storage]] for storage in STORAGES}
    pair = pool2.run(save_in, tmp_path, 2, STORAGES, limit_s=LIMIT_S)
    through |= {(2, storage): [rank[storage] for rank in pair] for storage in STORAGES}
    saved = tuple(through)
    found = {
        1: [load_in(tmp_path, saved, 1, STORAGES)],
        2: pool2.run(load_in, tmp_path, saved, 2, STORAGES, limit_s=LIMIT_S),
        4: pool4.run(load_in, tmp_path, saved, 4, STORAGES, limit_s=LIMIT_S),
    }
    for ranks, by_rank in found.items():
        assert len(by_rank) == ranks
        for before, storage in by_rank[0]:
            said = f"{before} to {(ranks, storage)}"
            difference = compare(through[before], [one[before, storage] for one in by_rank])
            assert difference.worst <= 1e-10, f"{said}: {difference}"
            if before == (ranks, storage):
                assert difference.bitwise, f"{said}: {difference}"
