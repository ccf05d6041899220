"""Builds the CPU passes with the package where there is a compiler; without one the package works without them."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "lrmoe/ops/cpu"


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the library to a wheel, or puts it beside its sources for an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is made; `version` is "standard" or "editable"."""
        builder = _builder(Path(self.root) / "src" / FOLDER / "build.py")
        editable = version == "editable"
        self._folder = tempfile.TemporaryDirectory()
        folder = builder.SOURCES if editable else Path(self._folder.name)
        target = folder / builder.LIBRARY
        try:
            builder.build(target, os.environ.get("CC"))
        except builder.BuildError as error:
            self.app.display_warning(f"lrmoe: without CPU kernels, torch's operators serve instead: {error}")
            return
        if not editable:
            build_data["force_include"][str(target)] = f"{FOLDER}/{builder.LIBRARY}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is written."""
        self._folder.cleanup()


def _builder(path: Path) -> ModuleType:
    """The package's own module, without the package around it, whose dependencies are not here."""
    spec = importlib.util.spec_from_file_location("lrmoe_cpu_build", path)
    assert spec is not None, f"{path} is Python"
    assert spec.loader is not None, f"{path} is Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
