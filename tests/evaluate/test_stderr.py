"""Standard errors: lm-eval's bootstrap is the reference, run in this process."""

import itertools
import time

import numpy as np
import pytest
from lm_eval.api import metrics

from qbench.evaluate.stderr import standard_error


@pytest.fixture(autouse=True)
def _no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # lm-eval's own switch


def loglikelihoods(n: int) -> list[float]:
    return (-np.random.default_rng(1).exponential(3.0, n)).tolist()


def pages(n: int) -> list[tuple[float, int]]:
    draw = np.random.default_rng(2)
    words = draw.integers(200, 9000, n)
    return [(float(-w * draw.uniform(2, 5)), int(w)) for w in words]


def test_perplexity_is_lm_evals_bootstrap() -> None:
    items = loglikelihoods(300)
    theirs = metrics.bootstrap_stderr(metrics.perplexity, items, iters=40_000)
    assert standard_error(metrics.perplexity, items) == pytest.approx(theirs, rel=0.01)


def test_perplexity_is_the_spread_over_all_resamples() -> None:
    """Five documents have 3,125 resamples: all of them, instead of a draw."""
    items = loglikelihoods(5)
    every = [metrics.perplexity(resample) for resample in itertools.product(items, repeat=5)]
    assert standard_error(metrics.perplexity, items) == pytest.approx(np.std(every), rel=1e-9)


@pytest.mark.parametrize("aggregate", [metrics.weighted_perplexity, metrics.bits_per_byte])
def test_pages_are_resampled_whole(aggregate: object) -> None:
    items = pages(20)
    theirs = metrics.bootstrap_stderr(aggregate, items, iters=30_000)
    assert standard_error(aggregate, items) == pytest.approx(theirs, rel=0.015)


def test_thousands_of_documents_take_less_than_a_second() -> None:
    start = time.process_time()
    value = standard_error(metrics.perplexity, loglikelihoods(5153))
    assert time.process_time() - start < 0.5
    pair = standard_error(metrics.weighted_perplexity, pages(5153))
    assert time.process_time() - start < 2
    assert value is not None
    assert pair is not None


def test_the_same_items_give_the_same_number() -> None:
    assert standard_error(metrics.bits_per_byte, pages(60)) == standard_error(metrics.bits_per_byte, pages(60))
    assert standard_error(metrics.median, range(50)) == standard_error(metrics.median, range(50))


def test_mean_is_lm_evals_formula() -> None:
    items = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert standard_error(metrics.mean, items) == metrics.mean_stderr(items)


def test_what_lm_eval_bootstraps_otherwise_is_bootstrapped_too() -> None:
    items = list(range(51))
    theirs = metrics.bootstrap_stderr(metrics.median, items, iters=5000)
    assert standard_error(metrics.median, items) == pytest.approx(theirs, rel=0.3)  # of 100 resamples


def test_equal_items_have_none_of_it() -> None:
    assert standard_error(metrics.perplexity, [-2.5] * 40) == 0
    assert standard_error(metrics.weighted_perplexity, [(-20.0, 10)] * 40) == pytest.approx(0, abs=1e-12)


def test_none_where_there_is_no_definition() -> None:
    assert standard_error(metrics.perplexity, [-2.0]) is None
    assert standard_error(metrics.brier_score, [(0, [0.2, 0.8]), (1, [0.4, 0.6])]) is None
