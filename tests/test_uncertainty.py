"""Intervals with several sources of chance: the formula, its inversion, and coverage by simulation."""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from qbench.uncertainty import ChanceSource, Estimate, of_draws, of_two_samples

# Of mini's difference of damages: the documents' standard error, and the spread over draws, in nats per word.
MEASURED = {"4 bits": (0.001, 0.011), "3 bits": (0.004, 0.018), "2 bits": (0.018, 0.081)}
ELSEWHERE = {"equal parts": (0.01, 0.01 * math.sqrt(5)), "documents": (0.01, 0.0), "mostly documents": (0.01, 0.005)}
DOCUMENTS, SIMULATIONS = 400, 4000  # coverage is then known to 0.35%


def test_each_source_has_its_own_students_t() -> None:
    draws = [0.3, 0.5, 0.1, 0.2, 0.9]
    found = Estimate(0.4, (ChanceSource(0.02, 399), of_draws(draws)))
    spread = np.var(draws, ddof=1) / 5
    half_width = math.sqrt(stats.t.ppf(0.975, 399) ** 2 * 0.02 + stats.t.ppf(0.975, 4) ** 2 * spread)
    assert found.half_width() == pytest.approx(half_width, rel=1e-12)


@pytest.mark.parametrize("value", [-3.0, -0.01, 0.2, 1.0, 30.0])
def test_p_is_that_of_the_interval_that_just_reaches_zero(value: float) -> None:
    found = Estimate(value, (ChanceSource(0.05, 399), ChanceSource(0.1, 4)))
    assert found.half_width(1 - found.p) == pytest.approx(abs(value), rel=1e-6)
    assert (found.p < 0.05) == (found.half_width() < abs(value))


def test_p_of_one_source_is_students() -> None:
    assert Estimate(2.5, (ChanceSource(1.0, 4),)).p == pytest.approx(2 * stats.t.sf(2.5, 4))
    assert Estimate(-9.0, (ChanceSource(1.0, math.inf), ChanceSource(0.0, 4))).p == pytest.approx(2 * stats.norm.sf(9))
    assert Estimate(0.0, (ChanceSource(1.0, 4),)).p == 1
    assert Estimate(1.0, (ChanceSource(0.0, 4),)).p == 0


def test_two_samples_are_welchs() -> None:
    before, after = [1.0, 1.4, 0.9, 1.2], [1.3, 2.9, 2.0]
    moved = Estimate(np.mean(after) - np.mean(before), (of_two_samples(before, after),))
    assert moved.p == pytest.approx(stats.ttest_ind(after, before, equal_var=False).pvalue)
    assert of_two_samples([1.0, 1.0], [2.0, 2.0]) == ChanceSource(0.0, 1)


def simulate(error: float, spread: float, draws: int, freedom: int | None = None) -> float:
    """How often the interval covers the truth; freedom: used for the draws' t instead of the right one."""
    random = np.random.default_rng([draws, int(1e6 * error), int(1e6 * spread)])
    covered = 0
    for _ in range(SIMULATIONS):
        of_draw = spread * random.normal(size=draws)
        variance = error**2 * random.chisquare(DOCUMENTS - 1) / (DOCUMENTS - 1)
        source = of_draws(of_draw.tolist())
        found = Estimate(
            error * random.normal() + of_draw.mean(),
            (ChanceSource(variance, DOCUMENTS - 1), ChanceSource(source.variance, freedom or source.freedom)),
        )
        covered += abs(found.value) <= found.half_width()
    return covered / SIMULATIONS


@pytest.mark.parametrize(("bits", "draws"), list(product(MEASURED, (3, 5))))
def test_where_calibration_dominates_intervals_cover_as_they_should(bits: str, draws: int) -> None:
    assert 0.94 <= simulate(*MEASURED[bits], draws) <= 0.97


@pytest.mark.parametrize(("chance", "draws"), list(product(ELSEWHERE, (3, 5))))
def test_elsewhere_intervals_cover_no_less(chance: str, draws: int) -> None:
    assert simulate(*ELSEWHERE[chance], draws) >= 0.94


def test_with_the_documents_degrees_of_freedom_draws_would_not_be_covered() -> None:
    assert simulate(*MEASURED["3 bits"], draws=5, freedom=DOCUMENTS - 1) < 0.92
