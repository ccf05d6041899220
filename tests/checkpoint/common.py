"""Small contents and damage to files."""

from __future__ import annotations

from pathlib import Path

import torch

from lrmoe.checkpoint import Content, ExpertTensor

EXPERTS = 4


def experts_of(rank: int, world_size: int) -> torch.Tensor:
    """This rank's part of a (4, 2, 3) tensor whose values tell expert and place."""
    whole = torch.arange(EXPERTS * 6, dtype=torch.float32).view(EXPERTS, 2, 3)
    count = EXPERTS // world_size
    return whole[rank * count : (rank + 1) * count]


def content(step: int = 0, rank: int = 0, world_size: int = 1) -> Content:
    """Recognisable tensors: `step` is added to all of them."""
    rows = experts_of(rank, world_size) + step
    return Content(
        dense={"model/a": torch.full((3,), float(step)), "model/b": torch.tensor(1.5, dtype=torch.bfloat16)},
        experts={"model/up": ExpertTensor(values=rows, first=rank * EXPERTS // world_size)},
        state={"step": step, "list": [1, 2]},
    )


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def remove(path: Path) -> None:
    path.unlink()


DAMAGE = {"flip": flip_a_byte, "truncate": truncate, "remove": remove}
