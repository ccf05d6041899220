"""Fixed-point numbers of the sampled estimator, for whoever computes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Units:
    """Fixed-point numbers of the sampled estimator.

    Attributes:
        unit_bits: a probability of 1 is 2**unit_bits. score_bits: the largest score of an expert is 2**score_bits.
        broken: size of a row of non-finite score. floor: least score over the expert's mean.
    """

    unit_bits: int
    score_bits: int
    broken: int
    floor: float
