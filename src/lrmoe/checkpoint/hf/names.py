"""How the tensors of a model are called on the disk: by transformers' modules, in published checkpoints, in our own.

    a model's tensor    model.layers.1.mlp.experts.gate_up_proj (E, 2I, H)
    fused               the same name, the same shape
    per-expert          model.layers.1.mlp.experts.0.gate_proj.weight (I, H), ...0.up_proj.weight (I, H), ...
    own                 model/model.layers.1.mlp.experts.gate_up_proj/expert/0 (2I, H), .../expert/1, ...

Shapes: E experts, H hidden, I expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lrmoe.errors import UnsupportedError

PER_EXPERT, FUSED = "per-expert", "fused"
LAYOUTS = (PER_EXPERT, FUSED)
GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stored tensor, or one row of it, that is a whole tensor of a model or of one expert, or some rows of that.

    Attributes:
        name: on the disk.
        shape: of the piece.
        first: element of the flattened tensor at which it begins.
        row: of the stored tensor, where that holds all experts; else None.
    """

    name: str
    shape: tuple[int, ...]
    first: int = 0
    row: int | None = None

    @property
    def count(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


# (name of a model's tensor, its shape or that of one expert, that expert or None) -> what it consists of on the disk
Naming = Callable[[str, tuple[int, ...], int | None], list[Piece]]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How the published checkpoints of a family name one expert's projections, and what else they call differently.

    Attributes:
        gate, up, down: last part of the name before ".weight".
        renamed: (part of a module's name, the published one).
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[tuple[str, str], ...] = ()

    def published(self, name: str) -> str:
        """The published name of a tensor that transformers' modules call `name`."""
        for module, there in self.renamed:
            name = name.replace(module, there)
        return name


QWEN = Style()
MIXTRAL = Style(gate="w1", up="w3", down="w2", renamed=((".mlp.", ".block_sparse_moe."),))
# model_type -> style; a test compares each with what transformers writes.
FAMILIES: Mapping[str, Style] = MappingProxyType(
    {
        "deepseek_v3": QWEN,
        "glm4_moe": QWEN,
        "mixtral": MIXTRAL,
        "olmoe": QWEN,
        "qwen2_moe": QWEN,
        "qwen3_moe": QWEN,
    }
)


def style_of(model_type: object) -> Style:
    """The style of a family.

    Raises:
        UnsupportedError: a family whose published names are not known here; names all that are.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedError(
            f"model_type={model_type!r}: the names of its published checkpoints are not known; valid: "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def is_experts(name: str) -> bool:
    """Whether transformers' modules call a tensor of all experts so."""
    return name.endswith((GATE_UP, DOWN))


def fused(name: str, shape: tuple[int, ...], expert: int | None) -> list[Piece]:
    """The Naming of transformers' modules."""
    return [Piece(name=name, shape=shape, row=expert)]


def own(name: str, shape: tuple[int, ...], expert: int | None) -> list[Piece]:
    """The Naming of this package's checkpoints."""
    ending = "" if expert is None else f"/expert/{expert}"
    return [Piece(name=f"model/{name}{ending}", shape=shape)]


def per_expert(style: Style) -> Naming:
    """The Naming of published checkpoints."""

    def naming(name: str, shape: tuple[int, ...], expert: int | None) -> list[Piece]:
        if expert is None:
            return [Piece(name=style.published(name), shape=shape)]
        stem = style.published(name).rpartition(".")[0]
        rows, columns = shape
        if name.endswith(DOWN):
            return [Piece(name=f"{stem}.{expert}.{style.down}.weight", shape=shape)]
        half = (rows // 2, columns)
        return [
            Piece(name=f"{stem}.{expert}.{leaf}.weight", shape=half, first=part * math.prod(half))
            for part, leaf in enumerate((style.gate, style.up))
        ]

    return naming


def naming_of(layout: str, style: Style) -> Naming:
    """The Naming of a layout, one of LAYOUTS."""
    return fused if layout == FUSED else per_expert(style)
