"""A layer's past: through its state and back, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lrmoe.errors import ConfigError
from lrmoe.layer import MoELayer
from tests.layer.harness import build, exact, run
from tests.reference import make_case

CASE = make_case(tokens=40, experts=16, top_k=4, hidden=8, width=6, seed=8, skew=3.0)


def called(policy: str, calls: int = 2) -> MoELayer:
    config = exact(policy=policy)
    layer = build(CASE, config)
    for _ in range(calls):
        run(CASE, config, layer=layer)
        layer.clock.advance()
    return layer


def stored(layer: MoELayer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(layer.state_dict()))
    return found


def test_only_policies_that_plan_from_history_have_one() -> None:
    assert called("lrmoe").state_dict()["past"] is None
    assert called("symi", 0).state_dict()["past"] is None
    past = called("symi").state_dict()["past"]
    assert (past["policy"], past["ranks"], past["step"], len(past["counts"])) == ("symi", 1, 2, 2)


def test_it_comes_back_whole() -> None:
    layer, other = called("symi", 18), called("symi", 0)
    other.load_state_dict(stored(layer))
    assert other.state_dict() == layer.state_dict()
    assert len(other.state_dict()["past"]["counts"]) == 16
    assert other.state_dict()["past"]["step"] == 18


def test_a_state_without_one_begins_anew() -> None:
    """As earlier versions wrote them."""
    layer, state = called("symi"), stored(called("symi"))
    del state["past"]
    layer.load_state_dict(state)
    assert layer.state_dict()["past"] is None


@pytest.mark.parametrize(
    ("past", "said"),
    [
        (5, "state of layer 0: past=5: must be a table"),
        ({"policy": "symi", "ranks": 1}, "state of layer 0: past lacks step, counts, previous"),
    ],
)
def test_a_bad_one_changes_nothing(past: object, said: str) -> None:
    layer, state = called("symi"), {**stored(called("symi", 3)), "past": past}
    before = stored(layer)
    with pytest.raises(ConfigError, match=said):
        layer.load_state_dict(state)
    assert layer.state_dict() == before


def test_a_bad_controller_state_changes_no_past() -> None:
    layer, state = called("symi"), {**stored(called("symi", 3)), "calls": "many"}
    before = stored(layer)
    with pytest.raises(ConfigError, match="calls='many'"):
        layer.load_state_dict(state)
    assert layer.state_dict() == before


def test_of_another_policy_nothing_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    layer = called("laer", 1)
    layer.load_state_dict(stored(called("symi")))
    assert layer.state_dict()["past"] is None
    assert caplog.messages == [
        "lrmoe: policy='laer' begins anew: past counts and placements are those of policy 'symi'"
    ]
