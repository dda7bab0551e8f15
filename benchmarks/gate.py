"""Measure the regression gate on recorded runs: false alarms when nothing got worse, and power.

    python benchmarks/gate.py null  BASE OTHER                     whole tables with the sides swapped at random
    python benchmarks/gate.py power BASE "nf4 as fp4=DIR" …        which regressions are found, by number of documents

Runs are folders of records. If labels differ, --rename says which cells to compare: with hqq-3-g128=hqq-3-g64, cells of
OTHER with the first label are compared with cells of BASE with the second.

For comparison, the tables include two gates that other projects use: a relative tolerance of 5% on every metric, and a
fixed floor for accuracies, three points below the baseline's score and rounded down to a whole point.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tabulate import tabulate

from qbench.gate.hypotheses import Hypothesis, hypotheses
from qbench.gate.pairing import Floats, Pair, PairedDocuments, draws_of_cells, pair_documents
from qbench.gate.settings import GateSettings, Tolerances
from qbench.gate.verdict import judge
from qbench.records.store import StoredRecord, read_results

RELATIVE = 0.05
FLOOR = 3  # points
JUDGES = ("gate", "relative", "floor")
STRICT = GateSettings(tolerances=Tolerances(accuracy=0, perplexity=0, gold_logprob=0))


def main() -> int:
    """Print one of the two measurements as a table."""
    options = _options()
    rename = dict(pair.split("=", 1) for pair in options.rename)
    if options.measure == "null":
        return null(load(options.base, options.other[0], rename, STRICT), options.tables, options.seed)
    rows = []
    for named in options.other:
        name, _, folder = named.rpartition("=")
        table = load(options.base, folder, rename, GateSettings())
        rows += power_rows(name or folder, table, options)
    print(tabulate(rows, "keys", tablefmt="github", disable_numparse=True))
    return 0


def load(base: str, other: str, rename: Mapping[str, str], settings: GateSettings) -> list[Hypothesis]:
    """The hypotheses of all cells that both folders have."""
    before = {_key(stored, {}): stored for stored in read_results(Path(base)).current}
    pairs = []
    for stored in read_results(Path(other)).current:
        twin = before.get(_key(stored, rename))
        if twin and "failed" not in (stored.record.state, twin.record.state):
            pairs.append((twin, stored))
    found = [h for draws in draws_of_cells(pairs) for h in hypotheses_of(draws, settings)]
    if not found:
        sys.exit(f"{base} and {other} have no cell and task in common; --rename may help.")
    return found


def hypotheses_of(pairs: Sequence[Pair], settings: GateSettings) -> Iterator[Hypothesis]:
    """The hypotheses of one cell, given one pair of records per calibration draw."""
    record = pairs[0][1].record
    for paired in pair_documents(*pairs):
        if isinstance(paired, PairedDocuments):
            metrics = tuple(metric for metric in record.metrics if metric.task == paired.task)
            yield from hypotheses(record.cell.of_all_draws, paired, metrics, settings)


def null(table: Sequence[Hypothesis], tables: int, seed: int) -> int:
    """Count whole tables that fail under the null. For each document of each cell, a coin decides which side is which.
    Documents are drawn with replacement, the same ones on both sides and in all cells. The gate identifies documents by
    their content, so one that is drawn twice counts as one. At most 1% of tables may fail; the chance of more than 18
    in 1,000 is then one in a hundred.
    """
    changed = sum(bool(h.losses.any()) for h in table)
    print(f"{len(table)} hypotheses, {changed} of them with differences between the two runs")
    started = time.perf_counter()
    failed, _ = count_failures((_swapped(table, None, seed, i) for i in range(tables)), STRICT)
    print(f"whole tables that fail, of {tables:,} ({time.perf_counter() - started:.0f} s):")
    print(f"  the gate, all tolerances 0     {failed['gate']}")
    print(f"  5% relative tolerance          {failed['relative']}")
    print(f"  fixed floor                    {failed['floor']}")
    allowed = round(0.018 * tables)
    print(f"{'PASS' if failed['gate'] <= allowed else 'FAIL'}: at most {allowed} may fail")
    return int(failed["gate"] > allowed)


def power_rows(name: str, table: Sequence[Hypothesis], options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """How often a regression is found in random subsets of its documents, and how often there is a false alarm: on the
    same subsets with the sides swapped at random.
    """
    most = max(len(h.documents.ids) for h in table)
    # Holm counts all hypotheses of the table, although only these cells changed.
    rest = [unchanged(table[0])] * max(0, options.hypotheses - len(table))
    seeds = range(options.subsets)
    for size in sorted({min(size, most) for size in [*options.documents, most]}):
        found, by = count_failures((_subset(table, size, options.seed, i) for i in seeds), GateSettings(), rest)
        alarms, _ = count_failures((_swapped(table, size, options.seed, i) for i in seeds), GateSettings(), rest)
        share = {key: f"{found[key] / len(seeds):.0%} ({alarms[key] / len(seeds):.0%})" for key in JUDGES}
        largest = max(table, key=lambda h: h.loss / h.tolerance)
        yield {
            "regression": name,
            "documents per task": f"{size:,}",
            "found by the gate (false alarms)": share["gate"],
            "by 5% relative": share["relative"],
            "by a floor": share["floor"],
            "the gate saw it in": ", ".join(f"{kind} {count / len(seeds):.0%}" for kind, count in by.most_common()),
            "largest loss": f"{largest.loss / largest.tolerance:.1f}× tolerance ({largest.task} {largest.metric})",
        }


def count_failures(
    tables: Iterable[list[Hypothesis]], settings: GateSettings, rest: Sequence[Hypothesis] = ()
) -> tuple[Counter[str], Counter[str]]:
    """How many tables each judge fails, and which kinds of metric make the gate fail."""
    failed, kinds = Counter[str](), Counter[str]()
    for table in tables:
        worse = [o.hypothesis for o in judge([*table, *rest], settings) if o.verdict == "worse"]
        kinds.update({h.kind for h in worse})
        failed["gate"] += bool(worse)
        failed["relative"] += any(map(_relative, table))
        failed["floor"] += any(map(_below_floor, table))
    return failed, kinds


def _swapped(table: Sequence[Hypothesis], size: int | None, *seed: int) -> list[Hypothesis]:
    """Swap sides at random, in a random subset of documents or, without a size, in a sample with replacement."""
    random = np.random.default_rng(seed)
    counts = _counts(table, size, random)
    signs: dict[tuple[str, str, int], Floats] = {}  # the same for all metrics of a cell's task
    for h in table:
        n = len(h.documents.ids)
        if (h.cell.name, h.task, n) not in signs:
            signs[h.cell.name, h.task, n] = random.choice([-1.0, 1.0], size=n)
    return [_drawn(h, own, signs[h.cell.name, h.task, len(own)]) for h, own in zip(table, counts, strict=True)]


def _subset(table: Sequence[Hypothesis], size: int, *seed: int) -> list[Hypothesis]:
    counts = _counts(table, size, np.random.default_rng(seed))
    return [_drawn(h, own, np.ones(len(own))) for h, own in zip(table, counts, strict=True)]


def _counts(table: Sequence[Hypothesis], size: int | None, random: np.random.Generator) -> list[Floats]:
    """How often each document is drawn, for each hypothesis; the same in all cells."""
    counts: dict[tuple[str, int], Floats] = {}
    for h in table:
        n = len(h.documents.ids)
        if (h.task, n) not in counts:
            drawn = random.integers(n, size=n) if size is None else random.permutation(n)[:size]
            counts[h.task, n] = np.bincount(drawn, minlength=n).astype(np.float64)
    return [counts[h.task, len(h.documents.ids)] for h in table]


def _drawn(h: Hypothesis, counts: Floats, signs: Floats) -> Hypothesis:
    """The hypothesis with each document drawn `counts` times, and its sides swapped if its sign is negative."""
    own = h.documents
    before, after = np.where(signs > 0, own.before, own.after), np.where(signs > 0, own.after, own.before)
    weights = counts * own.weights
    return replace(
        h,
        losses=counts * signs * own.losses,
        weights=h.draws * weights,
        before=h.aggregation.value(counts * before, weights),
        after=h.aggregation.value(counts * after, weights),
    )


def unchanged(h: Hypothesis) -> Hypothesis:
    return replace(h, losses=np.zeros(1), weights=np.ones(1))


def _relative(h: Hypothesis) -> bool:
    if h.kind == "gold_logprob":  # not a metric of lm-eval, so other gates do not see it
        return False
    return h.after > (1 + RELATIVE) * h.before if h.kind == "perplexity" else h.after < (1 - RELATIVE) * h.before


def _below_floor(h: Hypothesis) -> bool:
    return h.kind == "accuracy" and 100 * h.after < np.floor(100 * h.before - FLOOR)


def _key(stored: StoredRecord, rename: Mapping[str, str]) -> tuple[str, str, str, int | None]:
    cell = stored.record.cell
    return cell.family, cell.attention, rename.get(cell.label, cell.label), cell.draw


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=("null", "power"))
    parser.add_argument("base", metavar="BASE")
    parser.add_argument("other", metavar="OTHER", nargs="+", help="a folder; for power NAME=FOLDER, one or more")
    parser.add_argument("--rename", action="append", default=[], metavar="LABEL=LABEL")
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--documents", type=int, nargs="+", default=[100, 200, 400, 1000])
    parser.add_argument("--subsets", type=int, default=100)
    parser.add_argument("--hypotheses", type=int, default=264, help="in the whole table; default: mini's 22 × 12")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
