"""What `gpu_check.py` consists of: parts that run one after the other, each by itself.

A part is named by its section, then by what it is about: `ops.bf16`, `cases.u07`, `layer.qwen3_30b_a3b.times`. Checks
come before times, one model after the other, so that what a time limit cuts off is what matters least.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from gpu_cases import CASES
from gpu_expected import expected
from gpu_kernels import check_chosen, check_kernels
from gpu_layer import DROPS, MODELS, TINY, check_layer, time_layer
from gpu_ops import check_ops
from gpu_passes import time_passes
from gpu_products import time_products
from gpu_replay import SIZES, expected_replay, time_replay
from gpu_report import NAMES, Report
from plain import Shape

SECTIONS = ("ops", "kernels", "cases", "layer", "replay")
SMALL = Shape(tokens=192, hidden=64, width=48, experts=8, top_k=2, repeats=1)
CHECK = Shape(tokens=2048, hidden=512, width=384, experts=32, top_k=8, repeats=1)
LARGE = 4096  # tokens of a check at a model's own sizes: float64 copies of its experts have to fit as well
Part = Callable[[Report, torch.device, int], None]
# Seconds that a part is given on CUDA before it is taken to hang; where a third of them is not left it is not begun.
# Guesses with room, since nothing has been timed: a part's first seconds are compilation and loading of kernels.
USUAL_S = 45.0
SECONDS: Mapping[str, float] = MappingProxyType({"check": 60.0, "times": 75.0, "replay": 75.0})


class Lost(RuntimeError):
    """The device answers nothing any more: a process that has seen that can do nothing with it."""


def parts(device: torch.device) -> dict[str, Part]:
    """Name -> part, in the order in which they run."""
    return dict(_parts(device))


def _parts(device: torch.device) -> Iterator[tuple[str, Part]]:
    cuda = device.type == "cuda"
    shape = CHECK if cuda else SMALL
    for dtype, name in NAMES.items():
        yield f"ops.{name}", _with(check_ops, shape, dtype)
    for dtype, name in NAMES.items():
        yield f"kernels.{name}", _with(check_kernels, shape, dtype)
    yield "kernels.select", _with(check_chosen, shape)
    for case, check in CASES.items():
        yield f"cases.{case.lower()}", check
    for dtype, name in NAMES.items():
        yield f"layer.small.{name}", _with(check_layer, "small", shape, dtype)
    models = MODELS if cuda else TINY
    for model, whole in models.items():
        few = Shape(**{**vars(whole), "tokens": min(LARGE, whole.tokens)})
        yield f"layer.{model}.check", _with(check_layer, model, few, torch.bfloat16)
        yield f"layer.{model}.times", _with(time_layer, model, whole)
        yield f"layer.{model}.products", _with(time_products, model, whole)
        yield f"layer.{model}.passes", _with(time_passes, model, whole)
        if model in SIZES:
            yield f"replay.{model}", _with(time_replay, model)


def wanted_of(names: Sequence[str]) -> dict[str, float]:
    """What is expected of an H200, of the sections that ran."""
    found: dict[str, float] = {}
    if any(name.startswith("layer.") for name in names):
        found |= expected(MODELS, DROPS)
    if any(name.startswith("replay.") for name in names):
        found |= expected_replay()
    return found


def allowed_s(name: str) -> float:
    """Seconds that a part is given on CUDA."""
    section, _, rest = name.partition(".")
    return SECONDS.get(section, SECONDS.get(rest.rpartition(".")[2], USUAL_S))


def run_parts(
    report: Report, names: Sequence[str], device: torch.device, seed: int, *, until: float | None = None
) -> None:
    """Run parts; one that ends in an error has failed, and the others run all the same.

    Args:
        until: by `time.time()`; what is not likely to end before is left out.

    Raises:
        Lost: an error that leaves nothing to be done on the device in this process.
    """
    known = parts(device)
    for name in names:
        if until is not None and time.time() + allowed_s(name) / 3 > until:
            report.left_out(f"{name}: too little time left")
            report.note("end", name)
            continue
        report.note("begin", name)
        begin = time.perf_counter()
        said = _attempt(report, name, known[name], device, seed)
        report.add(f"seconds.{name}", time.perf_counter() - begin, "s")
        report.note("end", name)
        print(f"{name}: {time.perf_counter() - begin:.1f} s{said}", file=sys.stderr, flush=True)
        try:
            _settle(device)
        except Exception as error:
            report.fail(f"{name} (device lost: {_first_line(error)})")
            raise Lost(_first_line(error)) from error


def _attempt(report: Report, name: str, part: Part, device: torch.device, seed: int) -> str:
    """Run one part; what to add to the line that says so."""
    before = len(report.failed)
    try:
        part(report, device, seed)
    except Exception as error:  # whatever a machine that nobody has tried yet may raise
        traceback.print_exc()
        report.fail(f"{name} ({type(error).__name__}: {_first_line(error)})")
    failed = report.failed[before:]
    return f", FAILED {', '.join(failed)}" if failed else ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _settle(device: torch.device) -> None:
    """What a part held goes back. Raises what is wrong with a device that an error has taken away."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)


def _with(check: Callable[..., None], *given: Any) -> Part:
    """A check that is told more, between the report and the device."""
    return lambda report, device, seed: check(report, *given, device, seed)
