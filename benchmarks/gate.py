"""Measure the regression gate on recorded runs: false alarms when nothing got worse, and power.

    python benchmarks/gate.py null     BASE OTHER                  whole tables with the sides swapped at random
    python benchmarks/gate.py power    BASE "nf4 as fp4=DIR" …     which regressions are found, by number of documents
    python benchmarks/gate.py coverage BASE OTHER                  how often "not worse by more than" holds
    python benchmarks/gate.py needed   BASE                        documents that a loss takes, by the old and new rule
    python benchmarks/gate.py pooled                               losses of a made-up cell that all point one way

Runs are folders of records, or of lm-eval's results. If labels differ, --rename says which cells to compare: with
hqq-3-g128=hqq-3-g64, cells of OTHER with the first label are compared with cells of BASE with the second.

Each table is judged by several rules. `holm` is the gate as it was: Holm over all hypotheses, without KL and pooled
losses. `tarone` counts only what can fail, `kl` has KL too, and `gate` has the pooled losses as well. The others are
what other projects do, on lm-eval's metrics alone: a relative tolerance of 5%; a floor for accuracies, three points
below the baseline's and rounded down to a whole point; scores rounded to whole points and to tenths of a perplexity;
and intervals of score ± standard error, as lm-eval prints them, that do not overlap.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from tabulate import tabulate

from qbench.gate.hypotheses import Documents, Hypothesis, hypotheses, mean_loss
from qbench.gate.imported import read_both
from qbench.gate.pooled import with_pooled
from qbench.gate.power import power, power_of, recorded_noise
from qbench.gate.settings import GateSettings, MetricKind, Tolerances
from qbench.gate.sign_flip import holm, ratio, settle
from qbench.gate.verdict import judge
from qbench.records.paired import Pair, PairedDocuments, draws_of_cells, pair_documents
from qbench.records.samples import AGGREGATIONS, WEIGHT, Floats, Ints
from qbench.records.schema import CellRef, MetricValue
from qbench.records.store import StoredRecord

RELATIVE = 0.05
FLOOR = 3  # points
STRICT = GateSettings(tolerances=Tolerances(accuracy=0, perplexity=0, gold_logprob=0, kl=0, kl_floor=0, pooled=0))
NEW: tuple[MetricKind, ...] = ("kl", "pooled")  # not tested by the gate as it was
OURS: tuple[MetricKind, ...] = ("gold_logprob", "kl", "pooled")  # not metrics of lm-eval: other gates do not see them


def main() -> int:
    """Print one of the measurements as a table."""
    options = _options()
    if options.measure == "pooled":
        return one_way(options)
    if options.measure == "needed":
        return needed(Path(options.base))
    rename = dict(pair.split("=", 1) for pair in options.rename)
    settings = STRICT if options.strict else GateSettings()
    if options.measure == "null":
        return null(load(options, options.other[0], rename), options, settings)
    if options.measure == "coverage":
        return coverage(load(options, options.other[0], rename), options)
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
        for h in hypotheses(self.cell, paired, self.metrics, settings):
            known = {field.name: getattr(h, field.name) for field in fields(h)}
            yield DrawnScore(**known, errors=_errors(paired, h.metric)) if h.kind not in OURS else h


@dataclass(frozen=True)
class DrawnScore(Hypothesis):
    """A score of lm-eval, with what its other gates look at."""

    errors: float = 0.0  # the standard errors of the two scores, added up, as a mean loss


def _errors(paired: PairedDocuments, metric: str) -> float:
    """Of both sides: of a mean, or of the log of a perplexity."""
    weights = paired.values[metric + WEIGHT][1] if metric + WEIGHT in paired.values else np.ones(len(paired.ids))
    total = 0.0
    for values in paired.values[metric]:
        residuals = values - ratio(values, weights) * weights
        total += float(np.sqrt(residuals @ residuals)) / float(weights.sum())
    return total


def load(options: argparse.Namespace, other: str, rename: Mapping[str, str]) -> list[PairedTask]:
    """All tasks of the cells that two folders share; folders of records, or of lm-eval's results."""
    now, then, _ = read_both(Path(other), Path(options.base))
    before = {_key(stored, {}): stored for stored in then.current}
    pairs = []
    for stored in now.current:
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


