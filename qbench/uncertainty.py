"""An estimate with several sources of chance: the documents that were drawn, the draws of calibration, …

half-width² = Σ t²·variance over the sources, each with Student's t for its degrees of freedom. If one source dominates,
this is the usual t interval. If several matter, it is conservative; Satterthwaite's single t with pooled degrees of
freedom is not, for a handful of draws (docs/statistics.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, variance

LEVEL = 0.95
SMALLEST_P = 1e-300


@dataclass(frozen=True)
class ChanceSource:
    """How much an estimate would vary if one kind of thing were drawn again."""

    variance: float  # of the estimate
    freedom: float  # degrees of freedom of that variance; infinite if it is known


@dataclass(frozen=True)
class Estimate:
    """A number and its independent sources of chance."""

    value: float
    sources: tuple[ChanceSource, ...]

    def half_width(self, level: float = LEVEL) -> float:
        """Half the width of the interval around the value."""
        return _half_width(self.sources, 1 - level)

    @property
    def p(self) -> float:
        """The two-sided p of zero: 1 − the level of the interval that just reaches zero."""
        size, sources = abs(self.value), [source for source in self.sources if source.variance > 0]
        if size == 0 or not math.isfinite(size):
            return 1.0
        if not sources:
            return 0.0
        if len(sources) == 1:
            return max(_two_tails(sources[0].freedom, size / math.sqrt(sources[0].variance)), SMALLEST_P)
        low, high = math.log(SMALLEST_P), 0.0  # of p; the half-width falls from low to high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _half_width(sources, math.exp(middle)) > size else (low, middle)
        return math.exp(high)


def of_draws(values: Sequence[float]) -> ChanceSource:
    """How much a mean over draws varies, from the values of the draws."""
    return ChanceSource(variance(values) / len(values), len(values) - 1)


def of_two_samples(before: Sequence[float], after: Sequence[float]) -> ChanceSource:
    """How much the difference of two means over draws varies, if they are different draws (Welch)."""
    sides = [of_draws(before), of_draws(after)]
    total = sum(side.variance for side in sides)
    shares = sum(side.variance**2 / side.freedom for side in sides)
    return ChanceSource(total, total**2 / shares if shares else sides[0].freedom)


def _half_width(sources: Sequence[ChanceSource], tail: float) -> float:
    return math.sqrt(sum(_quantile(source.freedom, tail) ** 2 * source.variance for source in sources))


def _quantile(freedom: float, tail: float) -> float:
    """The t that |T| exceeds with this probability."""
    if math.isinf(freedom):
        return -NormalDist().inv_cdf(tail / 2)
    from scipy.special import stdtrit

    return -float(stdtrit(freedom, tail / 2))


def _two_tails(freedom: float, t: float) -> float:
    """The probability that |T| exceeds t."""
    if math.isinf(freedom):
        return math.erfc(t / math.sqrt(2))
    from scipy.special import stdtr

    return 2 * float(stdtr(freedom, -t))
