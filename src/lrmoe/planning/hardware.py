"""Devices and their links, from public datasheets: what memory and cost models divide by.

Rates are peaks of the datasheet; what part of them a phase reaches is the business of `calibration.Constants`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lrmoe.errors import PlanError, did_you_mean

GIB = 2**30
NETWORK_BYTES_PER_S = 50e9  # 400 Gb/s per GPU, one NDR InfiniBand or 400 GbE port each


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device in a node of its usual kind.

    Attributes:
        name: what users type.
        about: the product.
        memory_bytes: device memory. The "GB" of a datasheet's memory are taken as GiB (2^30 bytes), which is how it
            is built: drivers report some 79.6 GiB of an "80 GB" H100. What they take (more where ECC lives in the same
            memory: an L40S shows 45 of 48) is part of the headroom that capacity planning leaves free.
        flops: dense bf16 tensor FLOP/s with fp32 accumulation, no sparsity.
        hbm_bytes_per_s: device memory bandwidth.
        nvlink_bytes_per_s: NVLink bandwidth to the other GPUs of the node, per direction; None without NVLink.
        pcie_bytes_per_s: PCIe bandwidth, per direction; the link inside a node where there is no NVLink.
        network_bytes_per_s: bandwidth between nodes, per GPU and direction (a default: no property of the device).
        gpus_per_node: GPUs that share the link inside a node.
        source: where the figures are published.
    """

    name: str
    about: str
    memory_bytes: int
    flops: float
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float | None
    pcie_bytes_per_s: float
    network_bytes_per_s: float = NETWORK_BYTES_PER_S
    gpus_per_node: int = 8
    source: str

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "flops", "hbm_bytes_per_s", "pcie_bytes_per_s", "network_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise PlanError(f"{name}={getattr(self, name)}: must be positive and finite")
        if self.nvlink_bytes_per_s is not None and not self.nvlink_bytes_per_s > 0:
            raise PlanError(f"nvlink_bytes_per_s={self.nvlink_bytes_per_s}: must be positive, or None")
        if self.gpus_per_node < 1:
            raise PlanError(f"gpus_per_node={self.gpus_per_node}: must be at least 1")

    @property
    def inner_link(self) -> str:
        """Link class inside a node: "nvlink" or "pcie"."""
        return "pcie" if self.nvlink_bytes_per_s is None else "nvlink"

    def link_bytes_per_s(self, link: str) -> float:
        """Bandwidth of a link class ("nvlink", "pcie" or "network"), per GPU and direction.

        Raises:
            PlanError: no such link class, or NVLink on a device that has none.
        """
        speeds = {
            "nvlink": self.nvlink_bytes_per_s,
            "pcie": self.pcie_bytes_per_s,
            "network": self.network_bytes_per_s,
        }
        speed = speeds.get(link)
        if speed is None:
            valid = ", ".join(name for name, value in speeds.items() if value is not None)
            raise PlanError(f"link={link!r}: {self.name} has {valid}")
        return speed

    def with_network(self, bytes_per_s: float) -> Hardware:
        """The same device behind another network."""
        return replace(self, network_bytes_per_s=bytes_per_s)


def _device(
    name: str,
    about: str,
    *,
    gib: int,
    tflops: float,
    hbm: float,
    nvlink: float | None,
    pcie: float,
    source: str,
) -> Hardware:
    """Memory in GiB (the datasheet's "GB"), dense bf16 TFLOP/s, GB/s of memory, GB/s per direction of the links."""
    return Hardware(
        name=name,
        about=about,
        memory_bytes=gib * GIB,
        flops=tflops * 1e12,
        hbm_bytes_per_s=hbm * 1e9,
        nvlink_bytes_per_s=None if nvlink is None else nvlink * 1e9,
        pcie_bytes_per_s=pcie * 1e9,
        source=source,
    )


# Datasheets give tensor FLOP/s with sparsity (halved here) and link bandwidth of both directions (halved here).
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        device.name: device
        for device in (
            _device(
                "h100", "NVIDIA H100 SXM5 80 GB",
                gib=80, tflops=989.4, hbm=3350, nvlink=450, pcie=64,
                source="NVIDIA H100 datasheet, SXM: 1979 TFLOPS sparse, NVLink 900 GB/s, PCIe Gen5 128 GB/s",
            ),
            _device(
                "h200", "NVIDIA H200 SXM 141 GB",
                gib=141, tflops=989.4, hbm=4800, nvlink=450, pcie=64,
                source="NVIDIA H200 datasheet, SXM: 1979 TFLOPS sparse, NVLink 900 GB/s, PCIe Gen5 128 GB/s",
            ),
            _device(
                "h20", "NVIDIA H20 96 GB",
                gib=96, tflops=148, hbm=4000, nvlink=450, pcie=64,
                source="NVIDIA H20 product brief: 148 TFLOPS dense, 4.0 TB/s, NVLink 900 GB/s, PCIe Gen5 128 GB/s",
            ),
            _device(
                "a100-40", "NVIDIA A100 SXM4 40 GB",
                gib=40, tflops=312, hbm=1555, nvlink=300, pcie=32,
                source="NVIDIA A100 datasheet, SXM 40 GB: 312 TFLOPS dense, NVLink 600 GB/s, PCIe Gen4 64 GB/s",
            ),
            _device(
                "a100-80", "NVIDIA A100 SXM4 80 GB",
                gib=80, tflops=312, hbm=2039, nvlink=300, pcie=32,
                source="NVIDIA A100 datasheet, SXM 80 GB: 312 TFLOPS dense, NVLink 600 GB/s, PCIe Gen4 64 GB/s",
            ),
            _device(
                "l40s", "NVIDIA L40S 48 GB",
                gib=48, tflops=362.05, hbm=864, nvlink=None, pcie=32,
                source="NVIDIA L40S datasheet: 362.05 TFLOPS dense, 864 GB/s, no NVLink, PCIe Gen4 64 GB/s",
            ),
            _device(
                "rtx4090", "NVIDIA GeForce RTX 4090 24 GB",
                gib=24, tflops=165.2, hbm=1008, nvlink=None, pcie=32,
                source="NVIDIA Ada whitepaper: 165.2 TFLOPS bf16 dense, fp32 accumulation, 1008 GB/s, PCIe Gen4",
            ),
            _device(
                "b200", "NVIDIA B200 (HGX) 180 GB",
                gib=180, tflops=2250, hbm=8000, nvlink=900, pcie=64,
                source="NVIDIA DGX B200 datasheet over 8: 180 GB, 8 TB/s, 4.5 PFLOPS sparse, NVLink 1.8 TB/s",
            ),
        )
    }
)  # fmt: skip


def get_hardware(name: str) -> Hardware:
    """Look a device up.

    Raises:
        PlanError: no such device; names the nearest and all valid ones.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    hint = did_you_mean(name.lower(), HARDWARE, cutoff=0.4)
    raise PlanError(f"hardware={name!r}: no such device{hint}; valid: {', '.join(HARDWARE)}")


# Names that drivers give. Other forms of these products (PCIe cards, NVL) have other rates: they are not known.
PRODUCTS: Mapping[str, str] = MappingProxyType(
    {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA H20": "h20",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA L40S": "l40s",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA B200": "b200",
    }
)


def product(name: str) -> Hardware | None:
    """The device that a driver calls by this name, or None where it is not known."""
    return HARDWARE.get(PRODUCTS.get(name, ""))
