"""Cases that need a GPU: the checks of benchmarks/gpu_check.py, which runs them on a machine that has one."""

from __future__ import annotations

import pytest
import torch

from tests import benchmark

NEEDS_CUDA = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: run there by benchmarks/gpu_check.py"
)


def check_on_device(case: str) -> None:
    """Run the check of a case on the GPU; fails where it does."""
    cases, reports = (benchmark.load(name) for name in ("gpu_cases", "gpu_report"))
    device = torch.device("cuda")
    report = reports.Report(seed=0, device=device)
    cases.CASES[case](report, device, 0)
    assert report.failed == []
