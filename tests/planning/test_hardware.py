"""Devices: the datasheets' figures, links, and errors that help."""

from __future__ import annotations

import dataclasses

import pytest

from lrmoe.errors import PlanError
from lrmoe.planning.hardware import HARDWARE, Hardware, get_hardware

NAMES = ["h100", "h200", "h20", "a100-40", "a100-80", "l40s", "rtx4090", "b200"]


def test_every_preset_is_there_and_names_its_source() -> None:
    assert list(HARDWARE) == NAMES
    assert all("NVIDIA" in device.source and device.about for device in HARDWARE.values())


@pytest.mark.parametrize(
    ("name", "gib", "tflops", "tb_per_s", "link", "gb_per_s"),
    [
        ("h100", 80, 989.4, 3.35, "nvlink", 450),
        ("h200", 141, 989.4, 4.8, "nvlink", 450),
        ("h20", 96, 148, 4.0, "nvlink", 450),
        ("a100-40", 40, 312, 1.555, "nvlink", 300),
        ("a100-80", 80, 312, 2.039, "nvlink", 300),
        ("l40s", 48, 362.05, 0.864, "pcie", 32),
        ("rtx4090", 24, 165.2, 1.008, "pcie", 32),
        ("b200", 180, 2250, 8.0, "nvlink", 900),
    ],
)
def test_datasheet_figures(
    name: str, gib: int, tflops: float, tb_per_s: float, link: str, gb_per_s: float
) -> None:
    device = get_hardware(name)
    assert device.memory_bytes == gib * 2**30
    assert device.flops == pytest.approx(tflops * 1e12)
    assert device.hbm_bytes_per_s == pytest.approx(tb_per_s * 1e12)
    assert device.inner_link == link
    assert device.link_bytes_per_s(link) == pytest.approx(gb_per_s * 1e9)


def test_the_network_is_400_gbit_unless_another_is_given() -> None:
    device = get_hardware("h100")
    assert device.link_bytes_per_s("network") == 400e9 / 8
    assert device.with_network(25e9).link_bytes_per_s("network") == 25e9
    assert device.network_bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("asked", "near"), [("h1000", "h100"), ("A100-80GB", "a100-80"), ("rtx-4090", "rtx4090")]
)
def test_an_unknown_device_names_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(PlanError, match=rf"hardware='{asked}'.*did you mean '{near}'.*valid: h100, h200"):
        get_hardware(asked)


def test_a_link_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="l40s has pcie, network"):
        get_hardware("l40s").link_bytes_per_s("nvlink")


@pytest.mark.parametrize(
    "field",
    [
        "memory_bytes",
        "flops",
        "hbm_bytes_per_s",
        "nvlink_bytes_per_s",
        "network_bytes_per_s",
        "gpus_per_node",
    ],
)
def test_rates_must_be_positive(field: str) -> None:
    fields = {f.name: getattr(get_hardware("h100"), f.name) for f in dataclasses.fields(Hardware)}
    with pytest.raises(PlanError, match=field):
        Hardware(**{**fields, field: 0})
