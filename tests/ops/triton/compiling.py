"""Compile every kernel for Hopper down to machine code, without a GPU, as a launch on one would: a program of its own.

Prints one JSON line per compiled variant: kernel, case, registers a thread, bytes of spills a thread, and how many
bytes its widest load and store move.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from lrmoe.ops.triton import activation, rows

WIDTH, MANY = 768, 128
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
Call = Callable[[], object]


class Hopper:
    """What triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def row_cases(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Rows as the layer has them."""
    index, ends, scale = torch.arange(MANY), torch.arange(1, MANY + 1), torch.ones(MANY)
    wide = torch.empty(MANY, 2 * WIDTH, dtype=dtype)
    yield "gather", partial(rows.gather_rows, wide, index)
    yield "gather, scaled", partial(rows.gather_rows, wide, index, scale_N=scale)
    yield "place", partial(rows.place_rows, wide, index, wide)
    yield "combine", partial(rows.combine, wide, index, ends)
    yield "combine, weighted", partial(rows.combine, wide, index, ends, scale)
    yield "norms", partial(rows.row_norms, wide)
    yield "sums", partial(rows.abs_sums, wide)


def activation_cases(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Forward with norms, backward."""
    h, dphi = torch.empty(MANY, 2 * WIDTH, dtype=dtype), torch.empty(MANY, WIDTH, dtype=dtype)
    scale = torch.ones(MANY)
    for kind in ("silu", "gelu", "gelu_tanh"):
        yield f"{kind}", partial(activation.gated_activation, h, kind, norm_N=scale)
        yield f"{kind}, backward", partial(activation.gated_activation_backward, dphi, h, scale, kind)


def odd_cases() -> Iterator[tuple[str, Call]]:
    """Rows that start anywhere, one column, and a stride past 32 bits: each is another variant; one row is none."""
    odd = torch.empty(MANY, 2 * WIDTH + 2, dtype=torch.bfloat16)[:, 1:-1]
    yield "odd, misaligned", partial(rows.gather_rows, odd, torch.arange(MANY))
    yield "odd, one row", partial(rows.gather_rows, odd, torch.zeros(1, dtype=torch.int64))
    one = torch.empty(MANY, 2, dtype=torch.bfloat16)
    yield "odd, one column", partial(activation.gated_activation, one, "silu")
    far = torch.empty(2**32 + WIDTH, dtype=torch.bfloat16).as_strided((2, WIDTH), (2**32, 1))
    yield "odd, far", partial(rows.gather_rows, far, torch.arange(2))


def usage(kernel: Any) -> dict[str, int]:
    """Registers, spills and widest accesses of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "threads": 32 * kernel.metadata.num_warps,
        "load": widest(kernel.asm["ptx"], "ld"),
        "store": widest(kernel.asm["ptx"], "st"),
        "fused_fp64": "fma.rn.f64" in kernel.asm["ptx"],
        "tensor_cores": "wgmma" in kernel.asm["ptx"],
        "copies": sorted(
            set(re.findall(r"cp\.async\.c[ag]\.shared\.global .*, 0x(\d+),", kernel.asm["ptx"]))
        ),
    }


def widest(ptx: str, operation: str) -> int:
    """Bytes of the widest global access of a thread."""
    found = re.findall(rf"{operation}\.global[.\w:]*?(?:\.v(\d))?\.[bfus](\d+)", ptx)
    return max((int(count or 1) * int(bits) // 8 for count, bits in found), default=0)


def report(cases: Iterable[tuple[str, Call]]) -> None:
    """Compile instead of launching, wherever a kernel is launched, and print what came out."""
    driver.set_active(Hopper())
    compiled: list[Any] = []

    def collect(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **named: compiled.append(kernel.warmup(*args, grid=grid, **named))

    JITFunction.__getitem__ = collect
    for name, call in cases:
        compiled.clear()
        call()
        for kernel in compiled:
            print(json.dumps({"case": name, "kernel": kernel.name, "variant": kernel.hash} | usage(kernel)))


def main() -> None:
    """All cases of kernels that work on rows."""
    report(
        [
            *row_cases(torch.bfloat16),
            *activation_cases(torch.bfloat16),
            *((f"fp32 {name}", call) for name, call in activation_cases(torch.float32) if "backward" in name),
            *odd_cases(),
        ]
    )


if __name__ == "__main__":
    main()