def null(tasks: Sequence[PairedTask], options: argparse.Namespace, settings: GateSettings) -> int:
    """Whole tables under the null: in each document of each cell a coin decides which side is which, and documents are
    drawn with replacement, the same ones on both sides and in all cells. A document drawn twice is one document to the
    gate, which knows it by its content. At most 1% may fail; more than 18 of 1,000 would be one chance in a hundred.
    """
    table, tables = _whole(tasks, settings), options.tables
    changed = sum(bool(h.losses.any()) for h in table)
    print(f"{len(table)} hypotheses, {changed} of them with differences between the two runs")
    started = time.process_time()
    drawn = (_swapped(tasks, None, settings, options.seed, i) for i in range(tables))
    failed = count_failures(drawn, settings, JUDGES)
    print(f"whole tables that fail, of {tables:,} ({time.process_time() - started:.0f} s of CPU time):")
    for name in JUDGES:
        print(f"  {name:10} {failed[name]}")
    allowed = round(0.018 * tables)
    most = max(failed[name] for name in RULES)
    print(f"{'PASS' if most <= allowed else 'FAIL'}: at most {allowed} may fail by our rules")
    return int(most > allowed)


def power_rows(name: str, tasks: Sequence[PairedTask], options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """How often a regression is found in random subsets of its documents, and how often chance is taken for one: the
    same subsets with the sides swapped at random.
    """
    settings = GateSettings()
    table = _whole(tasks, settings)
    most = max(len(task.paired.ids) for task in tasks)
    # Holm counts the whole table's hypotheses, though only these cells changed.
    rest = [unchanged(table[0])] * max(0, options.hypotheses - sum(h.kind not in NEW for h in table))
    seeds = range(options.subsets)
    for size in sorted({min(size, most) for size in [*options.documents, most]}):
        found = count_failures((_subset(tasks, size, settings, options.seed, i) for i in seeds), settings, JUDGES, rest)
        swapped = (_swapped(tasks, size, settings, options.seed, i) for i in seeds)
        alarms = count_failures(swapped, settings, JUDGES, rest)
        largest = max(table, key=lambda h: h.upper_in_tolerances)
        yield {
            "regression": name,
            "documents per task": f"{size:,}",
            **{key: f"{found[key] / len(seeds):.0%} ({alarms[key] / len(seeds):.0%})" for key in JUDGES},
            "largest loss": f"{largest.loss / largest.tolerance:.1f}× tolerance ({largest.task} {largest.metric})",
        }


def needed(folder: Path) -> int:
    """The documents for a loss of twice the tolerance with 80%.

    By Holm over the scores that the old gate tested, which had no KL; and by the gate if all cells changed or two did.
    """
    table = [h for h in recorded_noise(folder) if h.kind not in NEW]
    print(f"the old rule counts {len(table)} hypotheses of {len({h.cell for h in table})} cells")
    before = {(own.task, own.metric): own for own in power_of(table, len(table))}
    rows = []
    for every, two in zip(power(folder), power(folder, cells=2), strict=True):
        loss, *documents = min(every.needed), min(every.needed.items())[1], min(two.needed.items())[1]
        old = before.get((every.task, every.metric))
        columns = [f"{min(old.needed.items())[1]:,.0f}" if old else "not tested", *(f"{n:,.0f}" for n in documents)]
        names = ("Holm over its scores (before)", "all cells changed", "two cells changed")
        rows.append(
            {"metric": f"{every.task} {every.metric}", "loss": f"{loss:.4g}"} | dict(zip(names, columns, strict=True))
        )
    print(tabulate(rows, "keys", tablefmt="github", disable_numparse=True))
    return 0


def coverage(tasks: Sequence[PairedTask], options: argparse.Namespace) -> int:
    """How often statements of what is excluded hold, if the documents of a run are drawn from the recorded ones.

    The truth is the loss of all recorded documents, and each table sees some of them, drawn with replacement; a
    document that is drawn twice counts as two. A score's statement holds if its true loss is not above its upper end;
    the table's if no true loss, in units of its tolerance, is above the largest upper end.
    """
    settings = GateSettings()
    print("documents per task, each score's statement holds, the worst score's, the table's (all scores at once):")
    recorded = [[h for h in hypotheses(t.cell, t.paired, t.metrics, settings) if h.losses.any()] for t in tasks]
    truths = np.array([h.loss / h.tolerance for own in recorded for h in own])
    for size in options.documents:
        held, whole = [], 0
        for i in range(options.tables):
            random = np.random.default_rng([options.seed, i])
            chosen = _chosen(tasks, size, random, replace=True)
            uppers = np.array(
                [
                    replace(h, losses=h.losses[drawn], weights=h.weights[drawn]).upper / h.tolerance
                    for own, drawn in zip(recorded, chosen, strict=True)
                    for h in own
                ]
            )
            held.append(uppers >= truths)
            whole += bool(uppers.max() >= truths.max())
        shares = np.mean(held, axis=0)
        print(f"  {size:5} {shares.mean():.1%} {shares.min():.1%} {whole / options.tables:.1%}")
    return 0


def one_way(options: argparse.Namespace) -> int:
    """A made-up cell of 12 scores that each lose 1.5 tolerances: by the pooled loss and by single tests.

    The rest of the table, 21 cells, changed as much by chance. Documents of a task have a common noise in its metrics.
    """
    settings, counts = GateSettings(), Counter[str]()
    kinds: tuple[MetricKind, ...] = ("accuracy", "accuracy", "gold_logprob", "perplexity")
    for i in range(options.tables):
        random = np.random.default_rng([options.seed, i])
        table: list[Hypothesis] = []
        for cell in range(22):
            lost = 1.5 if cell == 0 else 0.0
            scores = [h for t in range(3) for h in _made_up(random, f"task {t}", kinds, lost, 400, settings)]
            ref = CellRef(family="m", attention="a", checkpoint="c", method="q", bits=4, label=f"q-{cell}")
            table += with_pooled([replace(h, cell=ref) for h in scores], settings)
        worse = [
            o.hypothesis for o in judge(table, settings) if o.verdict == "worse" and o.hypothesis.cell.label == "q-0"
        ]
        counts["pooled"] += any(h.kind == "pooled" for h in worse)
        counts["single"] += any(h.kind != "pooled" for h in worse)
    for name in ("pooled", "single"):
        print(f"found by {name} tests: {counts[name]} of {options.tables}")
    return 0


def _made_up(
    random: np.random.Generator, task: str, kinds: Sequence[MetricKind], lost: float, n: int, settings: GateSettings
) -> Iterator[Hypothesis]:
    common = random.normal(size=n)
    for number, kind in enumerate(kinds):
        unit = mean_loss(kind, settings.tolerance(kind, task, kind))
        noise = 0.5 * common + np.sqrt(0.75) * random.normal(size=n)
        losses = (lost + 16 * noise) * unit  # a standard error of 0.8 tolerances
        yield made_up_hypothesis(task, f"{kind} {number}", kind, losses, settings)


def made_up_hypothesis(task: str, metric: str, kind: MetricKind, losses: Floats, settings: GateSettings) -> Hypothesis:
    """A hypothesis of a made-up cell with these losses."""
    tolerance = settings.tolerance(kind, task, metric)
    n = len(losses)
    return Hypothesis(
        cell=CellRef(family="m", attention="a", checkpoint="c", method="q", bits=4, label="q"),
        task=task,
        metric=metric,
        kind=kind,
        aggregation=AGGREGATIONS["mean"],
        tolerance=tolerance,
        threshold=mean_loss(kind, tolerance),
        alpha=settings.alpha,
        before=0.0,
        after=0.0,
        losses=losses,
        weights=np.ones(n),
        groups=np.arange(n),
        documents=Documents(n, ()),
    )


def count_failures(
    tables: Iterable[list[Hypothesis]],
    settings: GateSettings,
    judges: Mapping[str, "Judge"],
    rest: Sequence[Hypothesis] = (),
) -> Counter[str]:
    """How many tables each judge fails; rest: unchanged hypotheses of the same table."""
    failed = Counter[str]()
    for table in tables:
        for name, fails in judges.items():
            failed[name] += fails(table, rest, settings)
    return failed


Judge = Callable[[list[Hypothesis], Sequence[Hypothesis], GateSettings], bool]


def _holm(table: list[Hypothesis], rest: Sequence[Hypothesis], _: GateSettings) -> bool:
    """The gate as it was."""
    own = [h for h in (*table, *rest) if h.kind not in NEW]
    above, alphas = [h.loss > h.tolerance for h in own], np.array([h.alpha for h in own])
    p = settle([h.losses for h in own], above, alphas, lambda i, p: own[i].with_calibration(p))
    return bool((np.array(above) & (holm(p) <= alphas)).any())


def _gate_of(*left_out: MetricKind) -> Judge:
    """The gate without these kinds."""

    def fails(table: list[Hypothesis], rest: Sequence[Hypothesis], settings: GateSettings) -> bool:
        own = [h for h in (*table, *rest) if h.kind not in left_out]
        return any(outcome.verdict == "worse" for outcome in judge(own, settings))

    return fails


def _score_by_score(is_worse: Callable[[Hypothesis], bool]) -> Judge:
    """A rule for each score of lm-eval on its own."""
    return lambda table, _, __: any(is_worse(h) for h in table if h.kind not in OURS)


def _relative(h: Hypothesis) -> bool:
    return h.after > (1 + RELATIVE) * h.before if h.kind == "perplexity" else h.after < (1 - RELATIVE) * h.before


def _below_floor(h: Hypothesis) -> bool:
    return h.kind == "accuracy" and 100 * h.after < np.floor(100 * h.before - FLOOR)


def _rounded(h: Hypothesis) -> bool:
    if h.kind == "perplexity":
        return round(h.after, 1) > round(h.before, 1)
    return round(100 * h.after) < round(100 * h.before)


def _no_overlap(h: Hypothesis) -> bool:
    return isinstance(h, DrawnScore) and ratio(h.losses, h.weights) > h.errors


RULES: dict[str, Judge] = {
    "holm": _holm,
    "tarone": _gate_of(*NEW),
    "kl": _gate_of("pooled"),
    "gate": _gate_of(),
}
JUDGES: dict[str, Judge] = RULES | {
    "relative": _score_by_score(_relative),
    "floor": _score_by_score(_below_floor),
    "rounded": _score_by_score(_rounded),
    "overlap": _score_by_score(_no_overlap),
}


def _whole(tasks: Sequence[PairedTask], settings: GateSettings) -> list[Hypothesis]:
    return _pooled([h for task in tasks for h in hypotheses(task.cell, task.paired, task.metrics, settings)], settings)


def _pooled(table: Sequence[Hypothesis], settings: GateSettings) -> list[Hypothesis]:
    return [h for _, own in groupby(table, lambda h: h.cell) for h in with_pooled(list(own), settings)]


def _swapped(tasks: Sequence[PairedTask], size: int | None, settings: GateSettings, *seed: int) -> list[Hypothesis]:
    """Sides swapped at random; of a random subset, or of as many documents as there are, drawn with replacement."""
    random = np.random.default_rng(seed)
    chosen = _chosen(tasks, size, random)
    signs = [random.choice([-1.0, 1.0], size=len(task.paired.ids)) for task in tasks]
    drawn = zip(tasks, chosen, signs, strict=True)
    return _pooled([h for task, own, sign in drawn for h in task.drawn(own, sign, settings)], settings)


def _subset(tasks: Sequence[PairedTask], size: int, settings: GateSettings, *seed: int) -> list[Hypothesis]:
    chosen = _chosen(tasks, size, np.random.default_rng(seed))
    drawn = ((task, own, np.ones(len(task.paired.ids))) for task, own in zip(tasks, chosen, strict=True))
    return _pooled([h for task, own, ones in drawn for h in task.drawn(own, ones, settings)], settings)


def _chosen(
    tasks: Sequence[PairedTask], size: int | None, random: np.random.Generator, replace: bool = False
) -> list[Ints]:
    """For each task of a cell, which documents are drawn: the same in all cells."""
    chosen: dict[tuple[str, int], Ints] = {}
    for task in tasks:
        n = len(task.paired.ids)
        if (task.paired.task, n) not in chosen:
            again = size is None or replace
            chosen[task.paired.task, n] = random.integers(n, size=size or n) if again else random.permutation(n)[:size]
    return [chosen[task.paired.task, len(task.paired.ids)] for task in tasks]


def unchanged(h: Hypothesis) -> Hypothesis:
    return replace(h, losses=np.zeros(1), weights=np.ones(1), groups=np.zeros(1, dtype=np.int64))


def _key(stored: StoredRecord, rename: Mapping[str, str]) -> tuple[str, str, str, int | None]:
    cell = stored.record.cell
    return cell.family, cell.attention, rename.get(cell.label, cell.label), cell.draw


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=("null", "power", "coverage", "needed", "pooled"))
    parser.add_argument("base", metavar="BASE", nargs="?")
    parser.add_argument("other", metavar="OTHER", nargs="*", help="a folder; for power NAME=FOLDER, one or more")
    parser.add_argument("--rename", action="append", default=[], metavar="LABEL=LABEL")
    parser.add_argument("--draws", type=int, default=5, help="of calibration, at most; with 1, those of the first draw")
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--documents", type=int, nargs="+", default=[100, 200, 400, 1000])
    parser.add_argument("--subsets", type=int, default=100)
    parser.add_argument("--hypotheses", type=int, default=264, help="in the whole table; default: mini's 22 × 12")
    parser.add_argument("--strict", action="store_true", help="for null: all tolerances 0")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
