"""Least drops under a growing list of needs: a small linear program, solved by the dual simplex method.

    minimise sum y   subject to   A y >= need,  0 <= y <= upper,   A >= 0

Needs come one at a time (cuts.py finds them) and may change between solutions; both leave the reduced costs legal, so
each solution starts from the last one. Plain array arithmetic in a fixed order: every rank finds the same numbers.

Shape letters: E experts (columns), K needs (rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lrmoe.planning.problem import FloatArray

_TOLERANCE = 1e-9  # relative to the largest bound
_PIVOTS = 20_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Cover:
    """A solution, or the proof that there is none.

    Attributes:
        drops_E: float64 (E,). total: their sum. short: 0.0, or by how much no drops inside the bounds can do.
        price_K: float64 (K,), how fast `total` (or `short`) falls as each need falls.
    """

    drops_E: FloatArray
    total: float
    short: float
    price_K: FloatArray


class Covering:
    """The program and its current basis."""

    def __init__(self, upper_E: FloatArray) -> None:
        self.experts = upper_E.size
        self.upper = upper_E.astype(np.float64)
        self.table = np.zeros((0, self.experts))
        self.cost = np.ones(self.experts)
        self.basis: list[int] = []
        self.at_upper: NDArray[np.bool_] = np.zeros(self.experts, dtype=bool)
        self.small = _TOLERANCE * max(float(upper_E.max(initial=0.0)), 1.0)

    def add(self, row_E: FloatArray) -> None:
        """One more row of A; its surplus starts as a basic variable."""
        rows = len(self.basis)
        self.table = np.hstack([self.table, np.zeros((rows, 1))])
        row = np.concatenate([-row_E, np.zeros(rows), [1.0]])
        for held, basic in zip(self.table, self.basis, strict=True):
            if row[basic] != 0.0:
                row = row - row[basic] * held
        self.table = np.vstack([self.table, row])
        self.basis.append(self.experts + rows)
        self.upper = np.append(self.upper, np.inf)
        self.cost = np.append(self.cost, 0.0)
        self.at_upper = np.append(self.at_upper, False)

    def solve(self, need_K: FloatArray) -> Cover:
        """Least drops that meet all needs, float64 (K,)."""
        for _ in range(_PIVOTS):
            value_K = self._values(need_K)
            upper_K = self.upper[self.basis]
            below_K, above_K = -value_K, value_K - upper_K
            worst_K = np.maximum(below_K, above_K)
            row = int(np.argmax(worst_K)) if worst_K.size else 0
            if not worst_K.size or worst_K[row] <= self.small:
                return self._found(value_K)
            falls = bool(above_K[row] > below_K[row])
            column = self._enter(row, falls)
            if column < 0:
                price_K = self.table[row, self.experts :] * (-1.0 if falls else 1.0)
                drops_E = np.zeros(self.experts)
                return Cover(drops_E=drops_E, total=0.0, short=float(worst_K[row]), price_K=price_K)
            self._pivot(row, column, falls)
        raise ArithmeticError("the covering program did not settle")

    def _values(self, need_K: FloatArray) -> FloatArray:
        fixed = np.flatnonzero(self.at_upper)
        held = (self.table[:, fixed] * self.upper[fixed]).sum(axis=1)
        return -(self.table[:, self.experts :] * need_K).sum(axis=1) - held

    def _enter(self, row: int, falls: bool) -> int:
        """The column that comes into the basis: smallest ratio of reduced cost, largest pivot among equals; or -1."""
        line = -self.table[row] if falls else self.table[row].copy()
        line[self.basis] = 0.0
        line = np.where(self.at_upper, line, -line)
        able = np.flatnonzero((line > 1e-9) & (self.upper > 0.0))
        if not able.size:
            return -1
        ratio = np.abs(self.cost[able]) / line[able]
        near = able[ratio <= ratio.min() + 1e-12]
        return int(near[np.argmax(line[near])])

    def _pivot(self, row: int, column: int, falls: bool) -> None:
        leaving = self.basis[row]
        self.table[row] /= self.table[row, column]
        pivot = self.table[row]
        factor = self.table[:, column].copy()
        factor[row] = 0.0
        touched = np.flatnonzero(factor)
        self.table[touched] -= factor[touched, None] * pivot
        self.cost = self.cost - self.cost[column] * pivot
        self.cost[column] = 0.0
        self.basis[row] = column
        self.at_upper[leaving], self.at_upper[column] = falls, False

    def _found(self, value_K: FloatArray) -> Cover:
        drops = np.where(self.at_upper, self.upper, 0.0)
        drops[self.basis] = value_K
        drops_E = np.clip(drops[: self.experts], 0.0, self.upper[: self.experts])
        price_K = np.maximum(self.cost[self.experts :], 0.0)
        return Cover(drops_E=drops_E, total=float(drops_E.sum()), short=0.0, price_K=price_K)
