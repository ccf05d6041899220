"""`python -m lrmoe`: the command line."""

from __future__ import annotations

from lrmoe.cli import main

if __name__ == "__main__":
    main()
