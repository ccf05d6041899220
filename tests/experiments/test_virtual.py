from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lrmoe import LRMoEConfig
from lrmoe.experiments.trajectories.virtual import ExecutionSize, by_count, evenly, spread, widened
from lrmoe.layer import MoELayer
from lrmoe.planning import Policy, Problem, Topology, get_policy
from tests.distributed.pool import Pool

EXPERTS, TOKENS, SLOTS, HIDDEN, WIDTH = 16, 64, 4, 16, 8


def one_rank(seed: int, max_drop: float = 0.3) -> Problem:
    """A skewed call of one rank, with past scores."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(4096, rng.dirichlet(np.full(32, 0.4)))
    return Problem(
        counts_RE=counts[None].astype(np.int64),
        topology=Topology(ranks=1, experts=32),
        max_drop=max_drop,
        move_rows=1 / 3,
        score_mean_E=rng.lognormal(size=32),
    )


def test_an_even_split_keeps_every_experts_pairs_and_shares_them_equally() -> None:
    counts_E = np.array([5, 0, 1, 17, 8, 3], dtype=np.int64)
    counts_RE = evenly(counts_E, 4)
    assert counts_RE.dtype == np.int64
    assert (counts_RE.sum(axis=0) == counts_E).all()
    assert (np.ptp(counts_RE, axis=0) <= 1).all()
    assert np.ptp(counts_RE.sum(axis=1)) <= 1


@pytest.mark.parametrize("prices", [(0.0, 0.0), (4.0, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_quotas_are_the_policys_on_eight_ranks(seed: int, prices: tuple[float, float]) -> None:
    problem = one_rank(seed)
    policy = get_policy("lrmoe")
    plan = spread(policy, 8, 2, prices)(problem)
    plan.check(problem)
    there = policy(widened(problem, 8, 2, prices))
    assert (plan.quota_E == there.quota_E).all()
    assert plan.forward_load_R.tolist() == [4096]
    assert plan.peak_rows == there.peak_rows
    assert replace(plan, reason="auto").peak_rows == there.peak_rows < (4096, 4096)
    assert (plan.quota_E != policy(problem).quota_E).any()  # one rank has no peak to lower


def test_slots_and_their_price_reach_the_policy() -> None:
    problem = one_rank(0)
    free, dear, none = (
        spread(get_policy("lrmoe"), 8, slots, (price, 0.0))(problem).quota_E
        for slots, price in ((2, 0.0), (2, 1e6), (0, 0.0))
    )
    assert (dear == none).all()
    assert (free != none).any()


def test_a_copys_price_follows_the_size_of_the_call() -> None:
    size, config = ExecutionSize(pairs=20_000), LRMoEConfig(lean_wire=False)
    full, tenth = size.prices(config, 20_000), size.prices(config, 2_000)
    assert tenth[0] == pytest.approx(full[0] / 10)
    assert tenth[1] == full[1] > 0
    assert size.prices(LRMoEConfig(), 2_000)[1] == 0  # a lean wire


def test_by_count_ignores_past_scores() -> None:
    problem = one_rank(1)
    policy = get_policy("lrmoe")
    without = Problem(counts_RE=problem.counts_RE, topology=problem.topology, max_drop=0.3, move_rows=1 / 3)
    assert (by_count(policy)(problem).quota_E == policy(without).quota_E).all()
    assert (by_count(policy)(problem).quota_E != policy(problem).quota_E).any()


def gradients(rank: int, ranks: int, config: LRMoEConfig, layer: MoELayer) -> dict[str, torch.Tensor]:
    """One pruned call on this rank's share of a batch; the gradients of its input, routing weights and experts."""
    make = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=make, dtype=torch.float64)
    scores = torch.randn(TOKENS, EXPERTS, generator=make) - 0.3 * torch.arange(EXPERTS)
    weights, ids = scores.softmax(-1).double().topk(SLOTS)
    up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=make, dtype=torch.float64)
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=make, dtype=torch.float64)
    upstream = torch.randn(TOKENS, HIDDEN, generator=make, dtype=torch.float64)
    tokens = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    home = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    inputs = [t.clone().requires_grad_() for t in (x[tokens], weights[tokens], up[home], down[home])]
    layer(inputs[0], ids[tokens], *inputs[1:], training=True).backward(upstream[tokens])
    assert layer.last_record is not None
    assert layer.last_record.kept_share == pytest.approx(0.6, abs=0.01)
    return {
        name: t.grad
        for name, t in zip(("x", "alpha", "up", "down"), inputs, strict=True)
        if t.grad is not None
    }


def config_of(estimator: str) -> LRMoEConfig:
    return LRMoEConfig(max_drop=0.4, warmup_steps=0, estimator=estimator, replica_slots=0, seed=3)


def build(config: LRMoEConfig, group: dist.ProcessGroup | None, policy: Policy | None = None) -> MoELayer:
    layer = MoELayer(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        config=config,
        group=group,
        policy=policy,
    )
    layer.clock.expected = True
    return layer


def on_rank(estimator: str) -> dict[str, torch.Tensor]:
    config = config_of(estimator)
    return gradients(dist.get_rank(), 2, config, build(config, dist.group.WORLD))


@pytest.mark.parametrize("estimator", ["sampled", "topk"])
def test_one_process_keeps_what_two_ranks_keep(pool2: Pool, tmp_path: Path, estimator: str) -> None:
    config = config_of(estimator)
    alone = gradients(0, 1, config, build(config, None, policy=spread(get_policy("lrmoe"), 2, 0, (0.0, 0.0))))
    ranks = pool2.run(on_rank, estimator)
    for name, values in alone.items():
        torch.testing.assert_close(torch.cat([r[name] for r in ranks]), values, rtol=1e-10, atol=1e-12)
