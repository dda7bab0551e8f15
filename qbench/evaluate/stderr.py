"""Standard errors of lm-eval's metrics, by its definitions but without its 100,000 resamples in Python."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lm_eval.api import metrics

# Maximum random draws per metric, so a few dozen documents and a few thousand take the same fraction of a second.
DRAWS = 10_000_000
RESAMPLES = 100_000  # as lm-eval
SLOW_RESAMPLES = 100  # for statistics in Python: what lm-eval uses for BLEU, where each resample takes seconds
SEED = 0


def standard_error(aggregate: Callable[..., Any], items: Sequence[Any]) -> float | None:
    """The standard error of `aggregate(items)`, one item per document; None if it is not defined or not finite."""
    if len(items) < 2:
        return None
    if aggregate in ESTIMATES:
        try:
            with np.errstate(over="raise"):
                return float(ESTIMATES[aggregate](items))
        except (OverflowError, FloatingPointError):
            return None  # the spread is too large for a float
    # If lm-eval has no standard error for a metric, there is none here; lm-eval's lookup computes nothing.
    if metrics.stderr_for_metric(aggregate, bootstrap_iters=1) is None:
        return None
    return bootstrap_stderr(aggregate, items)


def perplexity_stderr(loglikelihoods: Sequence[float]) -> float:
    """What lm-eval's bootstrap of exp(-mean) converges to, in closed form.

    A resample's mean is a sum of n independent draws of x/n, so with f(t) = mean(exp(-t x/n)) the bootstrap moments
    are exact: E[p] = f(1)^n, E[p²] = f(2)^n, hence stderr = f(1)^n · sqrt((f(2) / f(1)²)^n - 1). For a dozen documents
    of large spread it is above lm-eval's figure, whose draws miss the rare resamples that matter there.
    """
    x = np.asarray(loglikelihoods, dtype=np.float64)
    n, center = len(x), x.mean()
    # log f(t) + t center/n, with expm1 and log1p since all of it is within 1/n of zero
    first, second = (np.log1p(np.expm1(-t * (x - center) / n).mean()) for t in (1, 2))
    # Rounding may leave the variance of equal items slightly below zero.
    return math.exp(n * first - center) * math.sqrt(max(math.expm1(n * (second - 2 * first)), 0.0))


def ratio_stderr(items: Sequence[tuple[float, float]], statistic: Callable[[np.ndarray], np.ndarray]) -> float:
    """The bootstrap's standard error of statistic(sum(a) / sum(b)) over documents (a, b)."""
    pairs = np.asarray(items, dtype=np.float64)  # [n, 2]
    n = len(pairs)
    resamples = min(max(DRAWS // n, 1000), RESAMPLES)
    block = max(1_000_000 // n, 1)  # memory stays at a few megabytes
    draw = np.random.default_rng(SEED)
    ratios = []
    for start in range(0, resamples, block):
        chosen = draw.integers(n, size=(min(block, resamples - start), n))
        ratios.append(pairs[chosen, 0].sum(axis=1) / pairs[chosen, 1].sum(axis=1))
    return float(np.std(statistic(np.concatenate(ratios)), ddof=1))


def bootstrap_stderr(aggregate: Callable[..., Any], items: Sequence[Any]) -> float:
    """lm-eval's bootstrap, but in this process: the original starts a pool, which a worker with threads must not do."""
    draw = random.Random(SEED)
    values = [aggregate(draw.choices(items, k=len(items))) for _ in range(SLOW_RESAMPLES)]
    return float(metrics.sample_stddev(values))


def _weighted_perplexity_stderr(items: Sequence[tuple[float, float]]) -> float:
    return ratio_stderr(items, lambda ratio: np.exp(-ratio))


def _bits_per_byte_stderr(items: Sequence[tuple[float, float]]) -> float:
    return ratio_stderr(items, lambda ratio: -ratio / math.log(2))


ESTIMATES: dict[Callable[..., Any], Callable[..., float]] = {
    metrics.mean: metrics.mean_stderr,
    metrics.acc_all: metrics.acc_all_stderr,
    metrics.perplexity: perplexity_stderr,
    metrics.weighted_perplexity: _weighted_perplexity_stderr,
    metrics.bits_per_byte: _bits_per_byte_stderr,
}
