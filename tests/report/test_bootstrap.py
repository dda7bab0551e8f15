"""Paired intervals: what they cover, when they exclude zero, and that they are the same every time."""

import math
import time

import numpy as np
import pytest

from qbench.records.documents import Values
from qbench.records.samples import AGGREGATIONS
from qbench.report.bootstrap import MetricDocuments, Resampled, interval, resample


def column(
    values: list[float] | np.ndarray, aggregation: str = "mean", weights: np.ndarray | None = None
) -> MetricDocuments:
    array = np.asarray(values, dtype=float)
    weights = np.ones(len(array)) if weights is None else weights
    return MetricDocuments(Values(array, weights), AGGREGATIONS[aggregation], share=aggregation == "mean")


def paired(first: list[float] | np.ndarray, second: list[float] | np.ndarray) -> tuple[Resampled, Resampled]:
    before, after = resample([column(first), column(second)])
    return before, after


@pytest.mark.parametrize(("changed", "excludes"), [(0, False), (4, False), (5, False), (7, True), (20, True)])
def test_a_handful_of_changed_documents_proves_nothing(changed: int, excludes: bool) -> None:
    """As McNemar's exact test has it, where 5 of 5 have p = 0.06 and 7 of 7 p = 0.016."""
    before, after = paired([1.0] * 500, [0.0] * changed + [1.0] * (500 - changed))
    found = interval((1, after), (-1, before))
    assert found
    assert found.excludes_zero == excludes
    assert found.low < -100 * changed / 500 < found.high


def test_pairing_sees_what_two_intervals_would_not() -> None:
    draw = np.random.default_rng(0)
    hard = draw.normal(size=300) * 3
    before, after = resample([column(hard - 5, "perplexity"), column(hard - 5.05, "perplexity")])
    both = interval((1, after), (-1, before))
    alone = interval((1, before))
    assert both
    assert alone
    assert both.excludes_zero
    assert both.high - both.low < (alone.high - alone.low) / 10


def test_the_score_is_lm_evals() -> None:
    words = np.array([100.0, 300.0])
    share, perplexity, weighted, bits = resample(
        [
            column([1, 0]),
            column([-1, -3], "perplexity"),
            column([-200, -900], "weighted_perplexity", words),
            column([-200, -900], "bits_per_byte", words),
        ]
    )
    assert share.score == 50.0
    assert perplexity.score == pytest.approx(math.exp(2))
    assert weighted.score == pytest.approx(math.exp(1100 / 400))
    assert bits.score == pytest.approx(1100 / 400 / math.log(2))


def test_documents_without_a_value_count_for_nothing() -> None:
    known = np.arange(40) < 39
    (found,) = resample(
        [
            MetricDocuments(
                Values(np.where(known, -2.0, 0.0), known.astype(float)), AGGREGATIONS["perplexity"], share=False
            )
        ]
    )
    assert found.score == pytest.approx(math.exp(2))
    assert found.draws == pytest.approx(np.full(len(found.draws), 2.0))


def test_what_has_resamples_without_a_value_has_no_interval() -> None:
    (found,) = resample(
        [MetricDocuments(Values(np.array([-2.0, 0.0]), np.array([1.0, 0.0])), AGGREGATIONS["perplexity"], share=False)]
    )
    assert interval((1, found)) is None


def test_the_same_every_time() -> None:
    draw = np.random.default_rng(1)
    first, second = draw.integers(2, size=80), draw.integers(2, size=80)
    found = [interval((1, after), (-1, before)) for before, after in (paired(first, second) for _ in range(2))]
    assert found[0] == found[1]


def test_the_interval_of_an_accuracy_is_of_percentages() -> None:
    (found,) = resample([column([1.0] * 50)])
    alone = interval((1, found))
    assert alone
    assert alone.low < 100 == alone.high


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_intervals_of_few_documents_stay_within_what_there_is(count: int) -> None:
    """A difference of two accuracies is within 100 points, and one of two damages within 200."""
    before, after = paired([1.0] * count, [0.0] * count)
    for first, second in ((before, before), (after, before), (before, after)):
        found = interval((1, first), (-1, second))
        assert found
        assert -100 <= found.low <= found.high <= 100
    found = interval((1, after), (-1, before), (-1, before), (1, after))
    assert found
    assert -200 == found.low <= found.high <= 200


def test_one_document_has_no_interval() -> None:
    before, after = paired([1.0], [0.0])
    assert interval((1, after), (-1, before)) is None


@pytest.mark.parametrize("kind", ["few pages", "answers"])
def test_coverage(kind: str) -> None:
    """About 95% of the 95% intervals contain the truth: 12 skewed pages, or 100 answers of which a tenth changed."""
    draw = np.random.default_rng(2)
    covered, trials = 0, 300
    for _ in range(trials):
        if kind == "few pages":
            change = draw.gamma(4, 0.25, size=12) - 1  # mean 0
            noise = draw.normal(size=12)
            before, after = resample([column(noise - 3, "perplexity"), column(noise - 3 + change, "perplexity")])
        else:
            flips = draw.choice([-1, 0, 1], p=[0.05, 0.9, 0.05], size=100)
            before, after = paired((flips < 0).astype(float), (flips > 0).astype(float))
        found = interval((1, after), (-1, before))
        assert found
        covered += not found.excludes_zero
    assert 0.90 <= covered / trials <= 0.99


def test_a_tables_worth_is_fast() -> None:
    draw = np.random.default_rng(3)
    columns = [column(draw.integers(2, size=2000)) for _ in range(90)]
    started = time.process_time()
    found = resample(columns)
    assert all(interval((1, a), (-1, b)) for a, b in zip(found[::2], found[1::2], strict=True))
    assert time.process_time() - started < 2  # less than one if nothing is wrong
