"""Is it right and how fast is it on this machine? One command, under 6 minutes on one Hopper GPU.

    python benchmarks/gpu_check.py                    # CUDA if there, else tiny shapes on the CPU
    python benchmarks/gpu_check.py --json --out figures.jsonl
    python benchmarks/gpu_check.py --dry-run          # tiny shapes on the CPU, everywhere
    python benchmarks/gpu_check.py --only layer,replay.qwen3_30b_a3b
    python benchmarks/gpu_check.py --read figures.journal    # the table of a run that was cut off

ops       every operation against float64, fresh inputs, outputs full of NaN before
kernels   the same of every Triton kernel, and the choice of kept rows bit for bit (TRITON_INTERPRET=1 on a CPU)
cases     known faults of MoE libraries that show on a device only
layer     output and gradients against a float64 loop; then times at Qwen3-30B-A3B's and GLM-4.5-Air's sizes in bf16
          beside transformers' experts, a plain loop and the bare products
replay    one call over 8 expert-parallel ranks at the same sizes, memory by the allocator

Needs torch, numpy and this package (PYTHONPATH=src will do); triton and transformers are used where they are
installed. On CUDA the parts run in a process of their own, which is replaced where one crashes, hangs or loses the
device; what is not likely to end in time is left out, and what is known goes to a journal as it comes. The table comes
last, with what was expected of an H200 (gpu_expected.py says from what). Exit code 1 when a check fails. A check's
figure is its largest error over what is allowed: twice the error of the plain loop in the same dtype plus 4 eps times
the largest entry.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Experts of others would fetch their kernels: none waits for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gpu_apart import run_apart
from gpu_parts import SECTIONS, Lost, allowed_s, parts, run_parts, wanted_of
from gpu_report import Report, table

SECONDS = 300.0  # of all parts, on CUDA: a cold machine takes its time to import torch before, the table comes after


def chosen(wanted: str, device: torch.device) -> list[str]:
    """Parts whose name begins with one of the names given, with commas between; all of them by default."""
    known, names = list(parts(device)), [name for name in wanted.split(",") if name]
    for name in names:
        if not any(_within(part, name) for part in known):
            raise SystemExit(
                f"--only {name}: must be among {', '.join(SECTIONS)} or parts of them, such as {known[0]}"
            )
    return [part for part in known if not names or any(_within(part, name) for name in names)]


def _within(part: str, name: str) -> bool:
    return part == name or part.startswith(f"{name}.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="tiny shapes on the CPU even where CUDA is")
    add("--json", action="store_true", help="print JSON lines to standard output, the table to stderr")
    add("--out", type=Path, help="also write the JSON lines to this file, and the journal beside it")
    add("--seed", type=int, default=None, help="of the inputs; fresh ones each run without it")
    add("--only", default="", metavar="NAMES", help="sections or parts of them, with commas between")
    add("--seconds", type=float, default=None, help=f"for all parts; {SECONDS:.0f} on CUDA, else no limit")
    add("--apart", action=argparse.BooleanOptionalAction, help="in a process of their own; on CUDA yes")
    add("--read", type=Path, metavar="JOURNAL", help="run nothing, print the table of a journal")
    add("--journal", type=Path, help=argparse.SUPPRESS)  # of the process that runs the parts
    add("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run the parts; print the table last."""
    options = _arguments()
    cuda = torch.cuda.is_available() and not options.dry_run and not options.read
    device = torch.device("cuda" if cuda else "cpu")
    seed = options.seed if options.seed is not None else time.time_ns() % 2**31
    if options.journal:
        return _run_here(options, device, seed)
    if not (cuda or options.dry_run or options.read):
        print(
            "no CUDA device is visible: tiny shapes on the CPU, as with --dry-run",
            file=sys.stderr,
            flush=True,
        )
    report, begin = Report(seed=seed, device=device), time.perf_counter()
    names = chosen(options.only, device)
    if options.read:
        report.recall(_lines(options.read))
        ran = {item["name"] for item in report.figures}
        names = [name for name in names if f"gpu_check.seconds.{name}" in ran]
    elif options.apart or (options.apart is None and cuda):
        _run_apart(report, options, names, device, seed)
    else:
        run_parts(report, names, device, seed, until=_until(options, device))
    _print(report, names, options)
    verdict = f"FAILED: {', '.join(report.failed)}" if report.failed else "all checks passed"
    told = f"{time.perf_counter() - begin:.0f} s, torch {torch.__version__}, seed {seed}: {verdict}"
    print(f"{_hardware(report, device)}, {told}", file=sys.stderr if options.json else sys.stdout)
    return int(bool(report.failed))


def _run_here(options: argparse.Namespace, device: torch.device, seed: int) -> int:
    """In a process of their own: everything goes to the journal. Exit code 3 where the device is lost."""
    report = Report(seed=seed, device=device, journal=options.journal)
    try:
        run_parts(report, chosen(options.only, device), device, seed, until=options.until)
    except Lost as error:
        print(f"the device is lost: {error}", file=sys.stderr, flush=True)
        os._exit(3)  # what is left could only wait for it
    return 0


def _run_apart(
    report: Report, options: argparse.Namespace, names: list[str], device: torch.device, seed: int
) -> None:
    """The parts in other processes; the report takes over what their journal says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        if options.out:
            path = options.out.with_suffix(".journal")
            path.unlink(missing_ok=True)
        until = _until(options, device) or time.time() + 1e6
        dry = ["--dry-run"] if options.dry_run else []

        def command(left: Sequence[str]) -> list[str]:
            told = [
                "--journal",
                str(path),
                "--until",
                str(until),
                "--seed",
                str(seed),
                "--only",
                ",".join(left),
            ]
            return [sys.executable, str(Path(__file__).resolve()), *dry, *told]

        run_apart(names, command, path, allowed_s, until)
        report.recall(_lines(path))
    ran = {item["name"].removeprefix("gpu_check.seconds.") for item in report.figures}
    for name in names:
        if name not in ran and not any(name in said for said in (*report.failed, *report.missing)):
            report.left_out(f"{name}: too little time left")


def _until(options: argparse.Namespace, device: torch.device) -> float | None:
    seconds = options.seconds or (SECONDS if device.type == "cuda" else None)
    return None if seconds is None else time.time() + seconds


def _hardware(report: Report, device: torch.device) -> str:
    """Its name as whoever measured saw it: this process leaves the device alone."""
    seen = [item["context"]["hardware"] for item in report.figures[:1]]
    return str(seen[0].get("cuda", device.type)) if seen else device.type


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def _print(report: Report, names: Sequence[str], options: argparse.Namespace) -> None:
    lines = "".join(json.dumps(item) + "\n" for item in report.figures)
    if options.out:
        options.out.write_text(lines, encoding="utf-8")
    if options.json:
        sys.stdout.write(lines)
    said = sys.stderr if options.json else sys.stdout
    print(table(report.figures, wanted_of(names)), *report.missing, sep="\n", file=said)


if __name__ == "__main__":
    sys.exit(main())
