"""What one rank really does in a replayed call: pack, grouped products, unpack, forward and backward.

Rows run in blocks that stay in cache, with the layer's own experts. After selection the kept rows of the stash are
packed block by block and what is left out is freed, before gradient rows arrive.

Shape letters: T tokens, H hidden, I expert width, N pairs of a source, M rows of a rank, P kept pairs of a source,
S weight slots of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrmoe.layer import experts
from lrmoe.layer.experts import Rows, WeightGrads, Weights, experts_backward, experts_forward
from lrmoe.layer.routing import token_entries
from lrmoe.ops import Workspace, combine, gather_rows
from lrmoe.planning.problem import IntArray
from lrmoe.simulate.replay_data import Data
from lrmoe.simulate.replay_memory import Held
from lrmoe.simulate.replay_routes import Backward, Wire
from lrmoe.simulate.replay_times import Times

BLOCK_ROWS = {"cpu": 4096, "cuda": 131072}
ACTIVATION = "silu"

_scratch = Workspace()


def release_scratch() -> None:
    """Give scratch back, so that the next run allocates what it needs."""
    _scratch.release()
    experts.release_scratch()


@dataclass(frozen=True)
class Block:
    """Consecutive rows: `at` among the rank's rows, `seats` that they belong to, rows of each of them."""

    seats: slice
    at: slice
    counts: tuple[int, ...]


def cut(segments: Sequence[int], limit: int) -> Iterator[Block]:
    """Cut rows, seat after seat, into blocks of `limit` rows (the last may have fewer)."""
    ends = np.cumsum(np.asarray(segments, dtype=np.int64))
    total = int(ends[-1]) if len(ends) else 0
    for begin in range(0, total, limit):
        end = min(begin + limit, total)
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(ends, end, side="left"))
        inside = np.clip(ends[first : last + 1], begin, end)
        yield Block(slice(first, last + 1), slice(begin, end), tuple(np.diff(inside, prepend=begin).tolist()))


