"""How calibration draws affect intervals and the gate.

    python benchmarks/draws.py coverage                simulate how often 95% intervals cover the truth
    python benchmarks/draws.py gate DIR [--draws 5]    compare sets of equally good draws of one run

Coverage is measured for the intervals that tables show (paired bootstrap over documents, plus the spread over draws),
for intervals without that spread, and for intervals with Satterthwaite's degrees of freedom. DIR is a folder of records
with at least twice as many draws as --draws.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from gate import hypotheses_of, unchanged
from scipy.special import stdtrit
from tabulate import tabulate

from qbench.gate.pairing import Pair
from qbench.gate.settings import GateSettings
from qbench.gate.verdict import judge
from qbench.records.samples import AGGREGATIONS
from qbench.records.store import StoredRecord, read_results
from qbench.report.bootstrap import MetricDocuments, interval, resample
from qbench.report.values import Values
from qbench.uncertainty import Estimate

DOCUMENTS = 400
# Difference of damages in mini, in nats per word: the standard error over documents, and the spread over draws.
MEASURED = {"4 bits": (0.001, 0.011), "3 bits": (0.004, 0.018), "2 bits": (0.018, 0.081)}
OTHERS = {"equal parts": (0.01, 0.01 * math.sqrt(5)), "documents alone": (0.01, 0.0), "mostly documents": (0.01, 0.005)}


def main() -> int:
    """Print one of the measurements as a table."""
    options = _options()
    rows = coverage(options) if options.measure == "coverage" else gate(options)
    print(tabulate(list(rows), "keys", tablefmt="github", disable_numparse=True))
    return 0


def coverage(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """How often intervals cover the truth (zero), by the spread of documents and of draws and the number of draws."""
    for name, (error, spread) in (MEASURED | OTHERS).items():
        for draws in (1, 3, 5):
            random = np.random.default_rng([options.seed, draws])
            covered = np.zeros(3)
            for _ in range(options.simulations):
                covered += simulated(error, spread, draws, random)
            shares = [f"{share:.1%}" for share in covered / options.simulations]
            yield {
                "chance": f"{name}: {error:g} and {spread:.3g}",
                "draws": str(draws),
                "interval of tables": shares[0] if draws > 1 else "none (no star)",
                "documents alone": shares[1],
                "Satterthwaite": shares[2] if draws > 1 else "",
            }


def simulated(error: float, spread: float, draws: int, random: np.random.Generator) -> tuple[bool, bool, bool]:
    """Whether each interval covers zero: that of the tables, that of documents alone, and Satterthwaite's.

    error: standard error over documents of the mean over draws; spread: standard deviation between draws.
    """
    shared = random.normal(size=DOCUMENTS) * error * math.sqrt(DOCUMENTS)
    of_draw = random.normal(size=(draws, 1)) * spread
    values = [Values(own, np.ones(DOCUMENTS)) for own in shared + of_draw]
    found = resample([MetricDocuments(own, AGGREGATIONS["mean"], share=False) for own in values])
    whole = interval((1, found))
    assert whole is not None
    assert whole.estimate is not None
    alone = Estimate(whole.estimate.value, whole.estimate.sources[:1])
    reach = satterthwaite(whole.estimate) if draws > 1 else math.nan
    size = abs(whole.estimate.value)
    return whole.low <= 0 <= whole.high, size <= alone.half_width(), size <= reach


def satterthwaite(estimate: Estimate) -> float:
    """The half-width with a single t with pooled degrees of freedom."""
    variance = sum(source.variance for source in estimate.sources)
    freedom = variance**2 / sum(source.variance**2 / source.freedom for source in estimate.sources)
    return float(stdtrit(freedom, 0.975)) * math.sqrt(variance)


def gate(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """How many tables fail if baseline and run are equally good draws; one table has all cells of a label."""
    cells: dict[str, dict[str, dict[int, StoredRecord]]] = {}
    for stored in read_results(Path(options.folder)).current:
        cell = stored.record.cell
        if cell.draw and stored.record.state == "done":
            cells.setdefault(cell.label, {}).setdefault(cell.attention, {})[cell.draw] = stored
    for label, by_kind in cells.items():
        numbers = sorted(set.intersection(*(set(draws) for draws in by_kind.values())))
        for size in (1, options.draws):
            verdicts = []
            for before, after in disjoint(numbers, size, options.tables):
                pairs = [[(own[b], own[a]) for b, a in zip(before, after, strict=True)] for own in by_kind.values()]
                verdicts.append(fails(pairs, options.hypotheses))
            name = f"{label}, {size} draw{'s' * (size > 1)}"
            yield {"compared": name, "tables": str(len(verdicts)), "fail": str(sum(verdicts))}


def disjoint(numbers: Sequence[int], size: int, most: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs of disjoint sets of draws, in both orders."""
    found = [(a, b) for a in combinations(numbers, size) for b in combinations(numbers, size) if not set(a) & set(b)]
    chosen = np.random.default_rng(0).permutation(len(found))[:most]
    return [found[i] for i in sorted(chosen)]


def fails(cells: Sequence[Sequence[Pair]], hypotheses: int) -> bool:
    """Whether the scores of these cells fail the gate, as part of a table with this many hypotheses."""
    table = [h for pairs in cells for h in hypotheses_of(pairs, GateSettings())]
    rest = hypotheses - len(table)
    judged = judge([*table, *[unchanged(table[0])] * max(0, rest)], GateSettings())
    return any(outcome.verdict == "worse" for outcome in judged)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=("coverage", "gate"))
    parser.add_argument("folder", metavar="DIR", nargs="?")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--simulations", type=int, default=2000)
    parser.add_argument("--tables", type=int, default=100)
    parser.add_argument("--hypotheses", type=int, default=264, help="in the whole table; default: mini's 22 × 12")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
