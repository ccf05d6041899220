"""The command: look, show, and say whether lrmoe is usable here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lrmoe.doctor.finding import Finding
from lrmoe.doctor.machine import backends, devices, versions
from lrmoe.doctor.model import look_at
from lrmoe.doctor.paths import fast_paths
from lrmoe.doctor.trial import trial
from lrmoe.experiments.terminal import open_console, say

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"ok": "green", "no": "yellow", "fault": "bold red", "info": ""}


def doctor(*, model: str | None, as_json: bool) -> int:
    """Print what was found; 0 where lrmoe can be used (and runs `model`), else 1.

    Raises:
        ConfigError: `model` is nothing that doctor knows.
    """
    asked = [] if model is None else list(look_at(model))  # first: a wrong name is said at once
    found = [*_machine(), *asked]
    console = open_console(as_json)
    _show(console, found)
    faults = [finding for finding in found if finding.state == "fault"]
    for finding in faults:
        say(console, f"fault: {finding.area}, {finding.name}: {finding.text}")
    say(console, "not usable" if faults else "usable")
    if as_json:
        sys.stdout.writelines(json.dumps(finding.line()) + "\n" for finding in found)
    return 1 if faults else 0


def _machine() -> Iterator[Finding]:
    yield from versions()
    yield from devices()
    yield from backends()
    yield from fast_paths()
    yield from trial()


def _show(console: Console, found: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", "", "", box=None, show_header=False, pad_edge=False)
    area = ""
    for finding in found:
        shown = "" if finding.area == area else finding.area
        area = finding.area
        state = Text("" if finding.state == "info" else finding.state, style=_STYLES[finding.state])
        table.add_row(Text(shown, style="bold"), Text(finding.name), state, Text(finding.text))
    console.print(table)
