"""Inputs that trip MoE systems, under plans that move experts: hot experts, idle ranks, no tokens, odd gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.calls import bounds_of, even
from tests.distributed.plans import Crafted
from tests.distributed.pool import Pool
from tests.distributed.truth import Truth, mine
from tests.layer.harness import build, exact, forward, leaves, run
from tests.reference import GRADS, Case, Result, make_case, plain_loop

pytestmark = pytest.mark.distributed

SMALL: dict[str, Any] = {"tokens": 16, "experts": 8, "hidden": 8, "width": 6}
PLANS = (0, 1, 3, 4, 6, 10, 17, 19, 26)  # every layout that moves experts, every way back


def hot(case: Case) -> Case:
    """Every pair on one expert, each token as often as it has slots."""
    return dataclasses.replace(case, ids=torch.full_like(case.ids, 3))


CASES: dict[str, Callable[[int], tuple[Case, Sequence[int] | None]]] = {
    "every pair on one expert": lambda _: (hot(make_case(**SMALL, top_k=1)), None),
    "every slot on one expert": lambda _: (hot(make_case(**SMALL, top_k=3)), None),
    "every token on one rank": lambda ranks: (make_case(**SMALL), [0] * (ranks - 1) + [16]),
    "no token anywhere": lambda ranks: (make_case(**SMALL).tokens(0, 0), [0] * ranks),
    "one token": lambda ranks: (make_case(**SMALL).tokens(0, 1), [1] + [0] * (ranks - 1)),
    "no pair has an expert": lambda _: (hot_nowhere(make_case(**SMALL)), None),
    "an expert per rank": lambda ranks: (make_case(**SMALL | {"experts": ranks}, top_k=1), None),
    "every token to every expert": lambda ranks: (
        make_case(**SMALL | {"experts": 2 * ranks}, top_k=2 * ranks),
        None,
    ),
    "an odd hidden size": lambda _: (make_case(**SMALL | {"hidden": 7, "width": 5}, top_k=3), None),
}


def hot_nowhere(case: Case) -> Case:
    """Ids that mean no expert."""
    return dataclasses.replace(case, ids=torch.full_like(case.ids, -1))


def adversarial() -> int:
    """Worker: every case under several plans on either wire; returns how many calls it checked."""
    ranks, checked = dist.get_world_size(), 0
    for name, make in CASES.items():
        case, sizes = make(ranks)
        sizes, truth = even(case, ranks) if sizes is None else sizes, Truth.of(case)
        for number, seed in enumerate(PLANS[:: ranks // 2]):
            config = exact(lean_wire=number % 2 == 0)
            layer = build(case, config, group=dist.group.WORLD, policy=Crafted(seed=seed))
            found = run(mine(case, sizes), config, group=dist.group.WORLD, layer=layer)
            truth.check(found.result, sizes, f"{name}, plan {seed}")
            checked += 1
    return checked


@pytest.mark.parametrize("ranks", [2, 4])
def test_adversarial_cases(request: pytest.FixtureRequest, ranks: int) -> None:
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    assert pool.run(adversarial, limit_s=90) == [len(CASES) * len(PLANS[:: ranks // 2])] * ranks


def frozen() -> int:
    """Worker: every subset of tensors that need a gradient, each under two plans."""
    case, checked = make_case(**SMALL, top_k=3), 0
    sizes = even(case, dist.get_world_size())
    subsets = [s for size in range(1, 5) for s in itertools.combinations(GRADS, size)]
    for number, needs in enumerate(subsets):
        truth = Truth.of(case, needs=needs)
        for seed in (number, number + 17):
            config = exact(lean_wire=seed % 2 == 0)
            layer = build(case, config, group=dist.group.WORLD, policy=Crafted(seed=seed))
            found = run(mine(case, sizes), config, group=dist.group.WORLD, layer=layer, needs=needs)
            truth.check(found.result, sizes, f"{'+'.join(needs)}, plan {seed}")
            checked += 1
    return checked


def test_frozen_parts(pool2: Pool) -> None:
    assert pool2.run(frozen, limit_s=60) == [30, 30]


def micro_batches() -> bool:
    """Worker: forwards of four micro-batches, then their backwards; copies come and go between them."""
    group, policy = dist.group.WORLD, Crafted()
    cases = [make_case(**SMALL, top_k=2, seed=0)]
    cases += [
        dataclasses.replace(make_case(**SMALL, top_k=2, seed=s), gate_up=cases[0].gate_up, down=cases[0].down)
        for s in range(1, 4)
    ]
    for lean in (False, True):
        layer = build(cases[0], exact(lean_wire=lean), group=group, policy=policy)
        leaf, outs = leaves(cases[0], GRADS, group), []
        for seed, case in zip((3, 7, 0, 12), cases, strict=True):  # everywhere, home, few, one rank
            policy.seed = seed
            part = mine(case, [6, 10])
            tokens = {name: value for name, value in leaves(part, GRADS, group).items() if name in GRADS[:2]}
            outs.append((forward(layer, part, leaf | tokens), part, tokens))
        for out, part, _ in outs[::-1] if lean else outs:
            out.backward(part.grad_out)
        found = [plain_loop(case) for case in cases]
        for case, (out, _, tokens), wanted in zip(cases, outs, found, strict=True):
            at = slice(*bounds_of([6, 10])[dist.get_rank()])
            torch.testing.assert_close(out.detach(), wanted.out[at], rtol=1e-10, atol=1e-12)
            for name in GRADS[:2]:
                torch.testing.assert_close(
                    tokens[name].grad, getattr(wanted, name)[at], rtol=1e-10, atol=1e-12
                )
            assert case.num_experts == 8
        experts = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        for name in GRADS[2:]:
            total: Tensor = sum(getattr(one, name)[experts] for one in found)
            torch.testing.assert_close(leaf[name].grad, total, rtol=1e-10, atol=1e-12)
    return True


def test_copies_that_come_and_go_between_micro_batches(pool2: Pool) -> None:
    assert all(pool2.run(micro_batches))


def odd_gradients(rows: str) -> bool:
    """Worker: NaN or infinite rows reach what a plain loop's reach, and nothing else."""
    case = make_case(**SMALL, top_k=2)
    grad = case.grad_out.clone()
    grad[5] = float(rows)
    case = dataclasses.replace(case, grad_out=grad)
    sizes, wanted = even(case, dist.get_world_size()), plain_loop(case)
    for seed, lean in itertools.product(PLANS, (False, True)):
        config = exact(lean_wire=lean)
        layer = build(case, config, group=dist.group.WORLD, policy=Crafted(seed=seed))
        found = run(mine(case, sizes), config, group=dist.group.WORLD, layer=layer).result
        check_finite_part(found, wanted, sizes, f"plan {seed}, lean wire {lean}")
    return True


