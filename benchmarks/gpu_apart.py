"""Runs the parts of `gpu_check.py` in other processes: one that hangs or takes the device away costs itself only.

An error in a kernel leaves a process without its device, and the process that crashes takes along what it measured. So
everything is written into a journal as it comes, one JSON list a line, and what is left goes on in a new process:

    ["begin", part]  ["end", part]  ["figure", {...}]  ["failed", name]  ["missing", sentence]
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

START_S = 90.0  # until a new process has imported what it needs and begins
GRACE_S = 5.0
_LOOK_S = 0.1
Command = Callable[[Sequence[str]], Sequence[str]]


class Journal:
    """The file, and where in the parts whoever writes it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended: set[str] = set()
        self.running: str | None = None
        self._read = 0

    def look(self) -> bool:
        """Read what is new; whether a part began or ended."""
        if not self.path.exists():
            return False
        with self.path.open(encoding="utf-8") as file:
            file.seek(self._read)
            fresh = file.read()
        whole = fresh[: fresh.rfind("\n") + 1]
        self._read += len(whole.encode())
        moved = False
        for kind, what in map(json.loads, whole.splitlines()):
            if kind in ("begin", "end"):
                moved, self.running = True, what if kind == "begin" else None
                if kind == "end":
                    self.ended.add(what)
        return moved

    def fail(self, why: str) -> None:
        """Write that what runs, or what should have begun, has failed, and is over."""
        part = self.running or "start"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(["failed", f"{part} ({why})"]) + "\n")
            file.write(json.dumps(["end", part]) + "\n")


def run_apart(
    names: Sequence[str], command: Command, path: Path, allowed_s: Callable[[str], float], until: float
) -> None:
    """Run parts in one process after the other until all have ended, or failed, or the time is up.

    Args:
        names: of the parts. command: gives the command that runs some of them and writes to the journal at `path`.
        allowed_s: seconds of a part. until: by `time.time()`; a process that runs then is ended.
    """
    journal = Journal(path)
    while (left := [name for name in names if name not in journal.ended]) and time.time() < until:
        process = subprocess.Popen(command(left))
        try:
            why = _watch(process, journal, allowed_s, until)
        finally:
            process.kill()
            process.wait()
        journal.look()
        if why is None and journal.running is None and process.returncode == 0:
            return
        begun = journal.running is not None
        if begun or why is not None or left == [name for name in names if name not in journal.ended]:
            journal.fail(why or f"its process ended with code {process.returncode}")
            journal.look()
        if "start" in journal.ended:
            return


def _watch(
    process: subprocess.Popen[bytes], journal: Journal, allowed_s: Callable[[str], float], until: float
) -> str | None:
    """Wait for the end of a process; why it must not go on, or None."""
    since, allowed = time.time(), START_S
    while process.poll() is None:
        time.sleep(_LOOK_S)
        if journal.look():
            since = time.time()
            allowed = START_S if journal.running is None else allowed_s(journal.running)
        if time.time() - since > allowed:
            return f"nothing for {allowed:.0f} s"
        if time.time() > until + GRACE_S:
            return "the time was up"
    return None
