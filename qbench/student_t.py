"""Student's t distribution, so that tables and the gate need no SciPy: with it, what a check needs would be twice as
large."""

import math
from functools import lru_cache
from statistics import NormalDist

PRECISION = 1e-15
MAX_STEPS = 500
MAX_STEP, STEP_PRECISION = 50.0, 1e-13  # of log t


def two_tails(freedom: float, t: float) -> float:
    """The probability that |T| is beyond t ≥ 0."""
    whole = freedom + t * t
    return incomplete_beta(freedom / 2, 0.5, freedom / whole, t * t / whole)


@lru_cache(maxsize=4096)
def two_tail_quantile(freedom: float, tail: float) -> float:
    """The t that |T| exceeds with this probability, 1e-100 or more.

    Newton's method for log p as a function of log t, which is concave: from the right of the root it converges from
    the right, and a step from its left leads there.
    """
    t, target = max(-NormalDist().inv_cdf(tail / 2), 1e-8), math.log(tail)
    for _ in range(MAX_STEPS):
        p = two_tails(freedom, t)
        step = (math.log(p) - target) * p / (2 * _density(freedom, t) * t)
        t *= math.exp(min(step, MAX_STEP))
        if abs(step) <= STEP_PRECISION:
            break
    return t


def incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularized incomplete beta function I_x(a, b); rest: 1 − x, which is exact where x is rounded to 1."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    if x > (a + 1) / (a + b + 2):  # there the fraction of the other side converges faster
        return 1 - incomplete_beta(b, a, rest, x)
    scale = a * math.log(x) + b * math.log(rest) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(scale) / a * _continued_fraction(a, b, x)


def _continued_fraction(a: float, b: float, x: float) -> float:
    """1 / (1 + d₁/(1 + d₂/(1 + …))) of I_x(a, b), by Lentz's method (Abramowitz and Stegun 26.5.8)."""
    value, above, below = 2.0, 2.0, 1.0  # after the first term, with 1 added: Lentz's method cannot begin at 0
    for step in range(1, MAX_STEPS):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        below = 1 / (1 + term * below)
        above = 1 + term / above
        value *= above * below
        if abs(above * below - 1) < PRECISION:
            break
    return value - 1


def _density(freedom: float, t: float) -> float:
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    return math.exp(scale - (freedom + 1) / 2 * math.log1p(t * t / freedom))
