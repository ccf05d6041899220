"""The link between two ranks of this machine, and the self-test, from processes of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lrmoe.doctor.finding import Finding
from lrmoe.errors import LRMoEError
from lrmoe.training.launch import run_workers

RANKS, LIMIT_S = 2, 60.0


def trial() -> Iterator[Finding]:
    """Start two gloo ranks over loopback, and try the GPU where there is one."""
    try:
        found: list[Mapping[str, Any]] = run_workers(
            "lrmoe.doctor.workers:measure", RANKS, time_limit_s=LIMIT_S
        )
    except (LRMoEError, OSError) as error:
        yield Finding(area="self-test", name="two ranks", state="fault", text=_first_line(error))
    else:
        yield from _links(found)
        yield _verdict("two ranks", [one["errors"] for one in found])
    if torch.cuda.is_available():
        yield _on_cuda()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def _links(found: list[Mapping[str, Any]]) -> Iterator[Finding]:
    for backend in ("gloo", "nccl"):
        ranks = [one[backend] for one in found if backend in one]
        if not ranks:
            continue
        speed = min(one["bytes_per_s"] for one in ranks)
        latency = max(one["latency_s"] for one in ranks)
        over = "loopback" if backend == "gloo" else "GPUs 0 and 1"
        text = f"{speed / 2**20:.0f} MiB/s per rank between {RANKS} ranks over {over}"
        yield Finding(
            area="link", name=f"{backend} bytes_per_s", state="info", text=text, value=speed, unit="bytes/s"
        )
        yield Finding(
            area="link",
            name=f"{backend} latency_s",
            state="info",
            text=f"{1e6 * latency:.0f} us for a small all-to-all",
            value=latency,
            unit="s",
            better="lower",
        )


def _verdict(name: str, errors: list[Mapping[str, float]]) -> Finding:
    """Whether forward and every gradient of one layer equal the plain loop's."""
    from lrmoe.doctor.workers import NAMES, TOLERANCE

    worst = max(max(one.values()) for one in errors)
    missing = [quantity for quantity in NAMES if any(quantity not in one for one in errors)]
    good = worst <= TOLERANCE and not missing
    text = (
        f"output and gradients of a layer within {worst:.1e} of a plain loop (fp64; allowed {TOLERANCE:.0e})"
    )
    if missing:
        text = f"no {', '.join(missing)} came back"
    return Finding(
        area="self-test",
        name=name,
        state="ok" if good else "fault",
        text=text,
        value=worst,
        unit="relative error",
        better="lower",
    )


def _on_cuda() -> Finding:
    from lrmoe.doctor.workers import layer_errors

    try:
        return _verdict("one GPU", [layer_errors(None, torch.device("cuda"))])
    except Exception as error:  # a broken driver or kernel raises anything
        return Finding(area="self-test", name="one GPU", state="fault", text=_first_line(error))
