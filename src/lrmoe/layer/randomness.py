"""Counter-based randomness: numbers are a function of (seed, layer, step, micro-batch, expert), never of a state.

Evaluation and recomputation therefore cannot advance anything, and all ranks draw the same. The mixing function is
SplitMix64's finaliser (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UNIT_BITS = 32
UNIT = 1 << UNIT_BITS  # fixed-point one

_WORD = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)

_U64 = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Key:
    """Names one stream of random numbers: a layer call, and (through `salt`) a purpose within it."""

    seed: int
    layer: int
    step: int
    micro_batch: int
    salt: int = 0

    def words(self, experts: NDArray[np.int64]) -> _U64:
        """One 64-bit word per expert, uint64, same shape as `experts`."""
        state = 0
        for part in (self.seed, self.layer, self.step, self.micro_batch, self.salt):
            state = _mix_one(state + int(_GOLDEN) + part)
        return _mix(experts.astype(np.uint64) + np.uint64((state + int(_GOLDEN)) & _WORD))

    def offsets(self, experts: NDArray[np.int64]) -> NDArray[np.int64]:
        """One fixed-point number in [0, 1) per expert: int64 in [0, UNIT)."""
        return offsets_of(self.words(experts))


def offsets_of(words: _U64) -> NDArray[np.int64]:
    """Words as fixed-point numbers: int64 in [0, UNIT)."""
    return (words >> np.uint64(64 - UNIT_BITS)).astype(np.int64)


def _mix_one(z: int) -> int:
    """`_mix` of one number, modulo 2**64."""
    z &= _WORD
    z = (z ^ (z >> 30)) * int(_MIX1) & _WORD
    z = (z ^ (z >> 27)) * int(_MIX2) & _WORD
    return z ^ (z >> 31)


def _mix(z: _U64) -> _U64:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def uniform_rows(word_N: Tensor, position_N: Tensor) -> Tensor:
    """One number in (0, 1] per row, fp32 (N,), from the row's stream word and its position in the stream.

    Args:
        word_N, position_N: int64 (N,).
    """
    z = word_N + position_N * _signed(int(_GOLDEN))
    z = (z ^ _shift(z, 30)) * _signed(int(_MIX1))
    z = (z ^ _shift(z, 27)) * _signed(int(_MIX2))
    z = z ^ _shift(z, 31)
    return (_shift(z, 40) + 1).float() / 2**24


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return torch.bitwise_right_shift(z, bits) & ((1 << (64 - bits)) - 1)
