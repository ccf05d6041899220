"""Compile the kernels that choose rows and multiply segments for Hopper, as `compiling` does.

Arguments: names of cases; all of them by default.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from lrmoe.ops.triton import grouped, select
from lrmoe.ops.units import Units
from tests.ops.triton.compiling import Call, report

UNITS = Units(unit_bits=32, score_bits=30, broken=2**40, floor=1e-3)
WIDTH, INNER, EXPERTS = 2048, 1536, 128


def select_cases(rows_each: int) -> Iterator[tuple[str, Call]]:
    """Choices among an average expert's rows."""
    score, table_L = torch.empty(EXPERTS * rows_each), torch.full((EXPERTS,), rows_each)
    yield f"top {rows_each}", partial(select.keep_top, score, table_L, table_L)
    yield f"sampled {rows_each}", partial(select.keep_sampled, score, table_L, table_L, table_L, UNITS)
    yield f"inclusion {rows_each}", partial(select.inclusion, score, table_L, table_L, UNITS)


def product_cases(dtype: torch.dtype, counts: list[int], width: int) -> Iterator[tuple[str, Call]]:
    """Products of two segments."""
    name, total, inner = f"{str(dtype).removeprefix('torch.')} {counts[0]} x {width}", sum(counts), INNER
    rows, grad = torch.empty(total, width, dtype=dtype), torch.empty(total, inner, dtype=dtype)
    weight, index = torch.empty(len(counts), inner, width, dtype=dtype), torch.arange(total)
    across, product = weight.transpose(1, 2), grouped.grouped_mm
    yield f"{name}, forward", partial(product, rows, across, counts, out=grad)
    yield f"{name}, gathered", partial(product, rows, across, counts, out=grad, index_N=index, place_N=index)
    yield f"{name}, input", partial(product, grad, weight, counts, out=rows)
    yield f"{name}, weight", partial(grouped.grouped_mm_weight, grad, rows, counts, out=weight)
    yield (
        f"{name}, weight gathered",
        partial(
            grouped.grouped_mm_weight, grad, rows, counts, out=weight.float(), add=True, index_N=index,
            grad_index_N=index,
        ),
    )  # fmt: skip


def other_numbers(segments: int) -> Iterator[tuple[str, Call]]:
    """The same products of more segments, and so of more tiles."""
    cases = dict(product_cases(torch.bfloat16, [300] * segments, WIDTH))
    for name in ("gathered", "weight gathered"):
        yield f"{name}, {segments} segments", cases[f"bfloat16 300 x {WIDTH}, {name}"]


def main(wanted: list[str]) -> None:
    """The cases of these names."""
    cases = [
        *select_cases(900),
        *select_cases(100),
        *product_cases(torch.bfloat16, [300, 300], WIDTH),
        *product_cases(torch.bfloat16, [7, 9], WIDTH),
        *product_cases(torch.float16, [300, 300], WIDTH),
        *product_cases(torch.float32, [300, 300], WIDTH),
        *product_cases(torch.bfloat16, [300, 300], 1),
        *product_cases(torch.bfloat16, [1], 33),
        *other_numbers(16),
    ]
    report((name, call) for name, call in cases if not wanted or name in wanted)


if __name__ == "__main__":
    main(sys.argv[1:])
