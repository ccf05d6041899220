"""The Transformers layout: export to it, import from it, and reading of its files a piece at a time."""

from __future__ import annotations

from lrmoe.checkpoint.hf.export import Exported, export_checkpoint
from lrmoe.checkpoint.hf.importing import import_checkpoint
from lrmoe.checkpoint.hf.names import FAMILIES, LAYOUTS

__all__ = ["FAMILIES", "LAYOUTS", "Exported", "export_checkpoint", "import_checkpoint"]
