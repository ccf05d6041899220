"""What is installed, and what it runs on."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import metadata, requires
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lrmoe.doctor.finding import Finding
from lrmoe.errors import LRMoEError
from lrmoe.telemetry.figures import hardware, installed_version

NEEDED = ("lrmoe", "torch", "numpy", "safetensors", "rich", "tomlkit", "typer")
# Extra -> what it brings, and what for.
EXTRAS = {
    "transformers": (("transformers", "tokenizers", "accelerate"), "models: lrmoe train, enable"),
    "traces": (("pyarrow",), "trace.parquet"),
    "report": (("jinja2", "plotly", "tensorboard"), "report.html, TensorBoard"),
    "wandb": (("wandb",), "Weights & Biases"),
    "trl": (("trl",), "TRL's SFTTrainer"),
}


def versions() -> Iterator[Finding]:
    """Python, what the package needs, and its extras."""
    yield _python()
    for name in NEEDED:
        found, trouble = installed_version(name), _trouble(name)
        state = "info" if trouble is None else "fault"
        yield Finding(area="versions", name=name, state=state, text=trouble or str(found))
    for extra, (modules, purpose) in EXTRAS.items():
        yield _extra(extra, modules, purpose)
    if installed_version("transformers") is not None:
        yield _transformers()


def _python() -> Finding:
    needed = metadata("lrmoe")["Requires-Python"]
    bounds = dict(re.findall(r"(>=|<)\s*([\d.]+)", needed))
    here = platform.python_version()
    low, high = bounds.get(">=", "0"), bounds.get("<")
    good = not _older(here, low) and (high is None or _older(here, high))
    text = here if good else f"{here}: lrmoe needs {needed}"
    return Finding(area="versions", name="python", state="info" if good else "fault", text=text)


def _extra(extra: str, modules: tuple[str, ...], purpose: str) -> Finding:
    troubles = [trouble for trouble in map(_trouble, modules) if trouble is not None]
    text = ", ".join(f"{name} {installed_version(name)}" for name in modules)
    if troubles:
        text = f'{", ".join(troubles)}: pip install -e ".[{extra}]" ({purpose})'
    return Finding(area="extras", name=extra, state="no" if troubles else "ok", text=text)


def _trouble(name: str) -> str | None:
    """Why a distribution does not do, None where it does."""
    found, least = installed_version(name), _least(name)
    if found is None:
        return f"{name} not installed"
    if least is not None and _older(found, least):
        return f"{name} {found} is too old: {least} or newer is needed"
    return None


def _least(name: str) -> str | None:
    """The oldest version that this package's own metadata accepts."""
    for line in requires("lrmoe") or []:
        found = re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", line)
        if found is not None and found[1].lower() == name:
            return found[2]
    return None


def _older(version_text: str, least: str) -> bool:
    numbers = [[int(n) for n in re.findall(r"\d+", text)] for text in (version_text, least)]
    return numbers[0][: len(numbers[1])] < numbers[1]


def _transformers() -> Finding:
    """Whether the integration accepts the installed version."""
    try:
        from lrmoe.integrations.transformers import _compat

        tested = ", ".join(_compat.TESTED)
        return Finding(area="extras", name="transformers version", state="ok", text=f"tested: {tested}")
    except (LRMoEError, ImportError) as error:
        return Finding(area="extras", name="transformers version", state="fault", text=str(error))


def devices() -> Iterator[Finding]:
    """CPU, memory, GPUs, threads, libraries of matrix products."""
    found = hardware()
    yield Finding(area="device", name="cpu", state="info", text=f"{found['cpu']}, {found['cores']} cores")
    total, free = _memory()
    yield Finding(
        area="device",
        name="memory",
        state="info",
        text=f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB available",
        value=float(total),
        unit="bytes",
    )
    yield _threads()
    products = f"torch: {_torch_blas()}; numpy: {_numpy_blas()}"
    yield Finding(area="device", name="blas", state="info", text=products)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Finding(area="device", name="cuda", state="no", text=_why_no_cuda())
    for number in range(count):
        device = torch.cuda.get_device_properties(number)
        text = f"{device.name}, {device.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}"
        yield Finding(area="device", name=f"cuda:{number}", state="ok", text=text)


def _threads() -> Finding:
    limits = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS"),
    }
    said = ", ".join(f"{name}={value}" for name, value in limits.items() if value) or "no limit set"
    text = f"{torch.get_num_threads()} in this process ({said}); ranks of --ep have one each"
    return Finding(area="device", name="threads", state="info", text=text)


def _torch_blas() -> str:
    used = [name for name in ("mkl", "openmp") if getattr(torch.backends, name).is_available()]
    used += ["oneDNN"] if torch.backends.mkldnn.is_available() else []
    return ", ".join(used) or "none named"


def _numpy_blas() -> str:
    built: Any = np.show_config(mode="dicts")  # NumPy types it as None, which it gives in its other mode
    blas = built.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; CPU works (gloo)"
    return "no CUDA device is visible; CPU works (gloo)"


def _memory() -> tuple[int, int]:
    """Bytes of the machine, and bytes that may be had, under the limit of a container where there is one."""
    pages = os.sysconf("SC_PAGE_SIZE")
    total, free = pages * os.sysconf("SC_PHYS_PAGES"), pages * os.sysconf("SC_AVPHYS_PAGES")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        free = min(free, total - int(used or 0))
    return total, free


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def backends() -> Iterator[Finding]:
    """What can join ranks."""
    if not dist.is_available():
        yield Finding(area="backends", name="distributed", state="fault", text="torch is built without it")
        return
    gloo = dist.is_gloo_available()
    text = "ranks on CPU" if gloo else "torch is built without gloo: no ranks on CPU"
    yield Finding(area="backends", name="gloo", state="ok" if gloo else "no", text=text)
    yield _nccl()


def _nccl() -> Finding:
    if not dist.is_nccl_available():
        return Finding(area="backends", name="nccl", state="no", text="torch is built without NCCL")
    number = ".".join(map(str, torch.cuda.nccl.version()))
    if not torch.cuda.is_available():
        return Finding(area="backends", name="nccl", state="no", text=f"{number}, and no CUDA device")
    return Finding(
        area="backends", name="nccl", state="ok", text=f"{number}; not tested by this project's CI"
    )


def installed(module: str) -> bool:
    """Whether a module could be imported."""
    return importlib.util.find_spec(module) is not None
