"""What the memory of a call depends on besides its plan, and the row counts of its exchanges.

Shape letters: R ranks, Q seats of all ranks, P parts of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.cells import between_ranks, largest_run, seat_table
from lrmoe.planning.memory import ExpertShape
from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats

INDEX = 8  # int64


@dataclass(frozen=True, kw_only=True, eq=False)
class CallSizes:
    """What the memory of a call depends on besides its plan.

    Attributes:
        shape: sizes of an expert, element size of the compute dtype.
        tokens_R: int64 (R,), tokens of every rank. slots: experts per token.
        input_bytes, alpha_bytes, weight_bytes: element sizes of the layer's input, routing weights and parameters.
        lean: one row per (token, rank). keeps_outputs: expert outputs stay for the routing weights' gradient.
        norms: projection-input norms travel home. scored: pairs are scored, in backward or (early) in forward, which
            then keeps only the rows that stay at their seats.
        differentiable: a backward follows. needs: gradients asked for, of x, alpha, gate_up, down.
        block_rows: rows that experts compute at once, at least; None: all of them.
        fused: every rank's passes between products are compiled and need no temporaries.
    """

    shape: ExpertShape
    tokens_R: IntArray
    slots: int
    input_bytes: int
    alpha_bytes: int
    weight_bytes: int
    lean: bool
    keeps_outputs: bool
    norms: bool
    scored: bool
    early: bool
    differentiable: bool
    needs: tuple[bool, bool, bool, bool]
    block_rows: int | None
    fused: bool

    @property
    def reads_stash_by_index(self) -> bool:
        """Whether first projections that stayed are read where they lie, as compiled passes do on a CPU."""
        return self.fused and self.block_rows is not None

    @property
    def needs_x(self) -> bool:
        """Whether the input needs a gradient."""
        return self.needs[0]

    @property
    def needs_alpha(self) -> bool:
        """Whether the routing weights need a gradient."""
        return self.needs[1]

    @property
    def needs_gate_up(self) -> bool:
        """Whether the first projection needs a gradient."""
        return self.needs[2]

    @property
    def needs_down(self) -> bool:
        """Whether the second projection needs a gradient."""
        return self.needs[3]

    @property
    def sum_bytes(self) -> int:
        """Element size of sums: fp32, or fp64 for fp64."""
        return 8 if self.shape.element_bytes == 8 else 4

    @property
    def projections(self) -> tuple[int, int]:
        """Parameters of one expert's gate_up and down that get gradients."""
        plane = self.shape.hidden * self.shape.width
        return 2 * plane * self.needs_gate_up, plane * self.needs_down


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """What the (source, seat) cells of an exchange (planning/cells.py) add up to on each rank, int64 (P, R) each.

    Pairs and rows sent and received, and largest blocks, of every part.
    """

    pairs_out: IntArray
    pairs_in: IntArray
    rows_out: IntArray
    rows_in: IntArray
    block: IntArray

    @classmethod
    def of(cls, sizes: CallSizes, seats: Seats, cells_PRQ: IntArray, starts_R: IntArray) -> Cells:
        """From cells of seats, or of stands: `starts_R` says which; blocks are those of the first run of seats."""
        pairs = between_ranks(cells_PRQ, starts_R)
        rows = np.minimum(pairs, sizes.tokens_R[:, None]) if sizes.lean else pairs
        table = seat_table(starts_R)
        homes = seats.topology.experts_per_rank
        return cls(
            pairs_out=pairs.sum(axis=2),
            pairs_in=pairs.sum(axis=1),
            rows_out=rows.sum(axis=2),
            rows_in=rows.sum(axis=1),
            block=largest_run(cells_PRQ.sum(axis=1), table, homes, sizes.block_rows),
        )
