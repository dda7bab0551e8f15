"""Paired bootstrap over documents: every score of every cell is resampled with the same draws, so that differences of
scores, and differences of differences, are differences of arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from qbench.records.resampling import RESAMPLES, SEED, resampled_sums, tail_share
from qbench.records.samples import Aggregation
from qbench.report.values import Values

MAX_SUM_ERROR = 1e-9  # sums of shares that are equal may differ in their last digits


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
    def shown(self) -> np.ndarray:
        """The draws in the units of tables."""
        with np.errstate(over="ignore"):
            return np.exp(self.draws) if self.logarithm else self.draws


@dataclass(frozen=True)
class Interval:
    """A 95% interval, in the units of tables."""

    low: float
    high: float
    excludes_zero: bool = False


def resample(columns: Sequence[MetricDocuments]) -> list[Resampled]:
    """Resample all columns; those with equally many documents get the same draws of documents."""
    found: dict[int, Resampled] = {}
    for count in {len(column.values.values) for column in columns}:
        own = [i for i, column in enumerate(columns) if len(column.values.values) == count]
        weights = {id(columns[i].values.weights): columns[i].values.weights for i in own}  # many share theirs
        drawn = resampled_sums(np.stack([*(columns[i].values.values for i in own), *weights.values()], axis=1)).T
        totals = dict(zip(weights, drawn[len(own) :], strict=True))
        for i, sums in zip(own, drawn, strict=False):
            column = columns[i]
            with np.errstate(invalid="ignore"):  # a resample may have none of the documents that have a value
                draws = column.factor * sums / totals[id(column.values.weights)]
            found[i] = Resampled(column.score, draws, count, column.aggregation.exponential, column.share)
    return [found[i] for i in range(len(columns))]


def interval(*terms: tuple[int, Resampled]) -> Interval | None:
    """The interval of a sum of scores, each with its sign; None if a resample has no value, or there is one document.

    Zero is excluded if it is on the scale of the test and in the units of tables. The two can disagree on the
    damages of perplexities: from 10 to 11 is more than from 20 to 21.5 in proportion, and less in units.
    """
    count = terms[0][1].documents
    if count < 2:
        return None
    smoothing = 100 / count * _smoothing(count) if terms[0][1].share else 0.0
    tail = tail_share(count)
    shown = np.quantile(sum(sign * term.shown for sign, term in terms) + smoothing, (tail, 1 - tail))
    tested = np.quantile(sum(sign * term.draws for sign, term in terms) + smoothing, (tail, 1 - tail))
    if not np.isfinite([shown, tested]).all():
        return None
    low, high = min(shown[0], tested[0]), max(shown[1], tested[1])
    if terms[0][1].share:  # two documents more would make an accuracy 100.25%
        signs = [sign for sign, _ in terms]
        shown = np.clip(shown, -100 * signs.count(-1), 100 * signs.count(1))
    return Interval(float(shown[0]), float(shown[1]), excludes_zero=bool(low > MAX_SUM_ERROR or high < -MAX_SUM_ERROR))


@cache
def _smoothing(count: int) -> np.ndarray:
    """Two documents more, one that speaks for each side, as Agresti and Min (2005) add them to paired proportions.

    Without them four documents that changed, all one way, would exclude zero; McNemar's exact test needs six.
    """
    draw = np.random.default_rng([SEED, count, 1])
    return draw.poisson(size=RESAMPLES) - draw.poisson(size=RESAMPLES)
