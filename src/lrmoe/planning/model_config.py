"""Sizes of a Mixture-of-Experts model from its transformers configuration, whatever names that gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from lrmoe.errors import PlanError
from lrmoe.planning.shapes import Attention, LatentAttention, ModelShape, check_dimension

# Names that transformers' configurations use, the more specific first.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k")
_WIDTH = ("moe_intermediate_size", "intermediate_size")
_DENSE_WIDTH = ("intermediate_size_mlp", "intermediate_size")
SIZE_NAMES = (
    "num_hidden_layers", *_EXPERTS, *_TOP_K, *_WIDTH, "hidden_size", "vocab_size", "intermediate_size_mlp",
    "n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "shared_expert_intermediate_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace", "decoder_sparse_step", "tie_word_embeddings",
)  # fmt: skip


class MissingSizeError(PlanError):
    """A configuration that says nothing of a size; one that says something impossible is a plain PlanError."""


def shape_from_config(config: Mapping[str, object], name: str | None = None) -> ModelShape:
    """Sizes from the dictionary of a transformers configuration (its `to_dict()` or config.json).

    Args:
        config: the configuration; a multimodal one's `text_config` is read.
        name: for tables; the configuration's own name or model type otherwise.

    Raises:
        MissingSizeError: not a Mixture-of-Experts model, or a size is missing (names it).
        PlanError: a size is null, no integer or out of range.
    """
    text = config.get("text_config")
    fields: Mapping[str, object] = text if isinstance(text, Mapping) else config
    given = str(fields.get("model_type") or config.get("model_type") or "model")
    read = _Reader(fields, name or str(config.get("_name_or_path") or "") or given)
    layers, experts = read.size("num_hidden_layers"), read.size(*_EXPERTS)
    moe_layers = sum(_is_moe(fields, layer) for layer in range(layers))
    if moe_layers == 0:
        raise PlanError(f"{read.model}: no layer of the configuration has experts")
    width = read.size(*_WIDTH)
    shared = read.optional("n_shared_experts", "moe_num_shared_experts", "num_shared_experts") * width
    return ModelShape(
        name=read.model,
        hidden=read.size("hidden_size"),
        vocab=read.size("vocab_size"),
        experts=experts,
        top_k=read.size(*_TOP_K),
        expert_width=width,
        moe_layers=moe_layers,
        dense_layers=layers - moe_layers,
        dense_width=read.size(*_DENSE_WIDTH) if moe_layers < layers else 0,
        shared_width=read.optional("shared_expert_intermediate_size") or shared,
        attention=_attention(read),
        tied=bool(fields.get("tie_word_embeddings", False)),
    )


@dataclass(frozen=True)
class _Reader:
    """Reads sizes by any of several names."""

    fields: Mapping[str, object]
    model: str

    def optional(self, *names: str) -> int:
        """The first of `names` that is set, or 0."""
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                check_dimension(self.model, name, value, 0, counted=name in ("num_hidden_layers", *_EXPERTS))
                assert isinstance(value, int)
                return value
        return 0

    def size(self, *names: str) -> int:
        """The first of `names` that is set, at least 1."""
        value = self.optional(*names)
        if value >= 1:
            return value
        expected = " or ".join(names)
        for name in names:
            if name in self.fields:
                text = json.dumps(self.fields[name])
                raise PlanError(f"{self.model}: {name}={text}: must be an integer of at least 1")
        raise MissingSizeError(
            f"{self.model}: the configuration has no {expected}: not a Mixture-of-Experts model?"
        )


def _attention(read: _Reader) -> Attention | LatentAttention:
    heads = read.size("num_attention_heads")
    if read.optional("kv_lora_rank"):
        return LatentAttention(
            heads=heads,
            query_rank=read.optional("q_lora_rank"),
            kv_rank=read.size("kv_lora_rank"),
            nope_dim=read.size("qk_nope_head_dim"),
            rope_dim=read.size("qk_rope_head_dim"),
            value_dim=read.size("v_head_dim"),
        )
    return Attention(
        heads=heads,
        kv_heads=read.optional("num_key_value_heads") or heads,
        head_dim=read.optional("head_dim") or read.size("hidden_size") // heads,
    )


def _is_moe(fields: Mapping[str, object], layer: int) -> bool:
    """Whether a layer has experts, by the several ways in which configurations say so."""

    def number(name: str, default: int) -> int:
        value = fields.get(name)
        return value if isinstance(value, int) else default

    kinds = fields.get("mlp_layer_types")
    if isinstance(kinds, list | tuple) and layer < len(kinds):
        return kinds[layer] == "sparse"
    chosen = fields.get("moe_layers")
    if isinstance(chosen, list | tuple):
        return layer in chosen
    dense = fields.get("mlp_only_layers")
    if isinstance(dense, list | tuple) and layer in dense:
        return False
    if layer < number("first_k_dense_replace", 0):
        return False
    if "expert_layer_period" in fields:
        return layer % max(number("expert_layer_period", 1), 1) == number("expert_layer_offset", 0)
    start, end = number("moe_layer_start_index", 0), number("moe_layer_end_index", layer)
    step = number("decoder_sparse_step", number("moe_layer_interval", 1))
    return start <= layer <= (layer if end < 0 else end) and (layer + 1) % max(step, 1) == 0
