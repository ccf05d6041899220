"""Compares what a drawn call gives with the plain float64 loop over experts.

The kept set is taken from the layer, pair by pair, as it is chosen; that it meets quotas, cap and rule is checked
beside the numbers that follow from it.

Shape letters: T tokens, K experts per token, E experts, H hidden, I expert width.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from fuzz_calls import DTYPES, FuzzCall, Given, give
from fuzz_run import KeptSets, Outcome, WrongError, kept_sets, run
from tests.reference import (
    GRADS,
    Case,
    counts,
    inclusion_TK,
    pairs_of,
    plain_loop,
    projection_input,
    scores,
)
from torch import Tensor

from lrmoe import LRMoEConfig
from lrmoe.layer.single import FLOOR
from lrmoe.telemetry import CallRecord


def judge(call: FuzzCall) -> None:
    """Make the call; WrongError where an answer is wrong. Errors of the call itself come through."""
    given = [give(call, number) for number in range(call.micro_batches)]
    with warnings.catch_warnings(), kept_sets() as kept:
        warnings.simplefilter("ignore", UserWarning)
        outcomes = run(call, given)
    for one, outcome in zip(given, outcomes, strict=True):
        compare(call, one, outcome, kept)


def compare(
    call: FuzzCall, given: Given, outcome: Outcome, kept: KeptSets, tokens: Sequence[slice] = ()
) -> None:
    """Output, kept set and gradients of one micro-batch; WrongError names what differs.

    Args:
        tokens: of each rank, where there are several.
    """
    case, compute = _real(given), _compute(call)
    keep_TK = _keep(case, outcome.record, kept)
    if outcome.record is not None:
        _check_kept(call, case, outcome.record, keep_TK, tokens)
    rows_T = _broken(case.hidden) | _broken(case.weights)
    out = _clean(case, rows_T)
    exact, plain = (plain_loop(one, needs=()).out for one in (_wide(out), _computed(out, compute)))
    found = outcome.out.reshape(case.hidden.shape)
    _within("out", found[~rows_T], exact[~rows_T], plain[~rows_T].to(found.dtype), compute)
    if bool(found[rows_T].isfinite().all(dim=1).any()):
        raise WrongError("out: a token whose input is not finite shows finite numbers only")
    if any(grad is not None for grad in outcome.grads.values()):
        _compare_gradients(call, case, outcome, keep_TK, rows_T)


def _compare_gradients(call: FuzzCall, case: Case, outcome: Outcome, keep_TK: Tensor, rows_T: Tensor) -> None:
    compute, pruned = _compute(call), bool((keep_TK != 1).any())
    rows_T = rows_T | _broken(case.grad_out)
    clean, kept_TK = _clean(case, rows_T), (keep_TK > 0) & (case.ids >= 0)
    touched = set(case.ids[kept_TK & rows_T[:, None]].tolist())
    full = not pruned or call.settings.full_router_grad
    needs = [n for n in GRADS if outcome.grads[n] is not None]
    exact, plain = (
        plain_loop(one, keep_TK=keep_TK, router_grad="full" if full else "retained", needs=needs)
        for one in (_wide(clean), _computed(clean, compute))
    )
    for name in needs:
        found, truth, loop = outcome.grads[name], getattr(exact, name), getattr(plain, name)
        assert found is not None
        expert = name in ("d_gate_up", "d_down")
        rows = [e not in touched for e in range(call.experts)] if expert else (~rows_T).tolist()
        at = torch.tensor(rows, dtype=torch.bool)
        least = _terms(clean) if name == "d_weights" else 0.0
        _within(name, found[at], truth[at], loop[at].to(found.dtype), compute, least)
        if name == "d_down":
            _check_not_lost(case, found, kept_TK)


def _check_not_lost(case: Case, found: Tensor, kept_TK: Tensor) -> None:
    """A kept pair that is not finite shows in its expert's gradient: an overflow has to reach the loss scaler."""
    rows_T = _broken(case.hidden) | _broken(case.grad_out)
    broken_TK = rows_T[:, None] | ~case.weights.isfinite()
    lost = [e for e in case.ids[kept_TK & broken_TK].unique().tolist() if bool(found[e].isfinite().all())]
    if lost:
        raise WrongError(f"d_down: kept pairs that are not finite have vanished from experts {lost}")


