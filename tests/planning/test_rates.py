"""Prices of copies: the arithmetic of bytes and FLOP, the rule where nothing is known, agreement between ranks."""

from __future__ import annotations

import dataclasses

import pytest

from lrmoe.planning.hardware import HARDWARE, PRODUCTS, product
from lrmoe.planning.rates import CPU, UNKNOWN, Sizes, agreed, copy_price, device_code

SIZES = Sizes(hidden=2048, width=768, ranks=8, element_bytes=2)


def test_devices_are_told_by_their_product_and_kind() -> None:
    assert device_code("cpu", "") == CPU
    assert device_code("cuda", "NVIDIA H100 PCIe") == device_code("xpu", "") == UNKNOWN
    codes = [device_code("cuda", name) for name in PRODUCTS]
    assert sorted(codes) == list(range(1, len(HARDWARE) + 1))
    assert product("NVIDIA H200") is HARDWARE["h200"]
    assert agreed([3, 3, 3]) == 3
    assert agreed([3, 2, 3]) == agreed([CPU, 1]) == UNKNOWN


def test_a_copy_on_a_known_device_costs_its_bytes_over_the_link() -> None:
    h200 = device_code("cuda", "NVIDIA H200")
    row_s = 18 * 2048 * 768 / (989.4e12 * 0.6)
    copy_s = 8 * 3 * 2048 * 768 / (450e9 * 0.75) + 3 * 20e-6
    cross_s = 4 * 2 * 2048 / (450e9 * 0.75)
    assert copy_price(h200, SIZES) == pytest.approx((copy_s / row_s, cross_s / row_s))
    copy_s = 8 * 3 * 2048 * 768 / (50e9 * 0.8) + 3 * 40e-6
    assert copy_price(h200, SIZES, hosts=2)[0] == pytest.approx(copy_s / row_s)


def test_where_the_link_is_unknown_exchange_is_a_third_of_a_balanced_call() -> None:
    for sizes in (SIZES, dataclasses.replace(SIZES, element_bytes=4, ranks=4)):
        copy, cross = copy_price(UNKNOWN, dataclasses.replace(sizes, hidden=10**9))  # no fixed time
        assert cross * (sizes.ranks - 1) / sizes.ranks == pytest.approx(0.5)
        parameter_bytes = 2 * sizes.element_bytes + 4
        pairs = parameter_bytes * 3 * sizes.width / (4 * sizes.element_bytes)  # that cross for as many bytes
        assert copy == pytest.approx(pairs * cross, rel=1e-4)


def test_passes_and_bytes_follow_what_the_call_does() -> None:
    frozen = dataclasses.replace(SIZES, weights=False)
    forward = dataclasses.replace(SIZES, backward=False)
    assert [s.passes for s in (SIZES, frozen, forward)] == [3, 2, 1]
    assert [s.copy_bytes for s in (SIZES, frozen, forward)] == [8, 4, 2]
    assert dataclasses.replace(SIZES, element_bytes=8).copy_bytes == 24
    full, lean = copy_price(CPU, SIZES), copy_price(CPU, dataclasses.replace(SIZES, lean=True))
    assert lean[1] == 0 < full[1]
    assert lean[0] > full[0], "fewer bytes in the same third of the time: a slower link"


def test_fixed_time_weighs_on_small_experts() -> None:
    small = dataclasses.replace(SIZES, hidden=64, width=64)
    assert copy_price(CPU, small)[0] > 600
    assert copy_price(CPU, dataclasses.replace(small, ranks=1))[0] > 0
