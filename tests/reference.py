"""Independent references of what the layer computes: plain loops over experts and pairs.

Legend: T tokens, K experts per token, E experts, H hidden, I expert width. A pair is one (token, slot).

Nothing here imports lrmoe. The same loop run in float64 is the truth, and run in the tested dtype it sets the
tolerance: the largest absolute error may be twice the plain loop's plus 4 eps times the largest entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
GRADS = ("d_hidden", "d_weights", "d_gate_up", "d_down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The inputs of one layer call and the gradient that arrives at its output.

    hidden (T,H), ids (T,K) int64, weights (T,K), gate_up (E,2I,H), down (E,H,I), grad_out (T,H).
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    grad_out: Tensor
    activation: str = "silu"

    @property
    def num_experts(self) -> int:
        return int(self.gate_up.shape[0])

    def to(self, dtype: torch.dtype) -> Case:
        """Return the case with every floating tensor cast to `dtype`."""
        cast = {f: getattr(self, f).to(dtype) for f in ("hidden", "weights", "gate_up", "down", "grad_out")}
        return dataclasses.replace(self, **cast)

    def tokens(self, begin: int, end: int) -> Case:
        """Return the case restricted to tokens begin..end, with all experts."""
        cut = {f: getattr(self, f)[begin:end] for f in ("hidden", "ids", "weights", "grad_out")}
        return dataclasses.replace(self, **cut)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Output and gradients of one call; a gradient is None where it was not asked for."""

    out: Tensor
    d_hidden: Tensor | None
    d_weights: Tensor | None
    d_gate_up: Tensor | None
    d_down: Tensor | None


def make_case(
    *,
    tokens: int = 24,
    experts: int = 6,
    top_k: int = 2,
    hidden: int = 16,
    width: int = 12,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    activation: str = "silu",
    skew: float = 1.0,
) -> Case:
    """Draw a case with skewed popularity; each token takes `top_k` distinct experts, weights sum to one."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    logits_TE = normal(tokens, experts) + skew * normal(experts)
    top = torch.topk(torch.softmax(logits_TE, dim=-1), top_k, dim=-1)
    weights_TK = top.values / top.values.sum(-1, keepdim=True)
    scale_T1 = torch.exp(0.7 * normal(tokens, 1))  # gradients of unequal size, so that scores differ
    case = Case(
        hidden=normal(tokens, hidden),
        ids=top.indices,
        weights=weights_TK,
        gate_up=normal(experts, 2 * width, hidden) / hidden**0.5,
        down=normal(experts, hidden, width) / width**0.5,
        grad_out=normal(tokens, hidden) * scale_T1,
        activation=activation,
    )
    return case.to(dtype)


def pairs_of(ids_TK: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """Return (token, slot) of every pair of `expert`, in (token, slot) order."""
    tokens, slots = torch.nonzero(ids_TK == expert, as_tuple=True)
    return tokens, slots


def counts(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Pairs per expert, (E,) int64; ids outside [0, E) are no expert."""
    return torch.stack([(ids_TK == e).sum() for e in range(num_experts)])


def _rescale_gradient(value: Tensor, factor: Tensor) -> Tensor:
    """Return `value` unchanged, with its gradient multiplied by `factor` (exact: x - x is 0)."""
    wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    return (wide.detach() + factor.to(wide.dtype) * (wide - wide.detach())).to(value.dtype)


def projection_input(case: Case, expert: int, tokens: Tensor, hidden: Tensor, gate_up: Tensor) -> Tensor:
    """phi: the input of the down projection of the given rows of one expert."""
    gate, up = F.linear(hidden[tokens], gate_up[expert]).chunk(2, dim=-1)
    return ACTIVATIONS[case.activation](gate) * up


def plain_loop(
    case: Case,
    *,
    keep_TK: Tensor | None = None,
    router_grad: str = "full",
    dtype: torch.dtype | None = None,
    needs: Sequence[str] = GRADS,
) -> Result:
    """Loop over experts, forward complete, backward by autograd with pair u's terms times keep_TK[u].

    `keep_TK` holds 0 for a dropped pair and its weight (1, or 1/pi) for a kept one; None keeps all.
    `router_grad` "full" gives every pair its exact weight gradient, "retained" keep_TK times that.
    """
    given = case.to(dtype) if dtype is not None else case
    names = {"d_hidden": "hidden", "d_weights": "weights", "d_gate_up": "gate_up", "d_down": "down"}
    leaf = {n: getattr(given, n).detach().clone() for n in names.values()}
    for need in needs:
        leaf[names[need]].requires_grad_(True)
    keep = torch.ones_like(given.weights) if keep_TK is None else keep_TK
    out = torch.zeros_like(given.hidden)
    for expert in range(given.num_experts):
        tokens, slots = pairs_of(given.ids, expert)
        if tokens.numel() == 0:
            continue
        phi = projection_input(given, expert, tokens, leaf["hidden"], leaf["gate_up"])
        rows = _rescale_gradient(F.linear(phi, leaf["down"][expert]), keep[tokens, slots, None])
        alpha = leaf["weights"][tokens, slots, None]
        if router_grad == "retained":
            alpha = _rescale_gradient(alpha, keep[tokens, slots, None])
        out = out.index_add(0, tokens, (rows * alpha).to(out.dtype))
    asked = [leaf[names[n]] for n in needs]
    if not out.requires_grad:  # no pair at all: every gradient is zero
        found = [torch.zeros_like(t) for t in asked]
    else:
        grads = torch.autograd.grad(out, asked, given.grad_out, allow_unused=True)
        found = [torch.zeros_like(t) if g is None else g for t, g in zip(asked, grads, strict=True)]
    named = dict(zip(needs, found, strict=True))
    return Result(out=out.detach(), **{n: named.get(n) for n in GRADS})


