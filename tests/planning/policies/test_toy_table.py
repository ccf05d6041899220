"""The toy table of peaks, regenerated, within .05; and what is said of slots on the same counts."""

from __future__ import annotations

from types import ModuleType

import pytest

from lrmoe.planning.policies import Symi, UltraEP
from tests import benchmark


@pytest.fixture(scope="module")
def toy() -> ModuleType:
    return benchmark.load("toy_table")


@pytest.mark.parametrize("case", [0, 1], ids=["z0.8", "z1.2"])
def test_peaks_at_eight_ranks(toy: ModuleType, case: int) -> None:
    ranks, z = toy.CASES[case]
    assert ranks == 8
    problem = toy.toy_problem(ranks, z)
    assert len(toy.ROWS) == 10
    for name, row in toy.ROWS.items():
        plan = row.policy(ranks)(problem)
        plan.check(problem)
        assert toy.peak(plan) == pytest.approx(row.peaks[case], abs=toy.TOLERANCE), name
        if row.replicas is not None:
            assert int(plan.replicas_R.sum()) == row.replicas[case], name


@pytest.mark.parametrize(
    ("case", "peaks"), [(0, (2.29, 1.38, 1.22, 1.20, 1.07)), (1, (4.05, 1.84, 1.79, 1.22, 1.16))]
)
def test_symi_lives_by_its_slots(toy: ModuleType, case: int, peaks: tuple[float, ...]) -> None:
    problem = toy.toy_problem(*toy.CASES[case])
    found = [toy.peak(Symi(slots_per_rank=slots)(problem)) for slots in (16, 18, 20, 24, 32)]
    assert found == pytest.approx(list(peaks), abs=0.006)


def test_ultraep_by_slots(toy: ModuleType) -> None:
    problem = toy.toy_problem(8, 0.8)
    assert toy.peak(UltraEP(slots=1)(problem)) == pytest.approx(1.05, abs=0.01)
    assert 1.0 <= toy.peak(UltraEP(slots=4)(problem)) <= 1.011


def test_the_locality_splits_cut_cross_rank_pairs(toy: ModuleType) -> None:
    problem = toy.toy_problem(8, 1.2)
    share = {name: toy.local_share(row.policy(8)(problem)) for name, row in toy.ROWS.items()}
    assert share["fastermoe"] == pytest.approx(0.49, abs=0.01)
    assert share["ultraep"] == pytest.approx(0.26, abs=0.01)
    assert share["llep"] == pytest.approx(0.12, abs=0.01)
    assert share["megatron"] == pytest.approx(0.12, abs=0.01)
