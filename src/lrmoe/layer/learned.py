"""What calls teach the planner, on the device until the next call's counts travel: nothing here waits for it.

    backward of a call   adds its scores to decayed sums per expert, its energy and added variance to what is unsent
    the next call        copies both into its message; all ranks read the same table and derive the same numbers

A rank sums over the pairs whose scores it sees: those of its home experts from all ranks, or (`selection="local"`) its
own pairs of all experts.

Shape letters: X experts that this rank sums for, F columns (planning.score_bins), M scored rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lrmoe.errors import ConfigError
from lrmoe.layer.scores import broken_rows, finite_scores
from lrmoe.ops import cpu
from lrmoe.planning.restore import value_of
from lrmoe.planning.score_bins import BINS, COLUMNS, LOWEST

_DECAY = 0.9  # of the sums over past pairs, at each call that has pairs of the expert
_FRACTION = 32  # bits below the point of sums on CUDA; 31 are left for the number of rows
_ROWS = 2048  # of an expert that a CPU reads: means and a coarse histogram need no more


def score_sums(score_M: Tensor, counts_X: Tensor) -> Tensor:
    """Sums over a call's finite scores, fp64 (X, COLUMNS).

    On a CPU, of an expert with more than 2048 rows every k-th, each counted k times.

    Args:
        score_M: fp32 (M,), expert after expert. counts_X: int64 (X,), rows of each.
    """
    if (found := cpu.score_sums(score_M, counts_X, most=_ROWS, bins=BINS, lowest=LOWEST)) is not None:
        return found
    if score_M.device.type == "cpu" and int(counts_X.max().item() if counts_X.numel() else 0) > _ROWS:
        thin_M, thin_X, every_X = _thinned(score_M, counts_X)
        return _sums(thin_M, thin_X) * every_X[:, None]
    return _sums(score_M, counts_X)


def _thinned(score_M: Tensor, counts_X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every k-th row of each expert, rows of each, and k (X,)."""
    parts = score_M.split(counts_X.tolist())
    every = [-(-part.shape[0] // _ROWS) or 1 for part in parts]
    thin = [part[::step] for part, step in zip(parts, every, strict=True)]
    rows = torch.tensor([part.shape[0] for part in thin], device="cpu")
    return torch.cat(thin), rows, torch.tensor(every, device="cpu")


def _sums(score_M: Tensor, counts_X: Tensor) -> Tensor:
    """Sums over all rows, fp64 (X, COLUMNS)."""
    experts, rows = counts_X.shape[0], score_M.shape[0]
    first_X = torch.arange(0, experts * BINS, BINS, dtype=torch.int32, device=score_M.device)
    first_M = first_X.repeat_interleave(counts_X, output_size=rows)
    broken_M = broken_rows(score_M)
    score = finite_scores(score_M, broken_M).double()
    pair_M = torch.ones_like(score) if broken_M is None else broken_M.logical_not().double()
    values = (pair_M, score, score.square())
    sums = torch.stack([torch.segment_reduce(v, "sum", lengths=counts_X, unsafe=True) for v in values])
    mean_X = sums[1] / sums[0].clamp(min=1)
    at_least = torch.where(mean_X > 0, mean_X, 1.0)
    relative = score.div_(at_least.repeat_interleave(counts_X, output_size=rows))
    octave = relative.frexp().exponent - (1 + LOWEST)
    place = octave.clamp_(0, BINS - 1).mul_(relative > 0).add_(first_M)
    by_bin = score.new_zeros((2, experts * BINS))
    by_bin[0].index_add_(0, place, pair_M)  # whole numbers: the same in any order
    _add_in_any_order(by_bin[1], place, relative)
    return torch.cat([sums.T, by_bin[0].view(experts, BINS), by_bin[1].view(experts, BINS)], dim=1)


def _add_in_any_order(total: Tensor, place_M: Tensor, value_M: Tensor) -> None:
    """Add values, whose sum is at most their number, to fp64 totals; CUDA, which has no order, adds multiples of 2^-32.

    Whole numbers add up to the same bits however they come, and repeated runs plan alike.
    """
    if value_M.device.type == "cpu":
        total.index_add_(0, place_M, value_M)
        return
    units_M = value_M.ldexp(torch.full_like(value_M, _FRACTION)).long()
    units = torch.zeros_like(total, dtype=torch.int64).index_add_(0, place_M, units_M)
    total.add_(units.double().ldexp_(torch.full_like(total, -_FRACTION)))


class Learned:
    """Decayed sums of scores, and what calls measured since the last message.

    Args:
        experts: X, 0 where nothing is learned (`topk` plans without scores).
        ranks: of the group, kept in the state: what a rank has not sent yet means nothing to another number of them.
        own: whether the sums are this rank's own part of every expert (`selection="local"`).

    Attributes:
        sums_XF: fp64 (X, COLUMNS), decayed sums. booked_2: fp64 (2,), added variance and energy not sent yet.
        calls, predicted: of the same calls, how many and the sum of their predictions (None: one had no history).
    """

    def __init__(self, experts: int, ranks: int, *, own: bool) -> None:
        self.ranks, self._own = ranks, own
        self.sums_XF = torch.zeros((experts, COLUMNS), dtype=torch.float64, device="cpu")
        self.calls = 0
        self.predicted: float | None = 0.0
        self.booked_2 = torch.zeros(2, dtype=torch.float64, device="cpu")

    @property
    def width(self) -> int:
        """Numbers in a message: the sums, booked calls, added variance, energy."""
        return self.sums_XF.numel() + 3

    def learn(self, score_M: Tensor, counts_X: Tensor) -> None:
        """Add a call's scores; see `score_sums`."""
        if not self.sums_XF.numel():
            return
        found = cpu.score_sums(
            score_M, counts_X, most=_ROWS, bins=BINS, lowest=LOWEST, past_XF=self.sums_XF, decay=_DECAY
        )
        if found is not None:
            self.sums_XF = found
            return
        fresh = score_sums(score_M, counts_X)
        old = self.sums_XF.to(fresh.device)
        seen = (fresh[:, :1] > 0) & (fresh[:, 1:2] > 0)
        self.sums_XF = torch.where(seen, _DECAY * old + fresh, old)

    def book(self, variance: Tensor, energy: Tensor, predicted: float | None) -> None:
        """Add a call's measured added variance and energy of this rank, and what was predicted of their ratio."""
        self.booked_2 = self.booked_2.to(energy.device) + torch.stack([variance, energy])
        self.calls += 1
        known = predicted is not None and self.predicted is not None
        self.predicted = (self.predicted or 0.0) + (predicted or 0.0) if known else None

    def message(self, device: torch.device) -> Tensor:
        """int64 (width,), bits of fp64 numbers."""
        calls = torch.full((1,), float(self.calls), dtype=torch.float64, device=device)
        # They stay where they are needed: a call that teaches nothing would copy them once more.
        self.sums_XF, self.booked_2 = self.sums_XF.to(device), self.booked_2.to(device)
        return torch.cat([self.sums_XF.reshape(-1), calls, self.booked_2]).view(torch.int64)

    def sent(self) -> None:
        """The message is out: a new count begins."""
        self.calls, self.predicted = 0, 0.0
        self.booked_2 = torch.zeros_like(self.booked_2)

    def state(self) -> dict[str, Any]:
        """JSON-able: `score_sums` by home expert, and under `own` what only this rank and these ranks can use."""
        own: dict[str, Any] = {
            "ranks": self.ranks,
            "calls": self.calls,
            "predicted": self.predicted,
            "booked": self.booked_2.tolist(),
        }
        if self._own:
            own["score_sums"] = self.sums_XF.tolist()
        return {"score_sums": [] if self._own else self.sums_XF.tolist(), "own": own}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave.

        A state of before, with `score_mean` by home expert only, gives the means; spreads are unknown until the next
        pruned call. Scores of another kind (`topk` had none, or other ranks knew their own pairs only) begin anew, and
        what other ranks than these left unsent is forgotten.

        Raises:
            ConfigError: a field is of another type, or the state of another number of experts; nothing is changed then.
        """
        own = state.get("own", {})
        if not isinstance(own, Mapping):
            raise ConfigError(f"own={own!r}: must be a table")
        same = own.get("ranks") == self.ranks
        unsent = _unsent(own) if same else None
        self.sums_XF = self._sums_of(state, own if same else {})
        self.sent()
        if unsent is not None:
            self.calls, self.predicted, self.booked_2 = unsent

    def lost(self, state: Mapping[str, Any]) -> str:
        """Why scores of a state that `load` takes begin anew; empty where they go on, or where there are none."""
        own = state.get("own")
        if not self.sums_XF.numel() or not isinstance(own, Mapping):
            return ""
        if own.get("score_sums") and not (self._own and own.get("ranks") == self.ranks):
            return (
                "scores of past calls begin anew: with selection='local' every rank knew those of its own pairs only, "
                f"and the number of ranks was {own.get('ranks')}"
            )
        if self._own and state.get("score_sums"):
            return "scores of past calls begin anew: they were kept by expert, and selection='local' keeps them by rank"
        return ""

    def _sums_of(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> Tensor:
        """Sums that a state holds for this rank, fp64 (X, COLUMNS); zeros where it holds none."""
        fresh = torch.zeros_like(self.sums_XF, device="cpu")
        if not self._own and "score_sums" not in state:
            mean_X = _numbers(state["score_mean"], "score_mean")
            known = torch.stack([(mean_X > 0).double(), mean_X, mean_X * mean_X], dim=-1)
            found = torch.cat([known, known.new_zeros(*mean_X.shape, 2 * BINS)], dim=-1)
        else:
            found = _numbers((own if self._own else state).get("score_sums", []), "score_sums")
        if not found.numel() or not fresh.numel():
            return fresh
        if found.shape != fresh.shape:
            raise ConfigError(
                f"score_sums is {tuple(found.shape)}: (experts, columns) on this rank are {tuple(fresh.shape)}"
            )
        return found


def _unsent(own: Mapping[str, Any]) -> tuple[int, float | None, Tensor]:
    """What a rank had booked and not sent: calls, prediction, added variance and energy."""
    calls, predicted = value_of(int, own.get("calls"), "own.calls"), own.get("predicted")
    if predicted is not None:
        predicted = value_of(float, predicted, "own.predicted")
    booked = _numbers(own.get("booked"), "own.booked")
    if booked.shape != (2,):
        raise ConfigError(f"own.booked is {tuple(booked.shape)}: must be two numbers")
    return calls, predicted, booked


def _numbers(value: Any, where: str) -> Tensor:
    """A list of numbers, or of as long lists of them, in fp64."""
    try:
        if isinstance(value, list):
            return torch.tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: must be lists of numbers: {error}") from error
    raise ConfigError(f"{where}={value!r}: must be a list of numbers")