def _real(given: Given) -> Case:
    """The case without padding and without what is given to no expert."""
    case, ids = given.case, given.case.ids
    exists = (ids >= 0) & (ids < case.num_experts)
    if given.mask is not None:
        exists &= given.mask[:, None]
    alone = ~exists.any(dim=1)[:, None]
    return replace(
        case,
        ids=torch.where(exists, ids, -1),
        weights=case.weights.masked_fill(~exists, 0),
        hidden=case.hidden.masked_fill(alone, 0),
        grad_out=case.grad_out.masked_fill(alone, 0),
    )


def _clean(case: Case, rows_T: Tensor) -> Case:
    """The case without some tokens' pairs."""
    at = rows_T[:, None]
    return replace(
        case,
        ids=case.ids.masked_fill(at, -1),
        weights=case.weights.masked_fill(at, 0),
        hidden=case.hidden.masked_fill(at, 0),
        grad_out=case.grad_out.masked_fill(at, 0),
    )


def _wide(case: Case) -> Case:
    return case.to(torch.float64)


def _computed(case: Case, compute: torch.dtype) -> Case:
    """What the layer computes with: everything in its dtype, but routing weights as they are."""
    return replace(case.to(compute), weights=case.weights)


def _broken(rows: Tensor) -> Tensor:
    return ~rows.isfinite().all(dim=1)


def _compute(call: FuzzCall) -> torch.dtype:
    """The projections' dtype, or autocast's where it is on and they are not float64."""
    name = call.dtypes[2] if call.dtypes[2] == "fp64" or not call.autocast else call.autocast
    return DTYPES[name]


def _keep(case: Case, record: CallRecord | None, kept: KeptSets) -> Tensor:
    """Weight of each pair in backward, float64 (T, K)."""
    chosen = None if record is None else kept.get((record.step, record.micro_batch))
    if chosen is None:
        return torch.ones(case.ids.shape, dtype=torch.float64)
    keep = torch.zeros(case.ids.numel(), dtype=torch.float64)
    keep[chosen[0]] = chosen[1]
    return keep.view(case.ids.shape)


def _check_kept(
    call: FuzzCall, case: Case, record: CallRecord, keep_TK: Tensor, tokens: Sequence[slice]
) -> None:
    """Quotas within cap and floor, met by the kept set; and the set follows the rule where scores are clear."""
    config, n_E = call.settings, counts(case.ids, call.experts).tolist()
    quota_E = [int(q) for q in record.quota_E]
    if [int(n) for n in record.counts_E] != n_E:
        raise WrongError(f"counts {record.counts_E}: the pairs of each expert are {n_E}")
    if not all(min(n, config.min_keep) <= q <= n for q, n in zip(quota_E, n_E, strict=True)):
        raise WrongError(f"quotas {quota_E} of counts {n_E} leave min_keep={config.min_keep} or the counts")
    if sum(n_E) - sum(quota_E) > config.max_drop * sum(n_E) + 1e-9:
        raise WrongError(f"quotas {quota_E} of counts {n_E} leave out more than max_drop={config.max_drop}")
    if bool((keep_TK == 1).all()):
        return
    kept_E = _kept(case, keep_TK)
    if kept_E != quota_E:
        raise WrongError(f"kept {kept_E} pairs of each expert: the quotas are {quota_E}")
    clear = _compute(call) in (torch.float64, torch.float32) and "fp16" not in call.dtypes
    sound = all(bool(t.isfinite().all()) for t in (case.hidden, case.weights, case.grad_out))
    if clear and sound and "bf16" not in call.dtypes:
        shared = config.selection == "local" and len(tokens) > 1  # each rank chooses among its own pairs
        for part in tokens if shared else (slice(None),):
            mine = case.tokens(part.start, part.stop)
            _check_rule(config, mine, _kept(mine, keep_TK[part]), keep_TK[part], rounded=int(shared))


