"""What a replayed call computes with: random rows and weights of the true shapes, and routing with the given counts.

Shape letters: R ranks, E experts, T tokens of a source, K slots, H hidden, I expert width, N pairs of a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrmoe.planning.memory import ExpertShape
from lrmoe.planning.problem import IntArray

_GRADIENT_SPREAD = (
    1.0  # sigma of the lognormal norm of a token's gradient: scores differ as those of real tokens do
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Tokens of one rank.

    Attributes:
        ids_TK: int64, experts of each token, -1 where it has fewer than K. alpha_TK: fp32 routing weights.
        x_TH, g_TH: inputs of the layer and gradients at its output, in the compute dtype.
    """

    ids_TK: Tensor
    alpha_TK: Tensor
    x_TH: Tensor
    g_TH: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """One layer call: all sources' tokens and all experts' weights.

    Attributes:
        counts_RE: int64, pairs of every source and expert. sources: one for each rank.
        gate_up: (E, 2I, H). down: (E, H, I). shape: sizes of an expert.
    """

    counts_RE: IntArray
    sources: Sequence[Source]
    gate_up: Tensor
    down: Tensor
    shape: ExpertShape

    @property
    def slots(self) -> int:
        """K."""
        return int(self.sources[0].ids_TK.shape[1])

    @property
    def ranks(self) -> int:
        """R."""
        return int(self.counts_RE.shape[0])

    @property
    def local(self) -> int:
        """Experts of a home."""
        return int(self.counts_RE.shape[1]) // self.ranks

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of factors of gradient rows and of sums."""
        return torch.float64 if self.gate_up.dtype == torch.float64 else torch.float32

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.gate_up.device


def make_data(
    counts_RE: IntArray,
    shape: ExpertShape,
    top_k: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Data:
    """Random tokens and weights for given counts.

    Args:
        counts_RE: int64 (R, E). shape: sizes of an expert. top_k: most experts of a token.
        dtype: of rows and weights. seed: equal seeds give equal data on a device.
    """
    gen = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, scale: float) -> Tensor:
        out = torch.empty(size, dtype=dtype, device=device)
        return out.normal_(0.0, scale, generator=gen)

    experts, hidden, width = counts_RE.shape[1], shape.hidden, shape.width
    sources = []
    for rank, counts_E in enumerate(counts_RE):
        ids_TK = route_tokens(counts_E, top_k, np.random.default_rng([seed, rank]))
        tokens = len(ids_TK)
        spread_T1 = torch.empty(tokens, 1, device=device).normal_(0.0, _GRADIENT_SPREAD, generator=gen).exp_()
        alpha_TK = torch.empty(tokens, top_k, device=device).normal_(generator=gen).softmax(dim=1)
        sources.append(
            Source(
                ids_TK=torch.from_numpy(ids_TK).to(device),
                alpha_TK=alpha_TK,
                x_TH=normal(tokens, hidden, scale=1.0),
                g_TH=normal(tokens, hidden, scale=1.0).mul_(spread_T1),
            )
        )
    return Data(
        counts_RE=counts_RE,
        sources=sources,
        gate_up=normal(experts, 2 * width, hidden, scale=hidden**-0.5),
        down=normal(experts, hidden, width, scale=width**-0.5),
        shape=shape,
    )


def route_tokens(counts_E: IntArray, top_k: int, rng: np.random.Generator) -> IntArray:
    """Distinct experts for every token, int64 (T, K), so that expert e has counts_E[e] pairs; -1 where a slot is empty.

    Pairs are dealt to tokens expert after expert, round and round, and tokens are shuffled. T is the least number of
    tokens that holds them: pairs / top_k, or more where one expert has more pairs than that.
    """
    pairs = int(counts_E.sum())
    tokens = max(-(-pairs // top_k), int(counts_E.max(initial=0)))
    ids_TK = np.full((tokens, top_k), -1, dtype=np.int64)
    if tokens:
        at = np.arange(pairs)
        ids_TK[at % tokens, at // tokens] = np.repeat(np.arange(counts_E.size), counts_E)
    return rng.permutation(ids_TK)
