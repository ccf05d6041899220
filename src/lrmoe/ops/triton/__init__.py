"""Triton kernels of the data plane, each with the signature of the function in `lrmoe.ops` whose work it does.

Importing this package loads no triton: `rows` and `activation` do, and are imported where a tensor first needs them.
`lrmoe.ops` calls a kernel where `usable` has nothing against it and computes with torch elsewhere.

Every kernel gives the same bits for the same row whatever rows lie beside it, and again when it runs again: no
atomics, and tiles that depend on the width alone. Only grouped products take tiles by the mean length of segments.

Arguments of a kernel are annotated `tl.tensor` or `tl.constexpr`, numbers too: triton would take `int` for 32 bits.
"""

from lrmoe.ops.triton.launch import Tile, interpreted, missing, off, on, tile, usable

__all__ = ["Tile", "interpreted", "missing", "off", "on", "tile", "usable"]
