"""Numbers and other values as the reports write them, on the terminal and on the page."""

from __future__ import annotations

import math
from typing import Any

_DECIMALS = 7  # more are written as a power of ten
_GROUPED = 1000  # from here on digits stand in groups of three


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, "-" for None."""
    if value is None:
        return "-"
    text = f"{value:.{digits}g}"
    rounded = abs(float(text))
    grouped = rounded >= 10**digits or (rounded >= _GROUPED and "." not in text)
    return f"{value:,.0f}" if grouped else text


def even(value: float | None, digits: int = 3) -> str:
    """The same with the zeros at its end, for a column of measured numbers; 0 stays 0."""
    text = number(value, digits)
    if not value or "e" in text or "," in text:
        return text
    return f"{float(text):#.{digits}g}".removesuffix(".")


def with_error(value: float, error: float | None, digits: int = 3) -> str:
    """A number +- its standard error, both with as many decimals as show two digits of the error."""
    if not error or not math.isfinite(error):
        return even(value, digits) + ("" if error is None else f" +- {number(error)}")
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return (
        f"{value:,.{decimals}f} +- {error:,.{decimals}f}" if decimals <= _DECIMALS else _short(value, error)
    )


def _short(value: float, error: float) -> str:
    return f"{value:.2e} +- {error:.1e}"


def size(value: float | None) -> str:
    """Bytes with a binary unit, "-" for None."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return (
                f"{value:,.0f} {unit}" if value == int(value) or unit == "B" else f"{even(value, 4)} {unit}"
            )
        value /= 1024
    raise AssertionError("unreachable")


def seconds(value: float | None) -> str:
    """Seconds with four digits, "-" for None."""
    return "-" if value is None else f"{even(value, 4)} s"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage with that many decimals, "-" for None."""
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def against(ours: float | None, baseline: float | None) -> str:
    """How ours compares with the baseline as a signed percentage, or empty where it cannot be said."""
    if ours is None or not baseline:
        return ""
    return f" ({100 * (ours / baseline - 1):+.1f}%)"


def plain(value: Any) -> str:
    """A value of a configuration or summary as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(plain(inner) for inner in value)
    return number(value, 6) if isinstance(value, float) else str(value)
