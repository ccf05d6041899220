"""Hold a call over the ranks of a pool against the plain loop inside its workers: many calls in one message.

Every rank runs the loops of the whole case and compares its own tokens and its own experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.layer import MoELayer
from tests.distributed.calls import bounds_of
from tests.layer.harness import keep_weights, local_experts, run
from tests.reference import GRADS, Case, Result, assert_within, plain_loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """What a case must give: the float64 loop, and the loop in the case's own dtype for the tolerance."""

    case: Case
    exact: Result
    plain: Result

    @classmethod
    def of(
        cls,
        case: Case,
        *,
        keep_TK: Tensor | None = None,
        router_grad: str = "full",
        needs: Sequence[str] = GRADS,
    ) -> Truth:
        """Run the loops."""
        wide = plain_loop(case, keep_TK=keep_TK, router_grad=router_grad, dtype=torch.float64, needs=needs)
        if case.hidden.dtype == torch.float64:
            return cls(case=case, exact=wide, plain=wide)
        plain = plain_loop(case, keep_TK=keep_TK, router_grad=router_grad, needs=needs)
        return cls(case=case, exact=wide, plain=plain)

    def check(self, found: Result, sizes: Sequence[int], what: str) -> None:
        """Hold this rank's part of every tensor against the whole, by the tolerance rule."""
        tokens, experts = (
            slice(*bounds_of(sizes)[dist.get_rank()]),
            local_experts(self.case, dist.group.WORLD),
        )
        for name in ("out", *GRADS):
            mine, exact = getattr(found, name), getattr(self.exact, name)
            assert (mine is None) == (exact is None), f"{what}: {name} of rank {dist.get_rank()}"
            if exact is not None:
                whole = exact.clone().to(mine.dtype)  # the rule's largest entry is that of the whole tensor
                whole[tokens if name in ("out", "d_hidden", "d_weights") else experts] = mine
                assert_within(
                    whole, exact, getattr(self.plain, name), f"{what}: {name}, rank {dist.get_rank()}"
                )


def mine(case: Case, sizes: Sequence[int]) -> Case:
    """This rank's tokens."""
    return case.tokens(*bounds_of(sizes)[dist.get_rank()])


def kept_by(case: Case, config: LRMoEConfig, sizes: Sequence[int], layer: MoELayer) -> Tensor:
    """Weights of all pairs in backward over all ranks, (T, K) float64; every rank gets all of them."""
    retained = config.replace(router_grad="retained")
    assert layer.config.router_grad == "retained", "weights are read off the retained router gradient"
    found = run(mine(case, sizes), retained, group=dist.group.WORLD, layer=layer).result
    parts: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(parts, found.d_weights)
    whole = dataclasses.replace(found, d_weights=torch.cat(parts))
    return keep_weights(whole, case)