def scores(case: Case, score: str = "lrm") -> Tensor:
    """Score of every pair in root form, (T,K) float64; pairs without an expert get 0."""
    given = case.to(torch.float64)
    found = torch.zeros_like(given.weights)
    for expert in range(given.num_experts):
        tokens, slots = pairs_of(given.ids, expert)
        for token, slot in zip(tokens.tolist(), slots.tolist(), strict=True):
            alpha, g = given.weights[token, slot], given.grad_out[token]
            phi = projection_input(given, expert, torch.tensor([token]), given.hidden, given.gate_up)[0]
            found[token, slot] = {
                "lrm": alpha * g.norm() * phi.norm(),
                "grad_norm": g.norm(),
                "alpha_grad": alpha * g.norm(),
                "abs_grad": g.abs().sum(),
                "alpha": alpha,
                "alpha_phi": alpha * phi.norm(),
                "random": torch.ones((), dtype=torch.float64),
            }[score]
    return found


def top_pairs(score_TK: Tensor, ids_TK: Tensor, quota_E: Sequence[int]) -> Tensor:
    """Keep each expert's quota of highest score, ties to the earlier (token, slot): (T,K) of 0 and 1."""
    keep = torch.zeros(ids_TK.shape, dtype=torch.float64)
    for expert, quota in enumerate(quota_E):
        tokens, slots = pairs_of(ids_TK, expert)
        ranked = sorted(
            zip(tokens.tolist(), slots.tolist(), strict=True), key=lambda p: (-float(score_TK[p]), p[0], p[1])
        )
        for pair in ranked[:quota]:
            keep[pair] = 1.0
    return keep


def inclusion(score_N: Tensor, quota: int) -> Tensor:
    """pi = min(1, c * score) with sum pi = quota, by bisection on c; scores must be positive."""
    score = score_N.double()
    if quota >= score.numel():
        return torch.ones_like(score)
    if quota == 0:
        return torch.zeros_like(score)
    low, high = 0.0, float(1.0 / score.min())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle * score).clamp(max=1).sum()) < quota else (low, middle)
    return (high * score).clamp(max=1)


def inclusion_TK(score_TK: Tensor, ids_TK: Tensor, quota_E: Sequence[int]) -> Tensor:
    """`inclusion` per expert, laid out (T,K); 0 where the pair has no expert."""
    pi = torch.zeros(ids_TK.shape, dtype=torch.float64)
    for expert, quota in enumerate(quota_E):
        tokens, slots = pairs_of(ids_TK, expert)
        if tokens.numel():
            pi[tokens, slots] = inclusion(score_TK[tokens, slots], min(int(quota), tokens.numel()))
    return pi


def assert_within(actual: Tensor, exact: Tensor, plain: Tensor, what: str) -> None:
    """Check `actual` against the float64 `exact`; `plain` is the same loop in the dtype of `actual`."""
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    largest = float(exact.double().abs().max())
    error = float((actual.double() - exact.double()).abs().max())
    if actual.dtype == torch.float64:
        limit = 1e-10 * largest
    else:
        eps = torch.finfo(actual.dtype).eps
        limit = 2 * float((plain.double() - exact.double()).abs().max()) + 4 * eps * largest
    assert error <= limit, f"{what}: error {error:.3e} above {limit:.3e} (largest entry {largest:.3e})"


def assert_result(
    actual: Result, case: Case, *, keep_TK: Tensor | None = None, router_grad: str = "full", what: str = ""
) -> None:
    """Check output and every gradient present in `actual` by the tolerance rule."""
    needs = [n for n in GRADS if getattr(actual, n) is not None]
    exact = plain_loop(case, keep_TK=keep_TK, router_grad=router_grad, dtype=torch.float64, needs=needs)
    plain = plain_loop(case, keep_TK=keep_TK, router_grad=router_grad, needs=needs)
    for name in ("out", *needs):
        assert_within(
            getattr(actual, name), getattr(exact, name), getattr(plain, name), f"{what} {name}".strip()
        )
