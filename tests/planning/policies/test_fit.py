"""Policies fitted to a model and its devices: figures by hand, limits, everything else left alone."""

from __future__ import annotations

import dataclasses

import pytest

from lrmoe.planning.calibration import Constants
from lrmoe.planning.hardware import get_hardware
from lrmoe.planning.memory import ExpertShape
from lrmoe.planning.policies import INFO, LLEP, FasterMoE, FlexMoE, Laer, fit_policy, get_policy

SHAPE = ExpertShape(hidden=4096, width=1000, element_bytes=2)
PARAMS = 3 * 4096 * 1000
H100 = get_hardware("h100")
FULL = Constants(gemm_efficiency=1.0, nvlink_efficiency=1.0, network_efficiency=1.0, pcie_efficiency=0.5)


def test_fastermoe_gets_sizes_and_rates() -> None:
    fitted = fit_policy(FasterMoE(rule="code", matrices=2), SHAPE, H100, constants=FULL)
    assert fitted == FasterMoE(
        rule="code", hidden=4096, width=1000, matrices=3, flops=H100.flops, bandwidth=450e9
    )
    across = fit_policy(FasterMoE(), SHAPE, H100, nodes=2, constants=FULL)
    assert isinstance(across, FasterMoE)
    assert across.bandwidth == 50e9


def test_laer_gets_the_row_and_both_links() -> None:
    fitted = fit_policy(Laer(regather=False), SHAPE, H100, constants=FULL)
    assert fitted == Laer(
        regather=False, pair_bytes=8192.0, pair_seconds=2 * PARAMS / H100.flops, intra_bandwidth=450e9,
        inter_bandwidth=50e9,
    )  # fmt: skip


def test_flexmoe_gets_the_seconds_of_a_pair_and_of_a_gradient() -> None:
    fitted = fit_policy(FlexMoE(interval=3), SHAPE, get_hardware("l40s"), constants=FULL)
    assert isinstance(fitted, FlexMoE)
    assert fitted.interval == 3
    assert fitted.pair_seconds == pytest.approx(6 * PARAMS / 362.05e12)
    assert fitted.sync_seconds == pytest.approx(4 * PARAMS / 16e9)


def test_the_defaults_are_those_of_a_usual_size() -> None:
    shape = ExpertShape(hidden=2048, width=768, element_bytes=2)
    fitted = fit_policy(get_policy("flexmoe"), shape, H100, nodes=2)
    assert isinstance(fitted, FlexMoE)
    assert fitted.pair_seconds == pytest.approx(FlexMoE().pair_seconds, rel=0.5)
    assert fitted.sync_seconds == pytest.approx(FlexMoE().sync_seconds, rel=0.5)


def test_slots_limit_those_that_have_no_limit() -> None:
    assert fit_policy(LLEP(), SHAPE, H100, slots=3) == LLEP(slots=3)
    limited = fit_policy(FasterMoE(), SHAPE, H100, slots=3)
    assert isinstance(limited, FasterMoE)
    assert limited.max_shadows == 3
    assert fit_policy(LLEP(slots=1), SHAPE, H100) == LLEP(slots=1)


@pytest.mark.parametrize("name", sorted(set(INFO) - {"fastermoe", "laer", "flexmoe", "llep"}))
def test_others_are_left_alone(name: str) -> None:
    assert fit_policy(get_policy(name), SHAPE, H100, slots=3) is get_policy(name)


def test_all_policies_without_a_limit_take_one() -> None:
    for name in (name for name, info in INFO.items() if info.slots == "unbounded"):
        limited = fit_policy(get_policy(name), SHAPE, H100, slots=1)
        # mypy does not know that the fitted policies are dataclasses
        assert 1 in (getattr(limited, f.name) for f in dataclasses.fields(limited) if "s" in f.name)  # type: ignore[arg-type]
