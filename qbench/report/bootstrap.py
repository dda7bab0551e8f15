"""Paired bootstrap over documents: every score of every cell is resampled with the same draws. Differences of scores,
and differences of differences, are then differences of arrays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from qbench.records.documents import Values
from qbench.records.resampling import RESAMPLES, SEED, sums_of_columns, tail_share
from qbench.records.samples import Aggregation
from qbench.uncertainty import LEVEL, ChanceSource, Estimate, of_draws

MAX_SUM_ERROR = 1e-9  # equal sums of shares may differ in their last digits


@dataclass(frozen=True)
class MetricDocuments:
    """One metric of one cell in all its documents, to be resampled."""

    values: Values
    aggregation: Aggregation
    share: bool  # of documents, to be shown in percent

    @property
    def factor(self) -> float:
        """From the ratio of sums to the score."""
        return self.aggregation.factor * (100 if self.share else 1)

    @property
    def score(self) -> float:
        """The score of the documents as they are, in the units of tables."""
        return (100 if self.share else 1) * self.aggregation.value(self.values.values, self.values.weights)


@dataclass(frozen=True)
class Resampled:
    """A score over the resamples, on the scale that it is tested on."""

    score: float  # of the documents as they are, in the units of tables
    draws: np.ndarray  # [RESAMPLES]
    documents: int
    logarithm: bool
    share: bool

    @property
    def tested(self) -> float:
        """The score on the scale of the test."""
        return math.log(self.score) if self.logarithm else self.score


# A score with its sign in a sum: one, or one per calibration draw. All terms have the same number of draws.
Term = tuple[int, Resampled | Sequence[Resampled]]


@dataclass(frozen=True)
class Interval:
    """A 95% interval, in the units of tables."""

    low: float
    high: float
    excludes_zero: bool = False
    estimate: Estimate | None = None  # on the scale of the test; None if it cannot be judged
    tested: tuple[float, float] | None = None  # the ends on the scale of the test

    @property
    def p(self) -> float | None:
        """The two-sided p of zero, from the t statistic; None if it cannot be judged."""
        return self.estimate.p if self.estimate else None


def resample(columns: Sequence[MetricDocuments]) -> list[Resampled]:
    """Resample all columns; those with equally many documents get the same draws of documents."""
    found: dict[int, Resampled] = {}
    for count in {len(column.values.values) for column in columns}:
        own = [i for i, column in enumerate(columns) if len(column.values.values) == count]
        weights = {id(columns[i].values.weights): columns[i].values.weights for i in own}  # many share theirs
        drawn = sums_of_columns([*(columns[i].values.values for i in own), *weights.values()])
        totals = dict(zip(weights, drawn[len(own) :], strict=True))
        for i, sums in zip(own, drawn, strict=False):
            column = columns[i]
            with np.errstate(invalid="ignore"):  # a resample may have none of the documents that have a value
                sums *= column.factor  # in place: there are thousands of them
                sums /= totals[id(column.values.weights)]
            found[i] = Resampled(column.score, sums, count, column.aggregation.exponential, column.share)
    return [found[i] for i in range(len(columns))]


def interval(*terms: Term) -> Interval | None:
    """The interval of a signed sum of scores; None if a resample has no value, or there is only one document.

    With one calibration draw its ends are percentiles of the resamples. With several it is symmetric around their
    mean, and includes the spread over draws as well as over documents (qbench.uncertainty).

    Zero is excluded only if it is excluded both on the scale of the test and in the units of tables. The two can
    disagree for damages of perplexities: from 10 to 11 is more than from 20 to 21.5 in proportion, but less in units.
    """
    by_draw = [(sign, [own] if isinstance(own, Resampled) else list(own)) for sign, own in terms]
    first = by_draw[0][1][0]
    if first.documents < 2:
        return None
    tested, estimate = _ends(by_draw, in_units=False)
    shown = _ends(by_draw, in_units=True)[0] if first.logarithm else tested  # otherwise the two scales are one
    if not np.isfinite([shown, tested]).all():
        return None
    low, high = min(shown[0], tested[0]), max(shown[1], tested[1])
    excludes_zero = low > MAX_SUM_ERROR or high < -MAX_SUM_ERROR
    if first.share:  # the two extra documents would make an accuracy 100.25%
        signs = [sign for sign, _ in terms]
        shown = np.clip(shown, -100 * signs.count(-1), 100 * signs.count(1))
    ends = float(tested[0]), float(tested[1])
    return Interval(float(shown[0]), float(shown[1]), bool(excludes_zero), estimate, ends)


def _ends(terms: Sequence[tuple[int, list[Resampled]]], in_units: bool) -> tuple[np.ndarray, Estimate]:
    """The ends of the interval, in the units of tables or on the scale of the test, and what it is computed from."""
    first = terms[0][1][0]
    count, exponential = first.documents, in_units and first.logarithm

    def total(*parts: tuple[int, Any]) -> Any:
        with np.errstate(over="ignore"):
            return sum(sign * (np.exp(part) if exponential else part) for sign, part in parts)

    resampled = total(*((sign, np.mean([own.draws for own in draws], axis=0)) for sign, draws in terms))
    if first.share:
        resampled = resampled + 100 / count * _smoothing(count)
    by_draw = [float(total(*((sign, draws[r].tested) for sign, draws in terms))) for r in range(len(terms[0][1]))]
    value = total(*((sign, np.mean([own.tested for own in draws])) for sign, draws in terms))
    over_documents = ChanceSource(float(np.var(resampled)) * count / (count - 1), count - 1)
    if len(by_draw) == 1:
        tail = tail_share(count)
        return np.quantile(resampled, (tail, 1 - tail)), Estimate(float(value), (over_documents,))
    estimate = Estimate(float(value), (over_documents, of_draws(by_draw)))
    reach = estimate.half_width(LEVEL)
    return np.array([value - reach, value + reach]), estimate


@cache
def _smoothing(count: int) -> np.ndarray:
    """Two extra documents, one for each side, as Agresti and Min (2005) add them to paired proportions.

    Without them, four documents that all changed in the same direction would exclude zero;
    McNemar's exact test needs six.
    """
    draw = np.random.default_rng([SEED, count, 1])
    return draw.poisson(size=RESAMPLES) - draw.poisson(size=RESAMPLES)
