"""An estimate with several sources of chance: the documents that were drawn, the draws of calibration, …

half-width² = Σ t²·variance over the sources, each with Student's t for its degrees of freedom. If one source dominates,
this is the usual t interval. If several matter, it is conservative; Satterthwaite's single t with pooled degrees of
freedom is not, for a handful of draws (docs/statistics.md).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, variance

from qbench.student_t import two_tail_quantile, two_tails

LEVEL = 0.95
SMALLEST_P = 1e-300
SMALLEST_P_OF_SEVERAL = 1e-100  # sources of chance: the squares of smaller quantiles overflow


@dataclass(frozen=True)
class ChanceSource:
    """How much an estimate would vary if one kind of thing were drawn again."""

    variance: float  # of the estimate
    freedom: float  # degrees of freedom of that variance; infinite if it is known


@dataclass(frozen=True)
class Estimate:
    """A number, and the independent sources of chance in it."""

    value: float
    sources: tuple[ChanceSource, ...]

    def half_width(self, level: float = LEVEL) -> float:
        """Half the width of the interval around the value."""
        return _half_width(self.sources, 1 - level)

    @property
    def p(self) -> float:
        """The two-sided p of zero: 1 − the level of the interval that just reaches it."""
        size, sources = abs(self.value), [source for source in self.sources if source.variance > 0]
        if size == 0 or not math.isfinite(size):
            return 1.0
        if not sources:
            return 0.0
        if len(sources) == 1:
            return max(_two_tails(sources[0].freedom, size / math.sqrt(sources[0].variance)), SMALLEST_P)
        return math.exp(
            _root(
                lambda log_p: math.log(_half_width(sources, math.exp(log_p)) / size),
                math.log(SMALLEST_P_OF_SEVERAL),
                -1e-12,
            )
        )


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


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function is 0, by false position (Illinois); the nearer end if it is 0 nowhere between."""
    above, below = falling(low), falling(high)
    if above <= 0 or below >= 0:
        return low if above <= 0 else high
    side = 0
    for _ in range(100):
        middle = (low * below - high * above) / (below - above)
        value = falling(middle)
        if abs(value) < 1e-13 or high - low < 1e-13:
            return middle
        if value > 0:
            low, above, below, side = middle, value, below / 2 if side == 1 else below, 1
        else:
            high, below, above, side = middle, value, above / 2 if side == -1 else above, -1
    return middle


def _quantile(freedom: float, tail: float) -> float:
    """The t that |T| exceeds with this probability."""
    if math.isinf(freedom):
        return -NormalDist().inv_cdf(tail / 2)
    return two_tail_quantile(freedom, tail)


def _two_tails(freedom: float, t: float) -> float:
    """The probability that |T| is beyond t."""
    if math.isinf(freedom):
        return math.erfc(t / math.sqrt(2))
    return two_tails(freedom, t)
