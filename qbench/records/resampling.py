"""The bootstrap's draws: cells with equally many documents or texts are resampled with the same draws."""

import math
from functools import cache
from statistics import NormalDist

import numpy as np

from qbench.uncertainty import LEVEL

RESAMPLES = 2000
RESAMPLES_PER_BLOCK = 250  # at once: a block of counts stays at a few megabytes
SEED = 0


def resampled_sums(values: np.ndarray, stream: int = 0) -> np.ndarray:
    """Sums of the values over every resample: [documents, columns] to [RESAMPLES, columns].

    stream: if several sets of documents are added up, each set needs its own draws.
    """
    count = len(values)
    draw = np.random.default_rng([SEED, count, stream] if stream else [SEED, count])
    blocks = []
    for start in range(0, RESAMPLES, RESAMPLES_PER_BLOCK):
        size = min(RESAMPLES_PER_BLOCK, RESAMPLES - start)
        chosen = draw.integers(count, size=(size, count)) + count * np.arange(size)[:, None]
        counts = np.bincount(chosen.ravel(), minlength=size * count).reshape(size, count)
        blocks.append(counts.astype(np.float64) @ values)
    return np.concatenate(blocks)


@cache
def tail_share(count: int) -> float:
    """The share of resamples in each tail: with few documents percentiles are too narrow, so they are widened to
    Student's t (Hesterberg 2015, expanded percentile interval), by its expansion in 1 / degrees of freedom."""
    normal, free = NormalDist(), count - 1
    z = normal.inv_cdf((1 + LEVEL) / 2)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return normal.cdf(-t * math.sqrt(count / free))
