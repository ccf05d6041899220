"""The command line, called in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lrmoe import cli


@dataclass(frozen=True, kw_only=True)
class Done:
    """Exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *first: str) -> Run:
    """A function that calls `lrmoe <first> <arguments>`."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["lrmoe", *first, *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        code = stopped.value.code or 0
        assert isinstance(code, int), code
        out, err = capsys.readouterr()
        return Done(code=code, out=out, err=err)

    return call
