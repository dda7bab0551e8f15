"""One paired test for all metrics, "did it get worse?", and a correction over a table of them.

If only noise changed, before and after could be swapped in any document: each document's loss is as likely to be -d as
d. The test is Fisher's sign-flip test: how often random signs give a total as large as the observed one. Every p here
is equal to that share or above it. It is computed in one of three ways:

- exactly, if losses are whole numbers. For answers this is McNemar's exact test.
- by a bound. For coins e and any d, P(Σ e·d ≥ x·√Σd²) ≤ c·P(Z ≥ x), c = 1 / (4·P(Z ≥ √2)) = 3.18 (Bentkus and
  Dzindzalieta 2015, doi:10.3150/14-BEJ603). Σd / √Σd² is equivalent to Student's t: one is a function of the other.
- by resampling, which is 3 times tighter; done only if Holm's decision depends on it.

If one of many documents makes up nearly all of Σd², it would hide a loss of all the others. The losses are then tested
a second time with the largest documents cut back, and the smaller p, doubled, is used. docs/statistics.md says more.

Over a table, p is adjusted by Holm's method, which counts only hypotheses that could fail (Tarone 1990). For example,
one with three changed documents has a p of at least 1/8, whatever their signs, so it takes no part of a level of 1%.
Which hypotheses count depends on the sizes of losses and not on signs, so sign flips are still a valid null.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from qbench.uncertainty import ChanceSource, Estimate

Floats = NDArray[np.float64]

# Losses are cut back only if at least this many documents changed and one makes up more than this share of Σd².
# Cutting back moves the mean of skewed losses: done more often, it fails up to half of the tables in which nothing got
# worse (benchmarks/skewed.py).
MIN_TO_CUT = 200
DOMINANT = 0.9
SHARES = 16  # cut back so that no document makes up more than a sixteenth of Σd²
DRAWS = 2000
SEED = 0
BLOCK = 2_000_000  # coins at a time: 14 MB
MAX_WHOLE = 100_000  # the largest total of whole losses whose distribution is computed
# Only with a handful of documents is a bound too large by more than its constant and this factor.
NEAR = 4.0
ONE_SIDED = 0.90  # the level of the interval whose upper end is exceeded in 5% of cases
SKEWED = (1 + 2 * 1.645**2) / 6  # of Johnson's correction of a t interval's end, at 95%
TIE = 1e-5  # of √Σd²: sums in float32 that are equal but for rounding


def normal_tail(x: float) -> float:
    """P(Z ≥ x)."""
    return 0.5 * math.erfc(x / math.sqrt(2))


BOUND = 1 / (4 * normal_tail(math.sqrt(2)))


def score(losses: Floats) -> float:
    """Σd / √Σd²: about standard normal if only signs are random; 0 if no document changed."""
    largest = float(np.abs(losses).max(initial=0.0))
    if largest == 0:
        return 0.0
    scaled = losses / largest  # squares of tiny losses must not vanish
    return float(scaled.sum() / math.sqrt(float(scaled @ scaled)))


def sign_flip(losses: Floats) -> float:
    """p of one-sided sign flips: exact for whole numbers, else from the bound."""
    return _p(views(losses), tail)


def views(losses: Floats) -> list[Floats]:
    """The losses; also cut back, if one of many documents hides the others. Answers all have the same size.

    What is cut depends on sizes and not on signs, so sign flips are as valid a null for these losses as for the others.
    """
    changed = np.abs(losses[losses != 0])
    if len(changed) < MIN_TO_CUT or is_whole(losses):
        return [losses]
    squares = np.sort(changed / changed.max()) ** 2
    if squares.sum() * DOMINANT >= 1:  # the largest square is 1
        return [losses]
    for cut in range(SHARES):  # ends: with all but one of the shares cut, the largest one left is below their sum
        kept = squares[: len(squares) - cut]
        limit = kept.sum() / (SHARES - cut)  # then Σ of the kept and the cut is SHARES times the limit
        if limit >= kept[-1]:
            break
    largest = math.sqrt(limit) * changed.max()
    return [losses, np.clip(losses, -largest, largest)]


def tail(losses: Floats) -> float:
    """P(a total as large as this one) over random signs: exact for whole numbers, else the bound."""
    if is_whole(losses):
        return exact_tail(losses)
    return min(1.0, BOUND * normal_tail(score(losses)))


def is_whole(losses: Floats) -> bool:
    """Whether the exact distribution can be computed: whole numbers, such as answers."""
    return bool(np.all(losses == np.rint(losses)) and np.abs(losses).sum() <= MAX_WHOLE)


def exact_tail(losses: Floats) -> float:
    """The same for whole numbers, from the distribution of their sum; McNemar's exact test if they are -1, 0 and 1."""
    sizes, counts = np.unique(np.abs(losses[losses != 0]).astype(np.int64), return_counts=True)
    distribution: Floats = np.ones(1)  # of the sum of those losses whose coin shows plus
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        own = np.zeros(size * count + 1)
        own[::size] = _binomial(count)
        distribution = np.convolve(distribution, own).astype(np.float64)
    observed = round(float(losses[losses > 0].sum()))
    return min(1.0, float(distribution[observed:].sum()))