def _kept(case: Case, keep_TK: Tensor) -> list[int]:
    return [int(((case.ids == e) & (keep_TK > 0)).sum()) for e in range(case.num_experts)]


def _check_rule(
    config: LRMoEConfig, case: Case, quota_E: list[int], keep_TK: Tensor, *, rounded: int = 0
) -> None:
    """The pairs that the rule names.

    Args:
        rounded: by how much a quota may differ from what probabilities are made of: 1 where it is a rounded share.
    """
    score_TK = scores(case, config.score)
    for expert in range(case.num_experts):
        mine = case.ids == expert
        kept, left = (score_TK[mine & chosen] for chosen in (keep_TK > 0, keep_TK == 0))
        scored = config.estimator == "topk" and config.score != "random" and len(kept) and len(left)
        if scored and float(kept.min()) < float(left.max()) * (1 - 1e-5):
            raise WrongError(f"expert {expert}: a pair of higher score was left out")
    if config.estimator == "topk":
        if not set(keep_TK.unique().tolist()) <= {0.0, 1.0}:
            raise WrongError("topk: a kept pair has a weight other than 1")
    elif bool((score_TK[case.ids >= 0] > 0).all()):
        least_TK, most_TK = (
            inclusion_TK(_floored(score_TK, case), case.ids, [max(q + step, 0) for q in quota_E])
            for step in (-rounded, rounded)
        )
        likely = (keep_TK > 0) & (most_TK > 0.1)
        over, under = (keep_TK * least_TK)[likely] > 1.02, (keep_TK * most_TK)[likely] < 0.98
        if bool((over | under).any()):
            raise WrongError("sampled: a kept pair's weight is not the inverse of its inclusion probability")


def _floored(score_TK: Tensor, case: Case) -> Tensor:
    """Scores as chances are made of them: none far below its expert's mean."""
    found = score_TK.clone()
    for expert in range(case.num_experts):
        mine = case.ids == expert
        if bool(mine.any()):
            found[mine] = score_TK[mine].clamp(min=FLOOR * float(score_TK[mine].mean()))
    return found


def _terms(case: Case) -> float:
    """Largest sum of absolute terms of a routing weight's gradient <g, Wd phi>, of which few may be left in the sum.

    The layer takes it as <g Wd, phi>, whose rounding is as large as the plain loop's, but not where that one happens
    to cancel.
    """
    wide, most = _wide(case), 0.0
    for expert in range(case.num_experts):
        tokens, _ = pairs_of(wide.ids, expert)
        phi = projection_input(wide, expert, tokens, wide.hidden, wide.gate_up)
        terms = (wide.grad_out[tokens].abs() @ wide.down[expert].abs() * phi.abs()).sum(dim=1)
        most = max(most, float(terms.max()) if len(terms) else 0.0)
    return most


def _within(
    what: str, found: Tensor, exact: Tensor, plain: Tensor, compute: torch.dtype, least: float = 0.0
) -> None:
    """The tolerance rule of tests/reference.py, in the coarser of the result's and the computation's dtype.

    Args:
        least: what the largest entry counts at least.
    """
    if found.shape != exact.shape:
        raise WrongError(f"{what}: shape {tuple(found.shape)}, expected {tuple(exact.shape)}")
    seen = plain.isfinite()
    if not bool(found[seen].isfinite().all()):
        raise WrongError(f"{what}: not finite where the plain loop is")
    if not bool(seen.any()):
        return
    actual, truth = found[seen].double(), exact[seen]
    largest, error = float(truth.abs().max()), float((actual - truth).abs().max())
    eps = max(torch.finfo(dtype).eps for dtype in (found.dtype, compute))
    limit = 1e-10 * largest
    if eps > 1e-10:
        limit = 2 * float((plain[seen].double() - truth).abs().max()) + 4 * eps * max(largest, least)
    if error > limit:
        raise WrongError(f"{what}: error {error:.3e} above {limit:.3e} (largest entry {largest:.3e})")
