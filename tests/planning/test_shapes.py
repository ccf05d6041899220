"""Known models add up to their published sizes; configurations of transformers read to the same shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lrmoe.errors import PlanError
from lrmoe.planning.model_config import shape_from_config
from lrmoe.planning.shapes import SHAPES, Attention, ModelShape, get_shape

# Billions of parameters, in all and active per token, as the models' own pages state them.
PUBLISHED = {
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "GLM-4.5-Air": (106, 12),
    "GLM-4.5": (355, 32),
    "DeepSeek-V3": (671, 37),
    "Mixtral-8x7B": (46.7, 12.9),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    total, active = PUBLISHED[name]
    shape = get_shape(name)
    assert shape.params / 1e9 == pytest.approx(total, rel=0.01)
    # pages round, and differ in whether both ends of the vocabulary are active: ours counts them
    ends = 2 * shape.vocab * shape.hidden / 1e9
    met = shape.other_params + shape.expert_params * shape.top_k // shape.experts
    assert active - 0.5 <= met / 1e9 <= active + ends + 0.5


def test_every_shape_is_listed_under_its_name() -> None:
    assert [shape.name for shape in SHAPES.values()] == list(PUBLISHED)


def test_the_published_models_of_the_method() -> None:
    qwen, air = get_shape("Qwen/Qwen3-30B-A3B"), get_shape("glm-4.5-AIR")
    assert (qwen.hidden, qwen.expert_width, qwen.experts, qwen.top_k, qwen.moe_layers) == (
        2048,
        768,
        128,
        8,
        48,
    )
    assert (air.hidden, air.expert_width, air.experts, air.top_k) == (4096, 1408, 128, 8)
    assert (air.layers, air.dense_layers, air.shared_width) == (46, 1, 1408)
    assert qwen.expert().weight_bytes == 4_718_592 * 2


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"model='qwen3-30b'.*did you mean 'Qwen3-30B-A3B'.*config\.json"):
        get_shape("qwen3-30b")


# transformers' class of each model, and what its checkpoint sets against the class's defaults
CONFIGS = {
    "Qwen3-30B-A3B": ("qwen3_moe", {"num_hidden_layers": 48, "head_dim": 128}),
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        {
            "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "head_dim": 128,
            "moe_intermediate_size": 1536,
        },
    ),
    "GLM-4.5-Air": ("glm4_moe", {"head_dim": 128}),
    "GLM-4.5": (
        "glm4_moe",
        {
            "hidden_size": 5120, "num_hidden_layers": 92, "head_dim": 128, "moe_intermediate_size": 1536,
            "intermediate_size": 12288, "n_routed_experts": 160, "first_k_dense_replace": 3,
        },
    ),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "Mixtral-8x7B": ("mixtral", {}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("gpt_oss", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_transformers_configuration_reads_to_the_same_shape(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model_type, fields = CONFIGS[name]
    config = transformers.AutoConfig.for_model(model_type, **fields).to_dict()
    assert shape_from_config(config, name) == get_shape(name)


MINIMAL = {
    "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 6, "num_attention_heads": 4, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "moe_layers"),
    [
        ({}, 6),
        ({"first_k_dense_replace": 2}, 4),
        ({"mlp_only_layers": [0, 3]}, 4),
        ({"decoder_sparse_step": 2}, 3),
        ({"moe_layers": [1, 4]}, 2),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse", "sparse"]}, 5),
        ({"expert_layer_period": 3, "expert_layer_offset": 1}, 2),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4}, 4),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, 5),
    ],
)
def test_layers_without_experts_are_told_apart(fields: dict[str, object], moe_layers: int) -> None:
    shape = shape_from_config({**MINIMAL, **fields})
    assert (shape.moe_layers, shape.layers) == (moe_layers, 6)
    assert shape.dense_width == (128 if moe_layers < 6 else 0)


def test_a_multimodal_configuration_is_read_by_its_text_part() -> None:
    shape = shape_from_config({"model_type": "vision", "text_config": {**MINIMAL, "model_type": "text"}})
    assert (shape.name, shape.experts) == ("text", 8)


def test_shared_experts_add_their_width() -> None:
    assert shape_from_config({**MINIMAL, "n_shared_experts": 2}).shared_width == 64
    assert shape_from_config({**MINIMAL, "shared_expert_intermediate_size": 48}).shared_width == 48


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_experts": None}, "num_experts=null: must be an integer"),
        ({"num_experts": 32.5}, r"num_experts=32\.5: must be an integer"),
        ({"num_experts": "32"}, "num_experts='32': must be an integer"),
        ({"num_experts": 10**9}, "num_experts=1000000000: .* at most 65,536"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_experts_per_tok": 9}, "top_k=9"),
        ({"num_experts": -8}, "num_experts=-8"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"moe_layers": []}, "no layer of the configuration has experts"),
    ],
)
def test_a_configuration_that_cannot_be_planned_says_why(fields: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        shape_from_config({**MINIMAL, **fields})


@pytest.mark.parametrize(
    "field", ["hidden", "experts", "top_k", "moe_layers", "shared_width", "dense_layers"]
)
def test_sizes_out_of_range_are_named(field: str) -> None:
    changed: dict[str, Any] = {field: -1}
    with pytest.raises(PlanError, match=rf"{field}=-1"):
        dataclasses.replace(get_shape("mixtral-8x7b"), **changed)


def test_parameter_count_by_hand() -> None:
    shape = ModelShape(
        name="tiny", hidden=4, vocab=10, experts=2, top_k=1, expert_width=3, moe_layers=1, dense_layers=1,
        dense_width=5, shared_width=2, attention=Attention(heads=2, kv_heads=1, head_dim=4), tied=True,
    )  # fmt: skip
    attention = 4 * 8 + 2 * 4 * 4 + 8 * 4
    assert shape.expert_params == 2 * 3 * 4 * 3
    assert shape.other_params == 2 * (attention + 8) + 4 * (2 + 3 * 2) + 3 * 4 * 5 + 40
