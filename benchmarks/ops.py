"""Each op against its plain form, side by side in one run; about a minute on two cores.

Counts and sizes are those of benchmarks/layer.py (hidden 512, expert width 192, 32 experts, top-8, 4096 tokens). The
plain form of the grouped products is torch's grouped_mm, of the others the eager expression a model would contain.

    python benchmarks/ops.py --json

Names: ops.<op>.<fp32|bf16>.over_plain: median of per-round ratios, below 1 is faster.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from itertools import accumulate

import command_line
import torch
import torch.nn.functional as F
from layer_variants import DTYPES, Case, make_data
from rounds import measure, ratios, spread
from torch import Tensor

from lrmoe import ops
from lrmoe.telemetry import figure

Run = Callable[[], object]


def grouped(rows: Tensor, grad: Tensor, weight: Tensor, counts: list[int]) -> dict[str, tuple[Run, Run]]:
    """Forward, input gradient and weight gradient of one grouped projection (rows (N, A), weight (S, B, A))."""
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
    out, back, d_weight = torch.empty_like(grad), torch.empty_like(rows), torch.empty_like(weight)
    return {
        "grouped_mm": (
            lambda: ops.grouped_mm(rows, weight, counts, out=out),
            lambda: F.grouped_mm(rows, weight.transpose(1, 2), offs=ends),
        ),
        "grouped_mm_input": (
            lambda: ops.grouped_mm_input(grad, weight, counts, out=back),
            lambda: F.grouped_mm(grad, weight, offs=ends),
        ),
        "grouped_mm_weight": (
            lambda: ops.grouped_mm_weight(grad, rows, counts, out=d_weight),
            lambda: F.grouped_mm(grad.t(), rows, offs=ends),
        ),
    }


def elementwise(h: Tensor, scale: Tensor) -> dict[str, tuple[Run, Run]]:
    """Gated activation, forward and backward (h (N, 2I)); the plain backward is autograd's."""
    width = h.shape[1] // 2
    phi, dh = torch.empty_like(h[:, :width]).contiguous(), torch.empty_like(h)
    leaf, upstream = h.clone().requires_grad_(), torch.ones_like(phi)

    def plain() -> Tensor:
        gate, up = leaf.chunk(2, dim=1)
        return F.silu(gate) * up

    def plain_backward() -> None:
        leaf.grad = None
        plain().backward(upstream * scale.to(h.dtype).unsqueeze(1))

    return {
        "gated_activation": (lambda: ops.gated_activation(h, "silu", out=phi), plain),
        "gated_activation_backward": (
            lambda: ops.gated_activation_backward(upstream.clone(), h, scale, "silu", out=dh),
            plain_backward,
        ),
    }


def moves(x: Tensor, rows: Tensor, order: Tensor, alpha: Tensor, top_k: int) -> dict[str, tuple[Run, Run]]:
    """Pack (gather rows by index) and combine (weighted sum per token) of x (T, H) and rows (N, H)."""
    tokens, token = x.shape[0], order // top_k
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    ends = torch.arange(1, tokens + 1) * top_k
    buffer = torch.empty_like(rows)
    return {
        "gather_rows": (lambda: ops.gather_rows(x, token, out=buffer), lambda: x[token]),
        "combine": (
            lambda: ops.combine(rows, back, ends, alpha),
            lambda: (rows[back] * alpha.unsqueeze(1)).view(tokens, top_k, -1).sum(1),
        ),
    }


def cases(case: Case, dtype: torch.dtype, seed: int) -> dict[str, tuple[Run, Run]]:
    """(ours, plain) of every op at the sizes of the layer benchmark."""
    data = make_data(case, dtype, seed)
    order = torch.sort(data.ids.reshape(-1), stable=True).indices
    counts = torch.bincount(data.ids.reshape(-1), minlength=case.experts).tolist()
    x, gate_up = data.x.detach(), data.gate_up.detach()
    rows, h = x[order // case.top_k], torch.randn(len(order), 2 * case.width).to(dtype)
    scale = torch.rand(len(order))
    return {
        **grouped(rows, h, gate_up, counts),
        **elementwise(h, scale),
        **moves(x, rows, order, scale.to(dtype), case.top_k),
    }


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    for name, dtype in DTYPES.items():
        for op, (ours, plain) in cases(Case(), dtype, args.seed).items():
            times = measure({"ours": ours, "plain": plain}, args.rounds, f"{name} {op}")
            found = ratios(times, "ours", "plain")
            value, about = round(statistics.median(found), 4), {"spread": round(spread(found), 4)}
            row = figure(f"ops.{op}.{name}.over_plain", value, "ratio", "lower", seed=args.seed, **about)
            print(json.dumps(row) if args.json else f"{row['name']:48} {value:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
