"""Fill docs/plan.md with what `lrmoe plan` prints; its figures enter the page in no other way.

Usage: python tools/fill_plan.py [--check]
A fenced block whose first line is "$ lrmoe plan ..." is replaced by that line and the command's output. `--check`
writes nothing and exits with 1 when the page is out of date.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "plan.md"
BLOCK = re.compile(r"^```text\n\$ (lrmoe plan [^\n]*)\n.*?^```$", re.MULTILINE | re.DOTALL)
_CODES = (0, 3)  # 3: nothing fits, which the page shows too


def output(command: str) -> str:
    """What a command prints, both streams, in ASCII at a width of 100 columns.

    Raises:
        RuntimeError: the command failed.
    """
    words = [sys.executable, "-m", "lrmoe.cli", *shlex.split(command)[1:]]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "PYTHONIOENCODING": "ascii"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )  # fmt: skip
    if done.returncode not in _CODES:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def fill(page: str) -> str:
    """The page with every block made anew."""
    return BLOCK.sub(lambda block: f"```text\n$ {block[1]}\n{output(block[1])}\n```", page)


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 when the page is out of date")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    made = fill(page)
    if check and made != page:
        print(f"{PAGE} is out of date: run `python tools/fill_plan.py`", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
