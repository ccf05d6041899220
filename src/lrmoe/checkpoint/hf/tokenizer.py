"""Tokenizers of the `tokenizers` library beside weights: one JSON file, and what transformers keeps next to it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrmoe.checkpoint.manifest import write_json

log = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
BESIDE = (CONFIG, "special_tokens_map.json", "chat_template.jinja")


def copy_tokenizer(path: Path, folder: Path) -> None:
    """Copy a tokenizer so that AutoTokenizer reads it; without a configuration of its own it gets the plain one."""
    shutil.copyfile(path, folder / TOKENIZER)
    if path.name == TOKENIZER:
        for name in BESIDE:
            if (path.parent / name).is_file():
                shutil.copyfile(path.parent / name, folder / name)
    if not (folder / CONFIG).is_file():
        write_json(folder / CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})


def copy_run_tokenizer(state: Mapping[str, Any], folder: Path) -> None:
    """Copy the tokenizer that a checkpoint's state says the run had; a warning where its file is gone."""
    config = state.get("config")
    data = config.get("data") if isinstance(config, dict) else None
    given = data.get("tokenizer") if isinstance(data, dict) else None
    if given is None:
        return
    if Path(given).is_file():
        copy_tokenizer(Path(given), folder)
    else:
        log.warning("data.tokenizer=%r: not there any more; the export has no tokenizer", given)
