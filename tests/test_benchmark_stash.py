"""The stash benchmark: its bytes are those that can be counted by hand, and a stash above the bound fails it."""

from __future__ import annotations

import pytest

from tests import benchmark

SMALL = ["--rounds", "1", "--tokens", "128", "--hidden", "64", "--width", "16", "--experts", "8"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_stays_is_counted_by_hand(ranks: int) -> None:
    ran = benchmark.run("stash", *SMALL, "--ranks", str(ranks), limit_s=110)
    rows = ran.figures
    assert len(rows) == 3 * 4
    pairs, row = 128 * 4 * ranks, 2 * 16 * 4
    for score in ("alpha", "alpha_phi", "random"):
        found = rows[f"stash.{score}.ep{ranks}.forward_over_backward"]
        late, early = (found["context"][place] for place in ("backward", "forward"))
        assert late == pairs * (row + 4 * (score == "alpha_phi"))
        assert early == (pairs - int(0.3 * pairs)) * row + 4 * pairs
        assert found["value"] == round(early / late, 4)
        assert rows[f"stash.{score}.ep{ranks}.saved_forward_over_backward"]["value"] < 1
    assert ran.code == 1, "narrow rows: the pairs' weights weigh more than 2 % beside them"


@pytest.mark.long
def test_wide_rows_are_within_the_bound() -> None:
    ran = benchmark.run("stash", *SMALL, "--ranks", "1", "--width", "64", limit_s=110)
    assert ran.code == 0, ran.said
