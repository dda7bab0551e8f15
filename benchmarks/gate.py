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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tabulate import tabulate

from qbench.gate.hypotheses import Hypothesis, hypotheses
from qbench.gate.pairing import Floats, Ints, Pair, PairedDocuments, draws_of_cells, pair_documents
from qbench.gate.settings import GateSettings, Tolerances
from qbench.gate.verdict import judge
from qbench.records.schema import CellRef, MetricValue
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
        return null(load(options, options.other[0], rename), options.tables, options.seed)
    rows = []
    for named in options.other:
        name, _, folder = named.rpartition("=")
        rows += power_rows(name or folder, load(options, folder, rename), options)
    print(tabulate(rows, "keys", tablefmt="github", disable_numparse=True))
    return 0


@dataclass(frozen=True)
class PairedTask:
    """One task of one cell, before and after; what is drawn from its documents is tested."""

    cell: CellRef
    metrics: tuple[MetricValue, ...]
    paired: PairedDocuments

    def drawn(self, chosen: Ints, signs: Floats, settings: GateSettings) -> Iterator[Hypothesis]:
        """The hypotheses on these documents, before and after swapped where the sign is negative."""
        kept = signs[chosen] > 0
        by_draw = {
            name: (np.where(kept, one[:, chosen], two[:, chosen]), np.where(kept, two[:, chosen], one[:, chosen]))
            for name, (one, two) in self.paired.by_draw.items()
        }
        group = np.unique(self.paired.group[chosen], return_inverse=True)[1]
        paired = replace(self.paired, ids=self.paired.ids[chosen], group=group, by_draw=by_draw)
        yield from hypotheses(self.cell, paired, self.metrics, settings)


def load(options: argparse.Namespace, other: str, rename: Mapping[str, str]) -> list[PairedTask]:
    """All tasks of the cells that two folders share."""
    before = {_key(stored, {}): stored for stored in read_results(Path(options.base)).current}
    pairs = []
    for stored in read_results(Path(other)).current:
        twin = before.get(_key(stored, rename))
        known = (stored.record.cell.draw or 1) <= options.draws
        if known and twin and "failed" not in (stored.record.state, twin.record.state):
            pairs.append((twin, stored))
    found = [task for draws in draws_of_cells(pairs) for task in tasks_of(draws)]
    if not found:
        sys.exit(f"{options.base} and {other} have no cell and task in common; --rename may help.")
    return found


def tasks_of(pairs: Sequence[Pair]) -> Iterator[PairedTask]:
    """The tasks of one cell; pairs: of its draws of calibration."""
    record = pairs[0][1].record
    for paired in pair_documents(*pairs):
        if isinstance(paired, PairedDocuments):
            metrics = tuple(metric for metric in record.metrics if metric.task == paired.task)
            yield PairedTask(record.cell.of_all_draws, metrics, paired)


def hypotheses_of(pairs: Sequence[Pair], settings: GateSettings) -> list[Hypothesis]:
    """The hypotheses of one cell; pairs: of its draws of calibration."""
    return [h for task in tasks_of(pairs) for h in hypotheses(task.cell, task.paired, task.metrics, settings)]


def null(tasks: Sequence[PairedTask], tables: int, seed: int) -> int:
    """Whole tables under the null: in each document of each cell a coin decides which side is which, and documents are
    drawn with replacement, the same ones on both sides and in all cells. A document drawn twice is one document to the
    gate, which knows it by its content. At most 1% may fail; more than 18 of 1,000 would be one chance in a hundred.
    """
    table = _whole(tasks, STRICT)
    changed = sum(bool(h.losses.any()) for h in table)
    print(f"{len(table)} hypotheses, {changed} of them with differences between the two runs")
    started = time.perf_counter()
    failed, _ = count_failures((_swapped(tasks, None, STRICT, seed, i) for i in range(tables)), STRICT)
    print(f"whole tables that fail, of {tables:,} ({time.perf_counter() - started:.0f} s):")
    print(f"  the gate, all tolerances 0     {failed['gate']}")
    print(f"  5% relative tolerance          {failed['relative']}")
    print(f"  fixed floor                    {failed['floor']}")
    allowed = round(0.018 * tables)
    print(f"{'PASS' if failed['gate'] <= allowed else 'FAIL'}: at most {allowed} may fail")
    return int(failed["gate"] > allowed)


def power_rows(name: str, tasks: Sequence[PairedTask], options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """How often a regression is found in random subsets of its documents, and how often chance is taken for one: the
    same subsets with the sides swapped at random.
    """
    settings = GateSettings()
    table = _whole(tasks, settings)
    most = max(len(task.paired.ids) for task in tasks)
    # Holm counts the whole table's hypotheses, though only these cells changed.
    rest = [unchanged(table[0])] * max(0, options.hypotheses - len(table))
    seeds = range(options.subsets)
    for size in sorted({min(size, most) for size in [*options.documents, most]}):
        found, by = count_failures((_subset(tasks, size, settings, options.seed, i) for i in seeds), settings, rest)
        alarms, _ = count_failures((_swapped(tasks, size, settings, options.seed, i) for i in seeds), settings, rest)
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


def _whole(tasks: Sequence[PairedTask], settings: GateSettings) -> list[Hypothesis]:
    return [h for task in tasks for h in hypotheses(task.cell, task.paired, task.metrics, settings)]


def _swapped(tasks: Sequence[PairedTask], size: int | None, settings: GateSettings, *seed: int) -> list[Hypothesis]:
    """Sides swapped at random; of a random subset, or of as many documents as there are, drawn with replacement."""
    random = np.random.default_rng(seed)
    chosen = _chosen(tasks, size, random)
    signs = [random.choice([-1.0, 1.0], size=len(task.paired.ids)) for task in tasks]
    return [h for task, own, sign in zip(tasks, chosen, signs, strict=True) for h in task.drawn(own, sign, settings)]


def _subset(tasks: Sequence[PairedTask], size: int, settings: GateSettings, *seed: int) -> list[Hypothesis]:
    chosen = _chosen(tasks, size, np.random.default_rng(seed))
    ones = (np.ones(len(task.paired.ids)) for task in tasks)
    return [h for task, own, sign in zip(tasks, chosen, ones, strict=True) for h in task.drawn(own, sign, settings)]


def _chosen(tasks: Sequence[PairedTask], size: int | None, random: np.random.Generator) -> list[Ints]:
    """For each task of a cell, which documents are drawn: the same in all cells."""
    chosen: dict[tuple[str, int], Ints] = {}
    for task in tasks:
        n = len(task.paired.ids)
        if (task.paired.task, n) not in chosen:
            drawn = random.integers(n, size=n) if size is None else random.permutation(n)[:size]
            chosen[task.paired.task, n] = drawn
    return [chosen[task.paired.task, len(task.paired.ids)] for task in tasks]


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
    parser.add_argument("--draws", type=int, default=5, help="of calibration, at most; with 1, those of the first draw")
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--documents", type=int, nargs="+", default=[100, 200, 400, 1000])
    parser.add_argument("--subsets", type=int, default=100)
    parser.add_argument("--hypotheses", type=int, default=264, help="in the whole table; default: mini's 22 × 12")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
