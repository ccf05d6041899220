"""Is it right and how fast is it on this machine? One command, under 6 minutes on one Hopper GPU.

    python benchmarks/gpu_check.py                    # CUDA if there, else tiny shapes on the CPU
    python benchmarks/gpu_check.py --json > out.jsonl
    python benchmarks/gpu_check.py --dry-run          # tiny shapes on the CPU, everywhere
    python benchmarks/gpu_check.py --only layer,replay

ops       every operation against float64, fresh inputs, outputs full of NaN before
kernels   the same of every Triton kernel, and the choice of kept rows bit for bit (TRITON_INTERPRET=1 on a CPU)
cases     known faults of MoE libraries that show on a device only
layer     output and gradients against a float64 loop; then times at Qwen3-30B-A3B's and GLM-4.5-Air's sizes in bf16
          beside transformers' experts, a plain loop and the bare products
replay    one call over 8 expert-parallel ranks at the same sizes, memory by the allocator

Needs torch, numpy and this package; triton and transformers are used where they are installed. The table comes last,
with what was expected of an H200 (gpu_expected.py says from what). Exit code 1 when a check fails. A check's figure is
its largest error over what is allowed: twice the error of the plain loop in the same dtype plus 4 eps times the largest
entry.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from gpu_cases import check_cases
from gpu_expected import expected
from gpu_kernels import check_kernels
from gpu_layer import DROPS, MODELS, TINY, check_layer, time_layer
from gpu_ops import check_ops
from gpu_passes import time_passes
from gpu_products import time_products
from gpu_replay import SIZES, expected_replay, time_replay
from gpu_report import NAMES, Report, table
from plain import Shape

SMALL = Shape(tokens=192, hidden=64, width=48, experts=8, top_k=2, repeats=1)
CHECK = Shape(tokens=2048, hidden=512, width=384, experts=32, top_k=8, repeats=1)
LARGE = 4096  # tokens of a check at a model's own sizes: float64 copies of its experts have to fit as well
Expected = dict[str, float]
Section = Callable[[Report, torch.device, int], Expected]


def _ops(report: Report, device: torch.device, seed: int) -> Expected:
    check_ops(report, _checked(device), device, seed)
    return {}


def _kernels(report: Report, device: torch.device, seed: int) -> Expected:
    check_kernels(report, _checked(device), device, seed)
    return {}


def _cases(report: Report, device: torch.device, seed: int) -> Expected:
    check_cases(report, device, seed)
    return {}


def _layer(report: Report, device: torch.device, seed: int) -> Expected:
    for dtype in NAMES:
        check_layer(report, "small", _checked(device), dtype, device, seed)
    for model, shape in (MODELS if device.type == "cuda" else TINY).items():
        few = Shape(**{**vars(shape), "tokens": min(LARGE, shape.tokens)})
        check_layer(report, model, few, torch.bfloat16, device, seed)
        _give_back(device)
        time_layer(report, model, shape, device, seed)
        time_products(report, model, shape, device, seed)
        time_passes(report, model, shape, device, seed)
        _give_back(device)
    return expected(MODELS, DROPS)


def _replay(report: Report, device: torch.device, seed: int) -> Expected:
    for model in SIZES:
        time_replay(report, model, device, seed)
        _give_back(device)
    return expected_replay()


SECTIONS: Mapping[str, Section] = MappingProxyType(
    {"ops": _ops, "kernels": _kernels, "cases": _cases, "layer": _layer, "replay": _replay}
)


def _checked(device: torch.device) -> Shape:
    return CHECK if device.type == "cuda" else SMALL


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(report: Report, names: list[str], device: torch.device, seed: int) -> Expected:
    """All sections; one that ends in an error has failed, and the others run all the same."""
    found: Expected = {}
    for name in names:
        begin = time.perf_counter()
        try:
            found |= SECTIONS[name](report, device, seed)
        except Exception as error:  # whatever a machine that nobody has tried yet may raise
            traceback.print_exc()
            report.failed.append(f"{name} ({type(error).__name__}: {str(error).splitlines()[:1]})")
        took = time.perf_counter() - begin
        report.add(f"seconds.{name}", took, "s")
        print(f"{name}: {took:.0f} s, {len(report.failed)} failed so far", file=sys.stderr, flush=True)
    return found


def _sections(text: str) -> list[str]:
    names = text.split(",")
    odd = [name for name in names if name not in SECTIONS]
    if odd:
        raise argparse.ArgumentTypeError(f"{odd[0]!r}: must be among {', '.join(SECTIONS)}")
    return names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU even where CUDA is")
    parser.add_argument(
        "--json", action="store_true", help="print JSON lines to standard output, the table to stderr"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON lines to this file")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the inputs; fresh ones each run without it"
    )
    parser.add_argument(
        "--only",
        type=_sections,
        default=list(SECTIONS),
        metavar="NAMES",
        help="sections, with commas between",
    )
    return parser.parse_args()


def main() -> int:
    """Run the sections; print the table last."""
    options = _arguments()
    cuda = torch.cuda.is_available() and not options.dry_run
    device = torch.device("cuda" if cuda else "cpu")
    seed = options.seed if options.seed is not None else time.time_ns() % 2**31
    report, begin = Report(seed=seed, device=device), time.perf_counter()
    wanted = run(report, options.only, device, seed)
    report.add("seconds", time.perf_counter() - begin, "s")
    lines = "".join(json.dumps(item) + "\n" for item in report.figures)
    if options.out:
        options.out.write_text(lines, encoding="utf-8")
    if options.json:
        sys.stdout.write(lines)
    said = sys.stderr if options.json else sys.stdout
    print(table(report.figures, wanted), *report.missing, sep="\n", file=said)
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    verdict = f"FAILED: {', '.join(report.failed)}" if report.failed else "all checks passed"
    print(f"{name}, torch {torch.__version__}, seed {seed}: {verdict}", file=said)
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
