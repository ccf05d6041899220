"""What is expected of an H200, from rooflines: written down before it was measured, to be printed beside what is.

A layer's time is that of its matrix products, plus that of every pass over rows outside them, one after the other. A
matrix product takes the longer of its operations at the rate that large grouped products reach and of its bytes; a
pass over rows takes its bytes. Host time is taken to be hidden behind the device's, which is a hope.

Assumed: 989 TFLOP/s dense bf16 and 4.8 TB/s by the datasheet; grouped products reach 65 % of the one, passes over rows
75 % of the other. Launches cost 4 us, plans 0.3 ms a call before anything of it is queued.

Shape letters: T tokens, K experts per token, E experts, H hidden, I expert width, N rows (pairs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plain import Shape

PEAK_FLOPS, PEAK_BYTES = 989e12, 4.8e12
REACHED_FLOPS, REACHED_BYTES = 0.65, 0.75
LAUNCH_S, PLAN_S = 4e-6, 3e-4
SIZE = 2  # bytes of an element in bf16
LAUNCHES = 60  # of a forward and backward, products and index arithmetic together


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations and bytes of something that runs on the device by itself."""

    flops: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """The longer of both."""
        return max(self.flops / (REACHED_FLOPS * PEAK_FLOPS), self.bytes / (REACHED_BYTES * PEAK_BYTES))


def products(shape: Shape, share: float, *, forward: bool = True) -> list[Work]:
    """The grouped products of forward, and those of backward over a share of the rows."""
    rows = shape.tokens * shape.top_k
    up, down = (shape.hidden, 2 * shape.width), (shape.width, shape.hidden)
    found = [_product(shape, rows, *sizes) for sizes in (up, down)] if forward else []
    for sizes in (up, down):  # gradient of the rows, and of the weights
        found += 2 * [_product(shape, share * rows, *sizes)]
    return found


def _product(shape: Shape, rows: float, a: int, b: int) -> Work:
    return Work(flops=2 * rows * a * b, bytes=SIZE * (rows * (a + b) + shape.experts * a * b))


def passes(shape: Shape, share: float) -> list[Work]:
    """What the layer does to rows beside the products: stash kept, kernels that fuse activation, norms and scaling."""
    rows, hidden, width = shape.tokens * shape.top_k, shape.hidden, shape.width
    kept, tokens = share * rows, shape.tokens
    forward = [
        2 * rows * hidden,  # pack
        3 * rows * width,  # activation and norms
        2 * rows * hidden + tokens * hidden,  # outputs back in pair order, their weighted sum
    ]
    backward = [
        tokens * hidden,  # norms of the gradient
        2 * kept * hidden,  # pack gradients
        2 * kept * hidden,  # pack inputs again
        (0 if share == 1 else 4 * kept * width),  # first projections of the kept rows
        6 * kept * width,  # activation backward
        2 * kept * hidden + tokens * hidden,  # input gradients
    ]
    return [Work(bytes=SIZE * elements) for elements in (*forward, *backward)]


def peer_passes(shape: Shape) -> list[Work]:
    """What transformers' grouped_mm does to rows beside the same products: every step one operation of its own."""
    rows, hidden, width = shape.tokens * shape.top_k, shape.hidden, shape.width
    elements = [
        2 * rows * hidden,  # sorted by expert
        (2 + 3) * rows * width,  # silu, then the product
        2 * rows * hidden,  # times routing weights
        3 * rows * hidden,  # back in order, then the sum over slots
        3 * rows * hidden,  # backward: the sum's gradient for every slot, in expert order
        6 * rows * hidden,  # of the product with routing weights
        10 * rows * width,  # of the activation
        (2 * rows + 2 * rows) * hidden,  # of the gather, summed by token
    ]
    return [Work(bytes=SIZE * count) for count in elements]


def _ms(works: Sequence[Work]) -> float:
    return 1e3 * sum(work.seconds for work in works)


def expected(shapes: Mapping[str, Shape], drops: Sequence[float]) -> dict[str, float]:
    """Figure (as gpu_check.py names it) -> value."""
    return {name: value for model, shape in shapes.items() for name, value in _of_model(model, shape, drops)}


def _of_model(model: str, shape: Shape, drops: Sequence[float]) -> Iterator[tuple[str, float]]:
    fixed = 1e3 * (PLAN_S + LAUNCHES * LAUNCH_S)
    layer = {drop: _ms(products(shape, 1 - drop)) + _ms(passes(shape, 1 - drop)) + fixed for drop in drops}
    gemms = _ms(products(shape, 1.0))
    peer = gemms + _ms(peer_passes(shape)) + 1e3 * LAUNCHES * LAUNCH_S
    yield f"{model}.gemms.ms", gemms
    yield f"{model}.transformers_grouped_mm.ms", peer
    for drop, value in layer.items():
        yield f"{model}.drop{drop:g}.ms", value
        yield f"{model}.drop{drop:g}.over_grouped_mm", value / peer
        if drop:
            yield f"{model}.drop{drop:g}.over_drop0", value / layer[0.0]
    yield f"{model}.drop0.over_gemms", layer[0.0] / gemms
    for name in ("pack", "activation", "activation_backward", "combine", "norms"):
        yield f"{model}.pass.{name}.ops.rate", REACHED_BYTES * PEAK_BYTES / 1e9
