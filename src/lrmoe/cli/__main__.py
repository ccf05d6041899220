"""`python -m lrmoe.cli`: the command line, also for torchrun."""

from __future__ import annotations

from lrmoe.cli import main

if __name__ == "__main__":
    main()
