"""Machine-readable figures: one JSON object each, with all that is needed to make them again."""

from __future__ import annotations

import datetime
import math
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def figure(name: str, value: float, unit: str, better: str, **context: Any) -> dict[str, Any]:
    """One figure: `name` is area.case.quantity, `better` "lower" or "higher".

    Raises:
        ValueError: `better` is neither.
    """
    if better not in ("lower", "higher"):
        raise ValueError(f"better={better!r}: must be 'lower' or 'higher'")
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "better": better,
        "context": {**environment(), **context},
    }


def finite(value: float) -> float | None:
    """The number, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


def environment() -> dict[str, Any]:
    """Command, versions, hardware and date of this process."""
    names = ("lrmoe", "torch", "transformers", "numpy")
    return {
        "command": " ".join([_program(), *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            **{n: v for n in names if (v := installed_version(n))},
        },
        "hardware": hardware(),
        "date": datetime.date.today().isoformat(),
    }


def _program() -> str:
    path = Path(sys.argv[0])
    if path.name != "__main__.py":
        return path.name
    module, folder = path.parent.name, path.parent.parent
    while (folder / "__init__.py").is_file():
        module, folder = f"{folder.name}.{module}", folder.parent
    return f"python -m {module}"


def hardware() -> dict[str, Any]:
    """CPU model, core count, and CUDA device where there is one."""
    found: dict[str, Any] = {"cpu": _cpu_model(), "cores": os.cpu_count(), "machine": platform.machine()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["cuda"] = torch.cuda.get_device_name()
    return found


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
