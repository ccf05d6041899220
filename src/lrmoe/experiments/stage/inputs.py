"""What a layer of the stage is given: recorded routing and gradient norms, repeated, around random rows.

A small trajectory decides who goes where and how scores spread; the stage runs it at a size where GEMMs dominate. Each
rank's recorded tokens are repeated with their experts, routing weights and gradient norms; rows and the directions of
gradients are drawn anew for each repetition.

Shape letters: T tokens of a rank, K experts per token, H hidden, I expert width, L home experts, E experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrmoe.experiments.trajectories.virtual import PAIRS_OVER_WIDTH, ExecutionSize


@dataclass(frozen=True, kw_only=True)
class StageSize:
    """The size of executed layers.

    Attributes:
        hidden, width: H and I. ranks: of the expert-parallel group.
        pairs_over_width: least pairs of a rank, in expert widths: what makes GEMMs most of a call.
    """

    hidden: int = ExecutionSize.hidden
    width: int = ExecutionSize.width
    ranks: int = ExecutionSize.ranks
    pairs_over_width: int = PAIRS_OVER_WIDTH

    @property
    def execution(self) -> ExecutionSize:
        """What trajectories plan for, so that copies are worth there what they are on the stage."""
        pairs = self.pairs_over_width * self.width
        return ExecutionSize(hidden=self.hidden, width=self.width, ranks=self.ranks, pairs=pairs)

    def repeats(self, pairs: int) -> int:
        """How often a rank's recorded pairs are repeated."""
        return -(-self.pairs_over_width * self.width // pairs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Routed:
    """Routing of one call's tokens of one rank, and the norms of their gradients at the layer's output.

    Attributes:
        ids_TK: int64. alpha_TK: fp32. grad_norm_T: fp32.
    """

    ids_TK: Tensor
    alpha_TK: Tensor
    grad_norm_T: Tensor

    def of_rank(self, rank: int, ranks: int, repeats: int) -> Routed:
        """A rank's tokens of a batch that the ranks share in order, repeated as a whole."""
        mine = slice(*(len(self.ids_TK) * place // ranks for place in (rank, rank + 1)))
        return Routed(
            ids_TK=self.ids_TK[mine].repeat(repeats, 1),
            alpha_TK=self.alpha_TK[mine].repeat(repeats, 1),
            grad_norm_T=self.grad_norm_T[mine].repeat(repeats),
        )

    def balanced(self, experts: int, seed: int) -> Routed:
        """The same with every expert chosen equally often (to one), in random order."""
        tokens, slots = self.ids_TK.shape
        rounds = -(-tokens * slots // experts)
        rng = np.random.default_rng(seed)
        orders = np.stack([_order(rng, experts, slots) for _ in range(rounds)]).reshape(-1, slots)
        return Routed(
            ids_TK=torch.from_numpy(np.ascontiguousarray(orders[:tokens])),
            alpha_TK=self.alpha_TK,
            grad_norm_T=self.grad_norm_T,
        )


def _order(rng: np.random.Generator, experts: int, slots: int) -> np.ndarray:
    """All experts once, int64; the last token of a round that does not divide takes the first ones again."""
    order = rng.permutation(experts)
    return np.concatenate([order, order[: -experts % slots]])


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows of one call and rank: inputs (T, H), and directions (T, H) of the gradient at its output, of length 1."""

    x_TH: Tensor
    direction_TH: Tensor

    @classmethod
    def draw(cls, tokens: int, hidden: int, *key: int) -> Rows:
        """Normal rows from a key of integers that are not negative."""
        generator = _generator(*key)
        x_TH = torch.randn(tokens, hidden, generator=generator)
        direction_TH = torch.nn.functional.normalize(torch.randn(tokens, hidden, generator=generator), dim=1)
        return cls(x_TH=x_TH, direction_TH=direction_TH)


def draw_weights(local: int, hidden: int, width: int, *key: int) -> tuple[Tensor, Tensor]:
    """gate_up (L, 2I, H) and down (L, H, I), normal, scaled to keep the size of rows; both ask for gradients."""
    generator = _generator(*key)
    gate_up = torch.randn(local, 2 * width, hidden, generator=generator) / hidden**0.5
    down = torch.randn(local, hidden, width, generator=generator) / width**0.5
    return gate_up.requires_grad_(), down.requires_grad_()


def _generator(*key: int) -> torch.Generator:
    word = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(word % 2**63)
