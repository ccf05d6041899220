"""Plain loops in any dtype: what the checks compare with, and the inputs they run on. Nothing here uses lrmoe.

Shape letters: T tokens, K experts per token, E experts, H hidden, I expert width, N rows (pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer's size, and how often a time is taken."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one layer call and the gradient that arrives at its output; all leaves, in float64 or lower."""

    hidden: Tensor  # (T, H)
    ids: Tensor  # (T, K) int64
    weights: Tensor  # (T, K)
    gate_up: Tensor  # (E, 2I, H)
    down: Tensor  # (E, H, I)
    grad: Tensor  # (T, H)

    def to(self, dtype: torch.dtype) -> Case:
        """A copy in another dtype, with fresh leaves."""
        cast = {k: v if k == "ids" else v.detach().to(dtype) for k, v in vars(self).items()}
        for name in ("hidden", "weights", "gate_up", "down"):
            cast[name].requires_grad_()
        return Case(**cast)

    def leaves(self) -> list[Tensor]:
        """What gets a gradient: hidden, routing weights, both projections."""
        return [self.hidden, self.weights, self.gate_up, self.down]


def make_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    """Random inputs; experts of lognormal popularity, each token's experts distinct."""
    gen = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen, device=device)

    noise_TE = -torch.empty(shape.tokens, shape.experts, device=device).exponential_(generator=gen).log()
    # log of a lognormal popularity, plus Gumbel noise: a weighted draw
    logits_TE = normal(shape.experts) + noise_TE
    top = logits_TE.topk(shape.top_k, dim=1)
    case = Case(
        hidden=normal(shape.tokens, shape.hidden),
        ids=top.indices,
        weights=top.values.softmax(dim=1),
        gate_up=normal(shape.experts, 2 * shape.width, shape.hidden) / shape.hidden**0.5,
        down=normal(shape.experts, shape.hidden, shape.width) / shape.width**0.5,
        grad=normal(shape.tokens, shape.hidden) * normal(shape.tokens, 1).exp(),
    )
    return case.to(dtype)


def plain_loop(case: Case, keep_TK: Tensor | None = None) -> Tensor:
    """Output of a loop over experts; a pair that `keep_TK` excludes passes gradient to its routing weight only."""
    out = torch.zeros_like(case.hidden)
    for e in range(case.gate_up.shape[0]):
        token, slot = torch.where(case.ids == e)
        gate, up = F.linear(case.hidden[token], case.gate_up[e]).chunk(2, dim=1)
        rows = F.linear(F.silu(gate) * up, case.down[e])
        if keep_TK is not None:
            rows = torch.where(keep_TK[token, slot, None], rows, rows.detach())
        out = out.index_add(0, token, rows * case.weights[token, slot, None])
    return out


def run_plain(case: Case, dtype: torch.dtype, keep_TK: Tensor | None = None) -> list[Tensor]:
    """Output and gradients of the plain loop in `dtype`."""
    given = case.to(dtype)
    out = plain_loop(given, keep_TK)
    return [out.detach(), *torch.autograd.grad(out, given.leaves(), given.grad)]


def kept_pairs(case: Case, quota_E: Sequence[int]) -> Tensor:
    """The pairs of highest score alpha * |g| * |phi| within each expert's quota, as a (T, K) mask."""
    given = case.to(torch.float64)
    keep_TK = torch.zeros_like(given.ids, dtype=torch.bool)
    for e, quota in enumerate(quota_E):
        token, slot = torch.where(given.ids == e)
        gate, up = F.linear(given.hidden[token], given.gate_up[e]).chunk(2, dim=1)
        score = given.weights[token, slot] * given.grad[token].norm(dim=1) * (F.silu(gate) * up).norm(dim=1)
        best = score.topk(min(quota, len(token))).indices
        keep_TK[token[best], slot[best]] = True
    return keep_TK


def grouped_loop(
    rows: Tensor, grad: Tensor, weight: Tensor, counts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Product, input gradient and weight gradient, segment by segment."""
    ends = list(accumulate(counts))
    parts = [(slice(end - count, end), e) for e, (end, count) in enumerate(zip(ends, counts, strict=True))]
    forward = torch.cat([rows[part] @ weight[e].T for part, e in parts])
    input_grad = torch.cat([grad[part] @ weight[e] for part, e in parts])
    return forward, input_grad, torch.stack([grad[part].T @ rows[part] for part, _ in parts])


def activation_loop(
    h: Tensor, dphi: Tensor, scale: Tensor, function: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """phi; then, for the scaled upstream gradient: gradient at h, scaled phi, and the unscaled <dphi, phi>."""
    h = h.clone().requires_grad_()
    gate, up = h.chunk(2, dim=1)
    phi = function(gate) * up
    (dh,) = torch.autograd.grad(phi, h, dphi * scale[:, None])
    phi = phi.detach()
    return phi, dh, phi * scale[:, None], (dphi * phi).sum(dim=1)


def over_limit(actual: Tensor, exact: Tensor, plain: Tensor) -> float:
    """Largest error over the allowed one; infinite where shapes differ or a value is not finite."""
    if actual.shape != exact.shape or not bool(actual.isfinite().all()):
        return float("inf")
    if exact.numel() == 0:
        return 0.0
    largest = exact.abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + 4 * torch.finfo(actual.dtype).eps * largest
    error = (actual.double() - exact).abs().max().item()
    return error / allowed if allowed else float(error > 0)
