"""A folder that was written under another name takes its place: one rename, and what was there stays until then."""

from __future__ import annotations

import shutil
from pathlib import Path

from lrmoe.checkpoint.manifest import sync

REPLACED = ".replaced-"  # before the name of a folder while another takes its place


def take_place(written: Path, final: Path) -> None:
    """Give `written` the name `final`, and remove what has that name now; where it fails, that keeps it.

    A process that is killed between two renames leaves the earlier folder as .replaced-<name>.

    Raises:
        OSError: it cannot be renamed.
    """
    sync(written)
    earlier = final.with_name(f"{REPLACED}{final.name}")
    if final.exists():
        shutil.rmtree(earlier, ignore_errors=True)
        final.rename(earlier)
    try:
        written.rename(final)
    except OSError:
        if earlier.exists():
            earlier.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(earlier, ignore_errors=True)
