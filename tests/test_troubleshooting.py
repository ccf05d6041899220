"""Every message that the troubleshooting page quotes is in the source, word for word."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [
    quote
    for heading in re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    for quote in re.findall(r"`([^`]+)`", heading)
]


@functools.cache
def literals() -> frozenset[str]:
    """Text of every string in the source but docstrings, that between the placeholders of an f-string one by one."""
    found: set[str] = set()
    for path in (ROOT / "src" / "lrmoe").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found.update(
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loose
        )
    return frozenset(found)


def pieces(quote: str) -> list[str]:
    """What stands between the dots, with enough words to be looked for."""
    return [piece for piece in (part.strip() for part in quote.split("...")) if len(piece) > 3]


def lacking(quote: str) -> list[str]:
    return [piece for piece in pieces(quote) if not any(piece in text for text in literals())]


@pytest.mark.parametrize("quote", QUOTED)
def test_a_quoted_message_is_in_the_source(quote: str) -> None:
    # A value that the source formats: f"holds {value}".
    words = quote.removesuffix(" nan").removesuffix(" inf")
    assert pieces(words), "a quote of dots alone would be found everywhere"
    assert lacking(words) == []


def test_the_check_sees_a_message_that_is_not_there() -> None:
    assert len(QUOTED) > 25
    assert lacking("rank ... has eaten the gradients of ...") == ["has eaten the gradients of"]
