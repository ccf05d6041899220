"""The memory benchmark: a rank gains little more than it keeps, and a file that stays mapped would show."""

from __future__ import annotations

import pytest

from tests import benchmark

SMALL = ["--experts", "16", "--layers", "2", "--vocabulary", "512", "--file-mb", "20", "--ranks", "2"]
EXPERTS = 16 * 2 * 3 * 512 * 512 * 4  # bytes


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_rank_gains_its_share_and_less_than_a_file() -> None:
    ran = benchmark.run("load_memory", *SMALL, "--paths", "train", "export", limit_s=280)
    assert ran.code == 0, ran.said
    rows = ran.figures
    assert len(rows) == 3
    found = rows["load.train.peak_over_share_plus_shard"]["context"]
    assert EXPERTS / 2 < found["share_bytes"] < found["gained_bytes"]
    assert found["gained_bytes"] < found["share_bytes"] + found["shard_bytes"] < EXPERTS
    assert 0.5 < rows["load.train.private_over_share_plus_shard"]["value"] < 1
    assert rows["load.export.peak_over_shard"]["value"] < 1