def resampled_tail(losses: Floats, draws: int = DRAWS, seed: int = SEED) -> float:
    """The same by importance sampling, plus three of its standard errors; exact for whole numbers.

    Coins are biased towards the observed total (exponential tilting) and each draw is weighted by its likelihood ratio,
    so 2,000 draws estimate a p of one in a million to 5%. The bias affects the precision, not the estimate.
    """
    if is_whole(losses):
        return exact_tail(losses)
    sizes = np.abs(losses[losses != 0]) / np.abs(losses).max()
    sizes /= np.sqrt(sizes @ sizes)
    observed = score(losses)
    if observed >= sizes.sum() - TIE:
        return 0.5 ** len(sizes)
    # P(plus) in steps of 2**-16: a coin is two random bytes
    thresholds = np.clip(np.rint(2**16 / (1 + np.exp(-2 * _tilt(sizes, observed) * sizes))), 1, 2**16 - 1)
    plus = thresholds / 2**16
    columns = np.stack([sizes, np.log(plus / (1 - plus))], axis=1).astype(np.float32)  # [documents, 2]
    random = np.random.default_rng(seed)
    sums = []
    for start in range(0, draws, block := max(1, BLOCK // len(sizes))):
        shape = min(block, draws - start), len(sizes)
        coins = random.integers(2**16, size=shape, dtype=np.uint16) < thresholds.astype(np.uint16)
        sums.append((coins.astype(np.float32) @ columns).astype(np.float64))
    up, logits = np.concatenate(sums).T  # [draws]
    log_ratios = -len(sizes) * math.log(2) - np.log1p(-plus).sum() - logits
    ratios = np.exp(np.where(2 * up - sizes.sum() >= observed - TIE, log_ratios, -np.inf))
    return min(1.0, float(ratios.mean() + 3 * ratios.std(ddof=1) / math.sqrt(draws)))


def holm(p: Floats) -> Floats:
    """Holm's adjusted p-values: if a whole table is chance, the probability that any is at most alpha is alpha."""
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(adjusted, 1.0)[np.argsort(order, kind="stable")]


def smallest_p(losses: Floats) -> float:
    """The smallest p that losses of these sizes can have: that of all signs being plus."""
    return 0.5 ** int(np.count_nonzero(losses))


def counted(smallest: Floats, alpha: float) -> int:
    """Tarone's k: the smallest number such that at most k of the hypotheses can have p ≤ alpha / k.

    The others cannot fail at alpha / k, so a level of alpha / k for each of these k is alpha for all.
    """
    k = np.arange(1, len(smallest) + 1)
    able = np.searchsorted(np.sort(smallest), alpha / k, side="right")
    return int(np.argmax(able <= k)) + 1


def adjusted_p(p: Floats, smallest: Floats, alpha: float) -> Floats:
    """p-values adjusted by Holm's steps with Tarone's k of the hypotheses left at each step; Holm's if smallest is 0.

    smallest: the smallest p that each could have, given the sizes of its losses; 1 if it cannot fail at all.
    alpha: the largest level that adjusted values are compared with.
    """
    left, k = sorted(smallest.tolist()), counted(smallest, alpha)
    adjusted, largest = np.ones(len(p)), 0.0
    for i in np.argsort(p, kind="stable").tolist():
        while k > 1 and bisect_right(left, alpha / (k - 1)) <= k - 1:
            k -= 1
        if smallest[i] < 1:
            largest = max(largest, k * max(p[i], smallest[i]))
            adjusted[i] = min(1.0, largest)
            del left[bisect_left(left, smallest[i])]
    return adjusted


def settle(
    losses: Sequence[Floats],
    may_fail: Sequence[bool],
    alpha: float | Floats,
    widened: Callable[[int, float], float] = lambda _, p: p,
    smallest: Floats | None = None,
) -> Floats:
    """p of every hypothesis of a table: from bounds, and resampled if the decision at its alpha depends on it.

    may_fail: whether the loss is above its tolerance; if it is not, no p makes it fail and the bound is enough.
    alpha: of each hypothesis, or of all.
    widened: the p with other sources of chance than documents, from the hypothesis's index and its p of documents.
    smallest: as in adjusted_p; by default every hypothesis counts.
    Choosing between two valid p is valid here, since neither is below that of all sign flips.
    """
    seen = [views(d) for d in losses]
    p = np.array([widened(i, _p(own, tail)) for i, own in enumerate(seen)])
    likely = np.array([widened(i, _p(own, lambda d: normal_tail(score(d)))) for i, own in enumerate(seen)])
    unsettled = {i for i, d in enumerate(losses) if may_fail[i] and not is_whole(d)}
    alphas = np.broadcast_to(alpha, p.shape)
    smallest = np.zeros(len(p)) if smallest is None else smallest
    while True:
        adjusted = adjusted_p(p, smallest, alphas.max())
        left = {level: smallest[adjusted > level] for level in set(alphas.tolist())}
        next_k = {level: counted(own, alphas.max()) if len(own) else 1 for level, own in left.items()}
        levels = [level / next_k[level] for level in alphas.tolist()]  # thresholds for the next one to fail
        near = [i for i in unsettled if adjusted[i] > alphas[i] and likely[i] <= NEAR * levels[i]]
        if not near:
            return p
        for i in near:
            p[i] = min(p[i], widened(i, _p(seen[i], resampled_tail)))
        unsettled.difference_update(near)


def ratio(losses: Floats, weights: Floats) -> float:
    """Σ losses / Σ weights: the mean loss per document, or per word of a page."""
    return float(losses.sum() / weights.sum())


def interval(losses: Floats, weights: Floats, other: ChanceSource | None = None) -> tuple[float, float]:
    """A confidence interval of the ratio for new documents: Student's t with the linearized variance.

    other: another source of chance, such as calibration draws.
    """
    n = len(losses)
    if n < 2:
        return -math.inf, math.inf
    center = ratio(losses, weights)
    residuals = losses - center * weights
    documents = ChanceSource(float(residuals @ residuals) * n / (n - 1) / float(weights.sum()) ** 2, n - 1)
    reach = Estimate(center, (documents, other) if other else (documents,)).half_width()
    return center - reach, center + reach


def upper_end(
    losses: Floats,
    weights: Floats,
    largest: float | None = None,
    other: ChanceSource | None = None,
    at_least: float = 0.0,
) -> float:
    """The ratio for new documents is at most this in 95% of cases.

    Student's t with one more document that lost `largest`: otherwise 400 unchanged answers would promise that no
    answer ever changes, and a few that changed would promise too much. A tail of large losses moves the end further
    (Johnson 1978, doi:10.1080/01621459.1978.10480051); one of gains is not used to move it back.

    largest: the most that a document can lose. If this is unknown, it is taken from the document that changed most, and
    the degrees of freedom are of the documents that make up the variance, instead of all: if three documents changed,
    the spread of their losses is known from three (benchmarks/margins.py). at_least: of the added document, if the most
    that one can lose is unknown.
    """
    if len(losses) < 2:
        return math.inf
    seen, changed = float(np.abs(losses).max()), int(np.count_nonzero(losses))
    losses, weights = np.append(losses, max(seen, largest or at_least)), np.append(weights, weights.mean())
    n, total, center = len(losses), float(weights.sum()), ratio(losses, weights)
    residuals = losses - center * weights
    scale = float(np.abs(residuals).max())
    if scale == 0:
        return center
    squares = (residuals / scale) ** 2
    size, skew = float(squares.sum()), float(squares @ (residuals / scale))
    freedom = n - 1.0
    if largest is None and changed:
        # (Σr²)² / Σr⁴ is k if k documents have equal residuals and the others none. Rounded: quantiles are cached.
        freedom = max(1.0, math.floor(min(size**2 / float(squares @ squares), changed)) - 1)
    documents = ChanceSource(scale**2 * size * n / (n - 1) / total**2, freedom)
    reach = Estimate(center, (documents, other) if other else (documents,)).half_width(ONE_SIDED)
    return center + reach + SKEWED * scale * max(skew / size, 0.0) / total


def _p(seen: Sequence[Floats], tail_of: Callable[[Floats], float]) -> float:
    """The smallest p of several views, times their number (Bonferroni)."""
    return min(1.0, len(seen) * min(tail_of(losses) for losses in seen))


def _binomial(count: int) -> Floats:
    """P(k of `count` fair coins) for k = 0 … count."""
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])  # their logarithms
    return np.exp(factorials[count] - factorials - factorials[::-1] - count * math.log(2))


def _tilt(sizes: Floats, observed: float) -> float:
    """t with K'(t) = Σ d·tanh(t·d) = observed, by bisection: it grows with t."""
    mean: Callable[[float], float] = lambda t: float(sizes @ np.tanh(t * sizes))  # noqa: E731
    low, high = 0.0, 1.0
    while mean(high) < observed and high < 1e6:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < observed else (low, middle)
    return high