class Rank:
    """One rank's call: `forward`, then `backward`.

    Attributes:
        held: bytes it holds. y_MH, norm_M: of the last forward, rows in received order, norms in (seat, source, token)
            order. grads: fp32 weight gradients of its seats after backward. dx: input gradients of its rows in
            received order, of pairs that stay and that move. unpacked: the most bytes held in backward, had the whole
            stash stayed.
    """

    def __init__(self, data: Data, forward: Wire, rank: int, slots: int, times: Times) -> None:
        self._data, self._wire, self._rank, self._times = data, forward, rank, times
        self._source = data.sources[rank]
        self.y_MH: Tensor | None = None
        self.norm_M: Tensor | None = None
        self._place: Tensor | None = None
        self.held = Held()
        seats = forward.seats
        held = torch.from_numpy(seats.expert_Q[seats.of(rank)]).to(data.device)
        self._gate_up = data.gate_up.new_empty((slots, *data.gate_up.shape[1:]))
        self._down = data.down.new_empty((slots, *data.down.shape[1:]))
        torch.index_select(data.gate_up, 0, held, out=self._gate_up[: len(held)])
        torch.index_select(data.down, 0, held, out=self._down[: len(held)])
        self.held.add("weights", self._gate_up, self._down)

    def _limit(self) -> int:
        return BLOCK_ROWS[self._data.device.type]

    def _placed(self) -> Tensor:
        assert self._place is not None, "inputs lie in received order until they are packed"
        return self._place

    def _weights(self, seats: slice) -> Weights:
        return Weights(gate_up=self._gate_up[seats], down=self._down[seats], activation=ACTIVATION)

    def forward(self, *, norms: bool) -> None:
        """pack -> dispatch (handed over) -> experts -> combine."""
        data, wire, rank, held = self._data, self._wire, self._rank, self.held
        pair_N = wire.pair_R[rank]
        with self._times.phase("forward", rank, "pack"):
            send = self._pack(self._source.x_TH, pair_N // data.slots)
        held.add("send", send)
        self._x = wire.receive(rank, [s.x_TH for s in data.sources], data.slots)
        held.add("dispatched", self._x)
        held.drop("send")
        with self._times.phase("forward", rank, "experts"):
            y_MH = self._experts(norms)
        held.add("stash", *self._h)
        held.add("outputs", y_MH)
        self.y_MH, y_NH = y_MH, _home(y_MH, len(pair_N))
        held.add("outputs", y_NH)
        with self._times.phase("forward", rank, "combine"):
            self._sum(y_NH, pair_N, self._source.alpha_TK)
        held.drop("outputs")

    def _experts(self, norms: bool) -> Tensor:
        """All rows through their experts, block after block; the stash of each block is kept."""
        place = self._wire.place(self._rank, self._data.device)
        y_MH, norm = torch.empty_like(self._x), []
        self._blocks, self._h = list(cut(self._wire.segments(self._rank), self._limit())), []
        for block in self._blocks:
            h, norm_B = experts_forward(
                self._weights(block.seats),
                Rows(source=self._x, index_M=place[block.at]),
                block.counts,
                out=y_MH,
                out_index=place[block.at],
                stash=True,
                norms=norms,
            )
            self._h += [] if h is None else [h]
            norm += [] if norm_B is None else [norm_B]
        self._place, self.norm_M = place, torch.cat(norm) if norm else None
        return y_MH

    def backward(self, kept: Backward) -> None:
        """Pack kept rows of stash and gradients, exchange (handed over), experts' backward, return."""
        data, rank, held, times = self._data, self._rank, self.held, self._times
        self.y_MH = self.norm_M = None
        held.restart()
        before = held.size("stash", "dispatched")
        if kept.kept_R is not None:
            with times.phase("backward", rank, "positions"):
                position_M, ends = self._positions(kept)
            with times.phase("backward", rank, "pack_stash"):
                self._compact(position_M, ends)
        wires = [wire for wire in (kept.stay, kept.moved) if wire is kept.stay or wire.counts_RQ.any()]
        pair_P = torch.cat([wire.pair_R[rank] for wire in wires])
        with times.phase("backward", rank, "pack"):
            send = self._pack(self._source.g_TH, pair_P // data.slots)
            again = self._pack_again(kept.moved)
        held.add("send", send, *again)
        ready = [self._arrive(wire, wire is kept.moved) for wire in wires]
        held.drop("send")
        self._accumulate_into()
        self.dx = [torch.empty_like(g) for g, *_ in ready]
        held.add("backward", *self.dx)
        with times.phase("backward", rank, "experts_backward"):
            self.dot = [
                self._run(wire, *one, dx) for wire, one, dx in zip(wires, ready, self.dx, strict=True)
            ]
        del ready
        held.replace("backward", *self.dx)
        dx_PH = _home(send, len(pair_P))
        held.add("backward", dx_PH)
        with times.phase("backward", rank, "return"):
            self._sum(dx_PH, pair_P, None)
            self._return_alpha(pair_P)
        self.unpacked = held.most + before - held.size("stash", "dispatched")

    def add_home(self, copies: int) -> None:
        """Add so many experts' gradients, as foreign seats send them home, to fp32 sums: their home's part."""
        if not copies:
            return
        total, arriving = ([torch.ones_like(grad[:1]) for grad in self.grads] for _ in range(2))
        with self._times.phase("backward", self._rank, "replicas"):
            for _ in range(copies):
                for into, grad in zip(total, arriving, strict=True):
                    into.add_(grad)

    def _pack(self, table_TH: Tensor, token_N: Tensor) -> Tensor:
        out = _scratch.take("send", (len(token_N), table_TH.shape[1]), table_TH)
        return gather_rows(table_TH, token_N, out=out)

    def _pack_again(self, moved: Wire) -> list[Tensor]:
        """Inputs of pairs that move: they are computed again where they go."""
        pair = moved.pair_R[self._rank]
        return [gather_rows(self._source.x_TH, pair // self._data.slots)] if len(pair) else []

    def _positions(self, kept: Backward) -> tuple[Tensor, IntArray]:
        """Kept rows among the rank's rows, int64 (Q,), and how many lie before each end of a block or seat."""
        assert kept.kept_R is not None
        mask_M = torch.cat(self._wire.part(self._rank, kept.kept_R))[self._placed()]
        position = mask_M.nonzero()[:, 0]
        ends = torch.tensor([block.at.stop for block in self._blocks], dtype=torch.int64)
        return position, torch.searchsorted(position, ends.to(position.device)).cpu().numpy()

    def _compact(self, position_M: Tensor, ends: IntArray) -> None:
        """Keep the kept rows of stash and inputs; one block's left-out rows are freed before the next is packed."""
        begin = 0
        for i, (block, end) in enumerate(zip(self._blocks, ends.tolist(), strict=True)):
            self._h[i] = gather_rows(self._h[i], position_M[begin:end] - block.at.start)
            self.held.replace("stash", *self._h)
            begin = end
        x = gather_rows(self._x, self._placed()[position_M])
        self.held.add("dispatched", x)
        self._x, self._place = x, None
        self.held.replace("dispatched", x)

    def _arrive(self, wire: Wire, again: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradient rows, their scales in (seat, source, token) order, the order itself, and inputs sent again."""
        data, rank = self._data, self._rank
        g = wire.receive(rank, [s.g_TH for s in data.sources], data.slots)
        place = wire.place(rank, data.device)
        scale = wire.receive_scale(rank, [s.alpha_TK for s in data.sources])[place]
        x = wire.receive(rank, [s.x_TH for s in data.sources], data.slots) if again else None
        self.held.add("backward", g, *([] if x is None else [x]))
        return g, scale, place, x

    def _accumulate_into(self) -> None:
        self.grads = tuple(
            torch.zeros(w.shape, dtype=_sum_dtype(w), device=w.device) for w in (self._gate_up, self._down)
        )
        self.held.add("grads", *self.grads)

    def _run(
        self, wire: Wire, g: Tensor, scale: Tensor, place: Tensor, again: Tensor | None, dx: Tensor
    ) -> Tensor:
        """Experts' backward, block after block; the dot products of the rows with their outputs' gradients."""
        dots = []
        for block, x, h in self._kept_blocks(wire, place, again):
            into = WeightGrads(gate_up=self.grads[0][block.seats], down=self.grads[1][block.seats])
            dot = experts_backward(
                self._weights(block.seats), x, h, Rows(source=g, index_M=place[block.at]), scale[block.at],
                block.counts, dx=dx, dx_index=place[block.at], grads=into, add=True,
            )  # fmt: skip
            dots.append(dot)
        return torch.cat(dots) if dots else scale

    def _kept_blocks(
        self, wire: Wire, place: Tensor, again: Tensor | None
    ) -> Iterator[tuple[Block, Rows, Rows | None]]:
        """Blocks of kept rows with inputs and stash: as they lie, compacted, or inputs alone."""
        segments = wire.segments(self._rank)
        if again is not None:
            for block in cut(segments, self._limit()):
                yield block, Rows(source=again, index_M=place[block.at]), None
            return
        begin = 0
        for h in self._h:
            block = _between(segments, begin, begin + len(h))
            begin += len(h)
            if not len(h):
                continue
            index = None if self._place is None else self._place[block.at]
            source = self._x if index is not None else self._x[block.at]
            yield block, Rows(source=source, index_M=index), Rows(source=h, index_M=None)

    def _sum(self, rows: Tensor, pair_P: Tensor, alpha_TK: Tensor | None) -> Tensor:
        """Rows that came home, summed per token; weighed where routing weights are given."""
        tokens, slots = self._source.ids_TK.shape
        entries = token_entries(pair_P, tokens, slots)
        weight = None if alpha_TK is None else alpha_TK.reshape(-1)[entries.pair_N]
        return combine(rows, entries.row_N, entries.ends_T, weight)

    def _return_alpha(self, pair_P: Tensor) -> Tensor:
        """Gradient of the routing weights of kept pairs, from one number per pair that comes home."""
        grad = torch.zeros(self._source.alpha_TK.numel(), device=pair_P.device)
        grad[pair_P] = torch.ones(len(pair_P), device=pair_P.device)
        return grad


def _between(segments: Sequence[int], begin: int, end: int) -> Block:
    """Rows begin..end as a block."""
    ends = np.cumsum(np.asarray(segments, dtype=np.int64))
    first = int(np.searchsorted(ends, begin, side="right"))
    last = max(int(np.searchsorted(ends, end, side="left")), first)
    inside = np.clip(ends[first : last + 1], begin, end)
    return Block(slice(first, last + 1), slice(begin, end), tuple(np.diff(inside, prepend=begin).tolist()))


def _home(like: Tensor, rows: int) -> Tensor:
    """Stands for rows that came home: of the right size, every page written, values that nobody reads."""
    return like.new_full((rows, like.shape[1]), 0.5)


def _sum_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
