"""Sizes as people type them: bytes, "60GiB", "512MiB", "1.5GB", or "60%" of a device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType

from lrmoe.errors import ConfigError

UNITS: Mapping[str, int] = MappingProxyType(
    {
        "": 1,
        "b": 1,
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
        "tib": 2**40,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "tb": 10**12,
    }
)
MOST_BYTES = 2**60
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[kmgt]?i?b|)\s*", re.IGNORECASE)


def check_size(field: str, value: object) -> None:
    """Refuse what is neither a number of bytes nor a size or share in words.

    Raises:
        ConfigError: names the field, the value and the valid forms.
    """
    if isinstance(value, str):
        parse_size(field, value, MOST_BYTES)
    elif isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{field}={value!r}: {_VALID}")
    elif not 1 <= value <= MOST_BYTES:
        raise ConfigError(f"{field}={value!r}: {_RANGE}")


def parse_size(field: str, size: int | str, whole: int | None = None) -> int:
    """Bytes of a size.

    Args:
        field: name of what is given, for messages.
        size: bytes, or text: "60GiB", "512MiB", "1.5GB", a plain number, or "60%" of `whole`.
        whole: bytes that a share is taken of; None: shares are refused.

    Returns:
        whole bytes, rounded down.

    Raises:
        ConfigError: another form, less than a byte, more than 2^60 bytes, or a share above 100 %; names the field.
    """
    if not isinstance(size, str):
        check_size(field, size)
        return size
    match = _SIZE.fullmatch(size)
    unit = match.group(2).lower() if match else "?"
    if match is None or (unit == "%" and whole is None) or (unit != "%" and unit not in UNITS):
        raise ConfigError(f"{field}={size!r}: {_VALID if whole is not None else _BYTES}")
    number = Decimal(match.group(1))
    if unit == "%" and number > 100:
        raise ConfigError(f"{field}={size!r}: must be at most 100%")
    found = number * (whole or 0) / 100 if unit == "%" else number * UNITS[unit]
    if not 1 <= found <= MOST_BYTES:
        raise ConfigError(f"{field}={size!r}: {_RANGE}")
    return int(found)


_VALID = "must be a positive size like '60GiB', '512MiB', '60%' or a number of bytes"
_BYTES = "must be a positive size like '60GiB', '512MiB' or a number of bytes"
_RANGE = "must be at least one byte and at most 2^60"
