"""Every pass in each form it comes in: torch's operators, and compiled for each instruction set there is here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lrmoe.ops import cpu


@pytest.fixture(params=[None, *range(len(cpu.LEVELS))], ids=["torch", *cpu.LEVELS])
def level(request: pytest.FixtureRequest) -> Iterator[int | None]:
    """Instruction set that passes may use at most, None for torch's operators."""
    if request.param is not None and not cpu.state()[0]:
        pytest.skip(f"compiled passes: {cpu.state()[1]}")
    with cpu.limited(request.param):
        yield request.param
