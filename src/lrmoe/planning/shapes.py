"""Sizes of Mixture-of-Experts models, and those of known ones; `model_config` reads them from a configuration.

Only sizes that memory and time depend on. Expert biases and norms are left out of parameter counts: a test holds the
totals to the published ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lrmoe.errors import PlanError
from lrmoe.planning.memory import ExpertShape


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention: query heads, key/value heads, width of a head."""

    heads: int
    kv_heads: int
    head_dim: int

    def params(self, hidden: int) -> int:
        """Parameters of the four projections."""
        return 2 * hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def elements(self) -> int:
        """Elements per token that backward needs with a fused attention: query, key, value, output."""
        return 2 * self.head_dim * (self.heads + self.kv_heads)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: ranks of the query and key/value projections, parts of a head."""

    heads: int
    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def params(self, hidden: int) -> int:
        """Parameters of the projections down and up, and of the output."""
        head = self.nope_dim + self.rope_dim
        query = (
            self.query_rank * (hidden + self.heads * head) if self.query_rank else hidden * self.heads * head
        )
        shared = hidden * (self.kv_rank + self.rope_dim)
        up = self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        return query + shared + up + self.heads * self.value_dim * hidden

    @property
    def elements(self) -> int:
        """Elements per token that backward needs with a fused attention: latents, query, key, value, output."""
        latent = self.query_rank + self.kv_rank + self.rope_dim
        return latent + 2 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one model.

    Attributes:
        name: as published. hidden: model width. vocab: rows of the embedding. tied: one matrix for both ends.
        experts, top_k, expert_width: of each MoE layer. shared_width: width of all its shared experts together.
        moe_layers, dense_layers: how many of each. dense_width: width of a dense layer's feed-forward.
        attention: of every layer.
        defaults: "name=value" of what a configuration left out and was filled in.

    Raises:
        PlanError: a size out of range.
    """

    name: str
    hidden: int
    vocab: int
    experts: int
    top_k: int
    expert_width: int
    moe_layers: int
    attention: Attention | LatentAttention
    shared_width: int = 0
    dense_layers: int = 0
    dense_width: int = 0
    tied: bool = False
    defaults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("hidden", "vocab", "experts", "top_k", "expert_width", "moe_layers"):
            check_dimension(
                self.name, name, getattr(self, name), 1, counted=name in ("experts", "moe_layers")
            )
        for name in ("shared_width", "dense_layers", "dense_width"):
            check_dimension(self.name, name, getattr(self, name), 0, counted=name == "dense_layers")
        if self.top_k > self.experts:
            raise PlanError(f"{self.name}: top_k={self.top_k}: must be at most experts={self.experts}")

    @property
    def layers(self) -> int:
        """All layers."""
        return self.moe_layers + self.dense_layers

    def expert(self, element_bytes: int = 2) -> ExpertShape:
        """Sizes of one expert in a compute dtype of that many bytes."""
        return ExpertShape(hidden=self.hidden, width=self.expert_width, element_bytes=element_bytes)

    @property
    def expert_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.moe_layers * self.experts * 3 * self.hidden * self.expert_width

    @property
    def other_params(self) -> int:
        """Parameters of everything else: attention, routers, shared experts, dense layers, embeddings."""
        layer = self.attention.params(self.hidden) + 2 * self.hidden
        moe = self.hidden * (self.experts + 3 * self.shared_width)
        dense = 3 * self.hidden * self.dense_width
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + self.moe_layers * moe + self.dense_layers * dense + ends

    @property
    def params(self) -> int:
        """All parameters."""
        return self.expert_params + self.other_params

    @property
    def token_elements(self) -> int:
        """Elements per token that all layers keep for backward beside the routed experts.

        Per layer the inputs of both norms, both normalised inputs, attention, and of a shared expert or dense
        feed-forward its two projections and their product; nothing recomputed.
        """
        layer = 4 * self.hidden + self.attention.elements
        return (
            self.layers * layer
            + self.moe_layers * 3 * self.shared_width
            + self.dense_layers * 3 * self.dense_width
        )


def check_dimension(model: str, name: str, value: object, least: int, *, counted: bool) -> None:
    """Refuse a size that cannot be; `counted`: what is looped over or has arrays.

    Raises:
        PlanError: no integer, or out of range; names the model and the size.
    """
    most = 2**16 if counted else 2**24
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PlanError(
            f"{model}: {name}={value!r}: must be an integer of at least {least} and at most {most:,}"
        )


SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name.lower(): shape
        for shape in (
            ModelShape(
                name="Qwen3-30B-A3B", hidden=2048, vocab=151936, experts=128, top_k=8, expert_width=768,
                moe_layers=48, attention=Attention(heads=32, kv_heads=4, head_dim=128),
            ),
            ModelShape(
                name="Qwen3-235B-A22B", hidden=4096, vocab=151936, experts=128, top_k=8, expert_width=1536,
                moe_layers=94, attention=Attention(heads=64, kv_heads=4, head_dim=128),
            ),
            ModelShape(
                name="GLM-4.5-Air", hidden=4096, vocab=151552, experts=128, top_k=8, expert_width=1408,
                moe_layers=45, dense_layers=1, dense_width=10944, shared_width=1408,
                attention=Attention(heads=96, kv_heads=8, head_dim=128),
            ),
            ModelShape(
                name="GLM-4.5", hidden=5120, vocab=151552, experts=160, top_k=8, expert_width=1536,
                moe_layers=89, dense_layers=3, dense_width=12288, shared_width=1536,
                attention=Attention(heads=96, kv_heads=8, head_dim=128),
            ),
            ModelShape(
                name="DeepSeek-V3", hidden=7168, vocab=129280, experts=256, top_k=8, expert_width=2048,
                moe_layers=58, dense_layers=3, dense_width=18432, shared_width=2048,
                attention=LatentAttention(
                    heads=128, query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128
                ),
            ),
            ModelShape(
                name="Mixtral-8x7B", hidden=4096, vocab=32000, experts=8, top_k=2, expert_width=14336,
                moe_layers=32, attention=Attention(heads=32, kv_heads=8, head_dim=128),
            ),
            ModelShape(
                name="gpt-oss-20b", hidden=2880, vocab=201088, experts=32, top_k=4, expert_width=2880,
                moe_layers=24, attention=Attention(heads=64, kv_heads=8, head_dim=64),
            ),
            ModelShape(
                name="gpt-oss-120b", hidden=2880, vocab=201088, experts=128, top_k=4, expert_width=2880,
                moe_layers=36, attention=Attention(heads=64, kv_heads=8, head_dim=64),
            ),
        )
    }
)  # fmt: skip


def get_shape(name: str) -> ModelShape:
    """Look a model up by its published name, in any case, with or without its owner ("Qwen/Qwen3-30B-A3B").

    Raises:
        PlanError: no such model; names the nearest and all known ones.
    """
    key = name.rsplit("/", 1)[-1].lower()
    if key in SHAPES:
        return SHAPES[key]
    near = difflib.get_close_matches(key, list(SHAPES), n=1, cutoff=0.4)
    hint = f" (did you mean {SHAPES[near[0]].name!r}?)" if near else ""
    known = ", ".join(shape.name for shape in SHAPES.values())
    raise PlanError(f"model={name!r}: no such model{hint}; known: {known}; or a config.json")
