"""Score of a pair: the root of its squared contribution to a weight gradient.

For the down projection a pair's gradient is the outer product of alpha_u g_t and phi_u, of rank one, so its norm is
alpha_u |g_t| |phi_u| (LRM). Everything in fp32; the root form ranks as its square does
and holds for row norms between about 1e-18 and 1e18, where the square would leave fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrmoe.ops import abs_sums, row_norms


def pair_scores(
    kind: str, grad_TH: Tensor | None, alpha_N: Tensor, token_N: Tensor, phi_norm_N: Tensor | None
) -> Tensor:
    """Scores of this source's pairs.

    Args:
        kind: a score of the configuration.
        grad_TH: gradient at the layer's output, any strides; not needed by "random", "alpha" and "alpha_phi".
        alpha_N: (N,) routing weights; token_N: int64 (N,).
        phi_norm_N: fp32 (N,), norm of each pair's projection input; needed by "lrm" and "alpha_phi".

    Returns:
        fp32 (N,), non-negative where finite.
    """
    alpha = alpha_N.float().abs()
    if kind == "random":
        return torch.ones_like(alpha)
    if kind == "alpha":
        return alpha
    if kind == "alpha_phi":
        return alpha * _given(phi_norm_N)
    assert grad_TH is not None, "scores of a gradient are known in backward"
    if kind == "abs_grad":
        return abs_sums(grad_TH).index_select(0, token_N)
    norm_N = row_norms(grad_TH).index_select(0, token_N)  # a third of the time of indexing
    if kind == "grad_norm":
        return norm_N
    return alpha * norm_N if kind == "alpha_grad" else alpha * norm_N * _given(phi_norm_N)


def _given(phi_norm_N: Tensor | None) -> Tensor:
    assert phi_norm_N is not None, "the forward keeps projection-input norms for this score"
    return phi_norm_N


def broken_rows(score_M: Tensor) -> Tensor | None:
    """Rows of non-finite score, bool (M,), or None where the scores' sum, which only a CPU is asked for, is finite."""
    if score_M.device.type == "cpu" and math.isfinite(float(score_M.sum())):
        return None
    return score_M.isfinite().logical_not_()


def finite_scores(score_M: Tensor, broken_M: Tensor | None) -> Tensor:
    """The scores, 0 where they are not finite."""
    return score_M if broken_M is None else score_M.nan_to_num(0.0, 0.0, 0.0)
