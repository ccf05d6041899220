"""Checkpoints: safetensors shards keyed by global expert id, a manifest with hashes, everything else JSON."""

from __future__ import annotations

from lrmoe.checkpoint.agree import agreed, all_true, gathered
from lrmoe.checkpoint.background import BackgroundSaver
from lrmoe.checkpoint.hf import Exported, export_checkpoint, import_checkpoint
from lrmoe.checkpoint.load import Checkpoint, find_steps, open_checkpoint, open_latest
from lrmoe.checkpoint.manifest import Manifest, folder_of, verify
from lrmoe.checkpoint.save import Content, ExpertTensor, save

__all__ = [
    "BackgroundSaver",
    "Checkpoint",
    "Content",
    "ExpertTensor",
    "Exported",
    "Manifest",
    "agreed",
    "all_true",
    "export_checkpoint",
    "find_steps",
    "folder_of",
    "gathered",
    "import_checkpoint",
    "open_checkpoint",
    "open_latest",
    "save",
    "verify",
]
