"""The references themselves, checked against still simpler statements of the same thing."""

from __future__ import annotations

import pytest
import torch

from tests.reference import (
    assert_within,
    counts,
    inclusion,
    make_case,
    plain_loop,
    scores,
    top_pairs,
)


def test_output_is_the_sum_over_pairs() -> None:
    case = make_case(tokens=5, experts=3)
    out = plain_loop(case).out
    for token in range(5):
        total = torch.zeros(16, dtype=torch.float64)
        for slot in range(2):
            e = int(case.ids[token, slot])
            gate, up = (case.gate_up[e] @ case.hidden[token]).split(12)
            total += case.weights[token, slot] * (case.down[e] @ (torch.sigmoid(gate) * gate * up))
        torch.testing.assert_close(out[token], total, rtol=1e-12, atol=1e-12)


def test_dropping_a_pair_removes_exactly_its_terms() -> None:
    case = make_case(tokens=6, experts=3)
    keep = torch.ones(6, 2, dtype=torch.float64)
    keep[2, 1] = 0.0
    pruned = plain_loop(case, keep_TK=keep, router_grad="retained")
    without = case.ids.clone()
    without[2, 1] = -1
    removed = plain_loop(type(case)(**{**vars(case), "ids": without}))
    for name in ("d_hidden", "d_weights", "d_gate_up", "d_down"):
        torch.testing.assert_close(getattr(pruned, name), getattr(removed, name), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(pruned.out, plain_loop(case).out, rtol=0, atol=0)
    full = plain_loop(case, keep_TK=keep, router_grad="full").d_weights
    torch.testing.assert_close(full, plain_loop(case).d_weights, rtol=0, atol=0)


def test_lrm_is_the_norm_of_the_pairs_weight_gradient() -> None:
    case = make_case(tokens=4, experts=2, top_k=1)
    found = scores(case)
    for token in range(4):
        grad = plain_loop(case.tokens(token, token + 1)).d_down
        assert grad is not None
        assert float(grad.norm()) == pytest.approx(float(found[token, 0]), rel=1e-12)


def test_inclusion_meets_the_quota_and_top_pairs_break_ties_in_order() -> None:
    pi = inclusion(torch.tensor([100.0, 1.0, 2.0, 3.0]), 2)
    torch.testing.assert_close(pi, torch.tensor([1.0, 1 / 6, 2 / 6, 3 / 6], dtype=torch.float64))
    ids = torch.tensor([[0, 1], [1, 0], [0, 1]])
    kept = top_pairs(torch.ones(3, 2), ids, [2, 1])
    assert kept.tolist() == [[1, 1], [0, 1], [0, 0]]
    assert counts(ids, 2).tolist() == [3, 3]


def test_the_tolerance_refuses_a_wrong_value() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="grad: error"):
        assert_within(exact + 1e-9, exact, exact, "grad")
    with pytest.raises(AssertionError, match="shape"):
        assert_within(exact[:2], exact, exact, "grad")
