"""Shared by the cases: making memory dirty for certain."""

from __future__ import annotations

import torch

from lrmoe.layer.buffers import scratch


def poison_memory(kilobytes: int = 256) -> None:
    """Fill and free blocks of many sizes with NaN, and all kept scratch buffers, so that unwritten memory shows."""
    blocks = [torch.full((size,), float("nan")) for size in (2**n for n in range(4, 14)) for _ in range(8)]
    blocks.append(torch.full((kilobytes * 256,), float("nan")))
    del blocks
    for buffer in vars(scratch).get("_buffers", {}).values():
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