def check_finite_part(found: Result, wanted: Result, sizes: Sequence[int], what: str) -> None:
    rank, each = dist.get_rank(), 8 // len(sizes)
    for name in ("out", *GRADS):
        at = (
            slice(*bounds_of(sizes)[rank])
            if name in ("out", *GRADS[:2])
            else slice(rank * each, rank * each + each)
        )
        exact_part, part = getattr(wanted, name)[at], getattr(found, name)
        finite = exact_part.isfinite()
        assert torch.equal(part.isfinite(), finite), f"{what}: {name}"
        torch.testing.assert_close(part[finite], exact_part[finite], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", ["nan", "inf"])
def test_gradients_that_are_not_finite(pool2: Pool, rows: str) -> None:
    assert all(pool2.run(odd_gradients, rows))


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda out: out.sum(),
    "mean of every second column": lambda out: out[:, ::2].mean(),
    "transposed": lambda out: (out.t() * torch.arange(1.0, out.shape[0] + 1, dtype=out.dtype)).sum(),
    "expanded": lambda out: (out * torch.ones(1, dtype=out.dtype).expand_as(out)).sum(),
}


def strides() -> bool:
    """Worker: upstream gradients, inputs and weights of odd strides give what contiguous ones give."""
    group, case = dist.group.WORLD, make_case(**SMALL, top_k=2)
    part = mine(case, even(case, 2))
    for (name, loss), seed, lean in itertools.product(STRIDES.items(), PLANS[::2], (False, True)):
        grads = []
        for odd in (False, True):
            layer = build(case, exact(lean_wire=lean), group=group, policy=Crafted(seed=seed))
            leaf = leaves(part, GRADS, group)
            if odd:
                leaf = {
                    n: t.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for n, t in leaf.items()
                }
                leaf = {n: t.requires_grad_() for n, t in leaf.items()}
            out = forward(layer, part, leaf)
            loss(out).backward() if odd else out.backward(torch.autograd.grad(loss(out), out)[0].contiguous())
            grads.append({n: t.grad for n, t in leaf.items()})
        for n in GRADS:
            torch.testing.assert_close(
                grads[1][n], grads[0][n], rtol=1e-10, atol=1e-13, msg=f"{name}, plan {seed}, {n}"
            )
    return True


def test_odd_strides(pool2: Pool) -> None:
    assert all(pool2.run(strides, limit_s=60))
