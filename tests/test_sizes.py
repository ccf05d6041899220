"""Sizes as people type them."""

from __future__ import annotations

import pytest

from lrmoe.errors import ConfigError
from lrmoe.sizes import MOST_BYTES, check_size, parse_size


@pytest.mark.parametrize(
    ("size", "found"),
    [
        ("60GiB", 60 * 2**30),
        ("512 mib", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("2tb", 2 * 10**12),
        ("0.1kb", 100),  # in binary floating point 0.1 * 1000 happens to be exact, 0.29 * 100 is not
        ("0.29kB", 290),
        ("17", 17),
        (" 17 b ", 17),
        (10**9, 10**9),
        ("60%", 600),
        ("12.5%", 125),
        ("100%", 1000),
        ("0.15%", 1),
    ],
)
def test_every_form_is_read_exactly(size: int | str, found: int) -> None:
    assert parse_size("layer_budget", size, 1000) == found
    check_size("layer_budget", size)


@pytest.mark.parametrize(
    "size",
    [
        "sixty",
        "",
        "-1",
        "1 parsec",
        "1ib",
        "1e9",
        "60 %%",
        "101%",
        "0",
        "0%",
        0,
        -1,
        True,
        1.5,
        2**60 + 1,
        "2000000TiB",
    ],
)
def test_anything_else_is_refused_with_field_and_value(size: object) -> None:
    with pytest.raises(ConfigError) as caught:
        check_size("layer_budget", size)
    assert "layer_budget" in str(caught.value)
    assert repr(size) in str(caught.value)
    assert "must" in str(caught.value)


def test_a_share_needs_a_whole() -> None:
    check_size("memory_budget", "60%")
    with pytest.raises(ConfigError, match=r"memory_budget='60%': .* like '60GiB', '512MiB' or a number"):
        parse_size("memory_budget", "60%")
    with pytest.raises(ConfigError, match="at least one byte"):
        parse_size("memory_budget", "1%", 50)


def test_large_sizes_stay_exact() -> None:
    assert parse_size("memory_budget", str(2**59 + 1)) == 2**59 + 1
    assert parse_size("memory_budget", MOST_BYTES) == MOST_BYTES
