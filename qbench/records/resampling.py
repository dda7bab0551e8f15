"""The bootstrap's draws: cells with equally many documents or texts are resampled with the same draws."""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

from qbench.uncertainty import LEVEL

RESAMPLES = 2000
# Columns at once. Which columns are multiplied together can move a sum's last bit: with 768 (OpenBLAS, one thread) the
# tables of results/mini and of benchmarks/large_folder.py are those of all columns at once; nothing guarantees it.
COLUMNS_PER_BLOCK = 768
RESAMPLES_PER_BLOCK = 250  # at once: a block of counts stays at a few megabytes
SEED = 0


def resampled_sums(values: np.ndarray, stream: int = 0) -> np.ndarray:
    """Sums of the values over every resample: [documents, columns] to [RESAMPLES, columns].

    stream: if several sets of documents are added up, each set needs its own draws.
    """
    return np.concatenate([counts.astype(np.float64) @ values for counts in _counts(len(values), stream)])


def sums_of_columns(columns: Sequence[np.ndarray]) -> np.ndarray:
    """The same for columns of one length, [columns, RESAMPLES], with memory for a few hundred of them at a time."""
    sums = np.empty((len(columns), RESAMPLES))
    blocks = [counts.astype(np.uint16) for counts in _counts(len(columns[0]))]
    for first in range(0, len(columns), COLUMNS_PER_BLOCK):
        values = np.stack(columns[first : first + COLUMNS_PER_BLOCK], axis=1)
        for n, counts in enumerate(blocks):
            start = n * RESAMPLES_PER_BLOCK
            own = sums[first : first + COLUMNS_PER_BLOCK, start : start + len(counts)]
            own[:] = (counts.astype(np.float64) @ values).T
    return sums


def _counts(count: int, stream: int = 0) -> Iterator[np.ndarray]:
    """How often each document is drawn in each resample: [resamples of the block, documents]."""
    draw = np.random.default_rng([SEED, count, stream] if stream else [SEED, count])
    for start in range(0, RESAMPLES, RESAMPLES_PER_BLOCK):
        size = min(RESAMPLES_PER_BLOCK, RESAMPLES - start)
        chosen = draw.integers(count, size=(size, count)) + count * np.arange(size)[:, None]
        yield np.bincount(chosen.ravel(), minlength=size * count).reshape(size, count)


@cache
def tail_share(count: int) -> float:
    """The share of resamples in each tail: with few documents percentiles are too narrow, so they are widened to
    Student's t (Hesterberg 2015, expanded percentile interval), by its expansion in 1 / degrees of freedom."""
    normal, free = NormalDist(), count - 1
    z = normal.inv_cdf((1 + LEVEL) / 2)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return normal.cdf(-t * math.sqrt(count / free))
