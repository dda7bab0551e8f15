"""Student's t without SciPy is SciPy's."""

import pytest
from scipy.special import betainc, stdtr, stdtrit

from qbench.student_t import incomplete_beta, two_tail_quantile, two_tails

FREEDOMS = (0.3, 1, 1.5, 2, 3, 4.7, 8, 20, 99, 399, 5000.5)


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_tails(freedom: float) -> None:
    for t in (0, 1e-6, 0.1, 0.5, 1, 2, 3.3, 8, 30, 200):
        assert two_tails(freedom, t) == pytest.approx(2 * stdtr(freedom, -t), rel=1e-10, abs=1e-300)


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_quantiles(freedom: float) -> None:
    for tail in (0.99, 0.5, 0.1, 0.05, 0.01, 1e-4, 1e-8, 1e-12):
        assert two_tail_quantile(freedom, tail) == pytest.approx(-stdtrit(freedom, tail / 2), rel=1e-9)


def test_incomplete_beta() -> None:
    for a in (0.2, 1, 3.5, 40, 250):
        for b in (0.5, 1, 7, 130):
            for x in (0, 1e-9, 0.01, 0.3, 0.5, 0.9, 0.999, 1):
                assert incomplete_beta(a, b, x, 1 - x) == pytest.approx(betainc(a, b, x), rel=1e-9, abs=1e-14)
