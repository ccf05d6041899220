"""Bad input: one clear error that names the argument, what it was, and what it must be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lrmoe.errors import ConfigError, InputError, PlanError
from lrmoe.layer import MoELayer
from tests.layer.harness import build, exact, forward, leaves, run
from tests.reference import Case, assert_result, make_case

CASE = make_case(tokens=6, experts=4, hidden=8, width=6)
E, H, W = 4, 8, 6


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "hidden of another width": ({"hidden": normal(6, H + 1)}, "hidden"),
    "hidden of one dimension": ({"hidden": normal(H)}, "hidden"),
    "hidden of integers": ({"hidden": torch.ones(6, H, dtype=torch.int64)}, "hidden"),
    "ids of floats": ({"ids": CASE.ids.double()}, "top_k_index"),
    "ids of booleans": ({"ids": CASE.ids > 0}, "top_k_index"),
    "ids of one dimension": ({"ids": CASE.ids[:, 0]}, "top_k_index"),
    "ids of fewer tokens": ({"ids": CASE.ids[:5]}, "top_k_index"),
    "weights of fewer tokens": ({"weights": CASE.weights[:5]}, "top_k_weights"),
    "weights of other slots": ({"weights": CASE.weights[:, :1]}, "top_k_weights"),
    "weights of integers": ({"weights": torch.ones(6, 2, dtype=torch.int64)}, "top_k_weights"),
    "gate_up of fewer experts": ({"gate_up": normal(E - 1, 2 * W, H)}, "gate_up_proj"),
    "gate_up transposed": ({"gate_up": normal(E, H, 2 * W)}, "gate_up_proj"),
    "gate_up of half the width": ({"gate_up": normal(E, W, H)}, "gate_up_proj"),
    "gate_up of two dimensions": ({"gate_up": normal(2 * W, H)}, "gate_up_proj"),
    "down transposed": ({"down": normal(E, W, H)}, "down_proj"),
    "down of fewer experts": ({"down": normal(E - 1, H, W)}, "down_proj"),
    "hidden in a list": ({"hidden": CASE.hidden.tolist()}, "hidden_states is a list"),
    "hidden of numpy": ({"hidden": CASE.hidden.numpy()}, "hidden_states is a ndarray"),
    "sparse hidden": ({"hidden": CASE.hidden.to_sparse()}, "hidden_states has layout"),
    "no ids": ({"ids": None}, "top_k_index is a NoneType"),
    "a number for weights": ({"weights": 0.5}, "top_k_weights is a float"),
    "no gate_up": ({"gate_up": None}, "gate_up_proj is a NoneType"),
    "down in a list": ({"down": list(CASE.down)}, "down_proj is a list"),
    "down of another dtype": ({"down": normal(E, H, W, dtype=torch.bfloat16)}, "dtype"),
}


def call(case: Case, **kwargs: Any) -> torch.Tensor:
    layer = build(CASE, exact())
    return layer(case.hidden, case.ids, case.weights, case.gate_up, case.down, **{"training": True, **kwargs})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_are_refused_by_name(name: str, training: bool) -> None:
    changes, message = BAD[name]
    with pytest.raises(InputError, match=message) as caught:
        call(dataclasses.replace(CASE, **changes), training=training)
    assert any(word in str(caught.value) for word in ("must", "expected"))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(5, dtype=torch.bool),
        torch.ones(7, dtype=torch.bool),
        torch.ones(6),
        [True] * 6,
        1,
    ],
    ids=["short", "long", "float", "list", "number"],
)
def test_bad_masks_are_refused(mask: Any) -> None:
    with pytest.raises(InputError, match="padding mask"):
        call(CASE, padding_mask=mask)


def test_the_layer_works_after_refusing() -> None:
    layer = build(CASE, exact())
    with pytest.raises(InputError):
        forward(layer, CASE, {**leaves(CASE, []), "d_hidden": normal(6, H + 1)})
    assert_result(run(CASE, exact(), layer=layer).result, CASE)


BAD_SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": 0}, "experts=0"),
    ({"num_experts": -4}, "experts=-4"),
    ({"num_experts": 2.5}, "experts=2.5"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"num_experts": "4"}, "num_experts='4'.*integer"),
    ({"num_experts": None}, "num_experts=None.*integer"),
    ({"hidden_size": 8.0}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size=True.*integer"),
    ({"activation": ["silu"]}, r"activation=\['silu'\].*silu"),
    ({"config": {"max_drop": 0.3}}, "config: got .*LRMoEConfig"),
    ({"config": None}, "config: got None.*LRMoEConfig"),
    ({"intermediate_size": -6}, "intermediate_size"),
    ({"activation": "relu"}, "activation='relu'.*silu"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SHAPES, ids=str)
def test_a_layer_that_cannot_be_is_refused_when_built(changes: dict[str, Any], message: str) -> None:
    good = {"num_experts": 4, "hidden_size": 8, "intermediate_size": 6, "config": exact()}
    with pytest.raises((ConfigError, PlanError), match=message):
        MoELayer(**{**good, **changes})


def test_rows_in_another_dtype_than_the_weights_are_computed_in_the_weights_dtype() -> None:
    case = CASE.to(torch.bfloat16)
    wide = dataclasses.replace(case, hidden=case.hidden.float(), grad_out=case.grad_out.float())
    found = run(wide, exact()).result
    assert found.out.dtype == torch.float32
    assert found.d_hidden is not None
    assert found.d_hidden.dtype == torch.float32
    narrow = dataclasses.replace(found, out=found.out.bfloat16(), d_hidden=found.d_hidden.bfloat16())
    assert_result(narrow, case)


def test_leading_dimensions_are_flattened_and_given_back() -> None:
    layer = build(CASE, exact())
    shaped = layer(
        CASE.hidden.view(2, 3, H),
        CASE.ids.view(2, 3, 2),
        CASE.weights.view(2, 3, 2),
        CASE.gate_up,
        CASE.down,
        training=True,
    )
    assert shaped.shape == (2, 3, H)
    assert torch.equal(shaped.view(6, H), call(CASE))
