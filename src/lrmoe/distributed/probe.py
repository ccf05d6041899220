"""Where checks look in on a layer call. By default nobody looks: every step below does nothing.

    plan -> walk( tokens -> crossing -> experts -> kept -> values )

`lrmoe.debug` installs a probe that checks; it lies above the layer, which therefore cannot call it by name.

Shape letters: R ranks, Q seats of all ranks, S seats of this rank, E experts, N pairs, M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from lrmoe.planning import LayerPlan
from lrmoe.planning.problem import IntArray

if TYPE_CHECKING:
    from lrmoe.distributed.comm import Comm

Check = Callable[[Tensor], None]  # of rows that have arrived


class Phases(Protocol):
    """What knows the phase that a call is in."""

    latest: str


class Probe:
    """Sees the steps of layer calls, in the same order on every rank; may raise."""

    def plan(self, comm: Comm, layer: int, plan: LayerPlan, like: Tensor) -> None:
        """A call has its plan; nothing has crossed yet. `like` lies on the call's device."""

    def walk(
        self, comm: Comm, layer: int, direction: str, clock: Phases, like: Tensor
    ) -> AbstractContextManager[None]:
        """Around one walk: direction "forward" or "backward"."""
        return nullcontext()

    def tokens(self, name: str, rows: Tensor, pair_N: Tensor, slots: int, *, by_pair: bool = False) -> None:
        """What the walk reads of tokens that have a pair.

        Args:
            rows: (T, H); with `by_pair` (T, K), read pair by pair. pair_N: int64 flat pair ids; slots: K.
        """

    def weights(self, experts: Sequence[int], named: Mapping[str, Tensor | None]) -> None:
        """Weights, or gradients, of experts: entry i of each tensor belongs to experts[i]."""

    def experts(
        self,
        name: str,
        rows: Tensor | None,
        index_M: Tensor | None,
        experts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """What the experts of this rank's seats wrote.

        Args:
            rows: (M, H); row index_M[i] holds the result of row i in (seat, source) order (the same without an index).
            experts, counts: expert and rows of each stretch of that order.
        """

    def kept(self, plan: LayerPlan, expert_Q: IntArray, kept_RQ: IntArray, mine: Tensor | None) -> None:
        """The kept set of a call.

        Args:
            kept_RQ: kept pairs of every source at its forward seats. mine: (N,) positive for kept pairs of this rank;
                None: all of them.
        """

    def values(self, named: Mapping[str, Tensor | None]) -> None:
        """What a walk gives back."""

    def scratch(self, buffer: Tensor) -> None:
        """A scratch buffer goes to a user who will overwrite it."""

    def crossing(
        self, comm: Comm, rows: Tensor, send_R: Sequence[int], receive_R: Sequence[int]
    ) -> Check | None:
        """Rows are about to cross: `send_R[r]` to rank r, `receive_R[r]` from it.

        Returns:
            What looks at the rows that have arrived, or None. Several exchanges may be under way.
        """
        return None


_installed: list[Probe] = [Probe()]  # the last one looks


def current() -> Probe:
    """The probe in force."""
    return _installed[-1]


def install(probe: Probe) -> None:
    """Let `probe` look, in this process, until it is removed."""
    _installed.append(probe)


def remove(probe: Probe) -> None:
    """Take an installed probe away; the one before it looks again."""
    _installed.remove(probe)
