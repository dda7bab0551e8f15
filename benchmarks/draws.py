"""How calibration draws affect intervals and the gate.

    python benchmarks/draws.py coverage                how often 95% intervals cover the truth, by simulation
    python benchmarks/draws.py headline                the same of the headline, and whole pages that claim anything
    python benchmarks/draws.py gate DIR … [--draws 5]  sets of equally good draws of runs, held against each other

Coverage is of the intervals that tables show (paired bootstrap over documents and the spread over draws), next to what
they would be without the draws' spread and with Satterthwaite's degrees of freedom. Of the headline, each page has one
sentence per width, and twins that are equal in truth. The folders of records have at least twice as many draws together
as are held against each other.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from gate import NEW, RULES, hypotheses_of, unchanged
from scipy.special import stdtrit
from tabulate import tabulate

from qbench.gate.pooled import with_pooled
from qbench.gate.settings import GateSettings
from qbench.records.documents import Answers, Keys, TaskDocuments, Values
from qbench.records.paired import Pair
from qbench.records.samples import AGGREGATIONS
from qbench.records.schema import CellRef
from qbench.records.store import StoredRecord, read_results
from qbench.report.bootstrap import MetricDocuments, interval, resample
from qbench.report.draws import with_draws_joined
from qbench.report.evidence import DocumentEvidence
from qbench.report.headline import Headline, headlines
from qbench.report.metrics import measure
from qbench.report.results import CellResult, ResultSet, Score
from qbench.uncertainty import Estimate

DOCUMENTS = 400
# Difference of damages in mini, in nats per word: the standard error over documents, and the spread over draws.
MEASURED = {"4 bits": (0.001, 0.011), "3 bits": (0.004, 0.018), "2 bits": (0.018, 0.081)}
OTHERS = {"equal parts": (0.01, 0.01 * math.sqrt(5)), "documents alone": (0.01, 0.0), "mostly documents": (0.01, 0.005)}
WIDTHS = (8, 4, 3, 2)  # a sentence each, as mini's page has
TASKS = ("one", "two", "three", "four", "five")
DOCUMENTS_OF_TASK = 100


def main() -> int:
    """Print one of the measurements as a table."""
    options = _options()
    rows = {"coverage": coverage, "headline": headline, "gate": gate}[options.measure](options)
    print(tabulate(list(rows), "keys", tablefmt="github", disable_numparse=True))
    return 0


def coverage(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Coverage of the truth, which is zero, by the spread of documents and of draws and by the number of draws."""
    for setting, (name, (error, spread)) in enumerate((MEASURED | OTHERS).items()):
        for draws in (1, 3, 5):
            random = np.random.default_rng([options.seed, setting, draws])
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


def headline(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Coverage of the truth, which is zero, by the headline's interval, and the pages on which anything is claimed."""
    for setting, (name, (error, spread)) in enumerate((MEASURED | OTHERS).items()):
        for draws in (1, 3, 5):
            random = np.random.default_rng([options.seed, setting, draws])
            pages = [page(error, spread, draws, random) for _ in range(options.simulations)]
            covered = [line.interval[0] <= 0 <= line.interval[1] for lines in pages for line in lines]
            yield {
                "chance": f"{name}: {error:g} and {spread:.3g}",
                "draws": str(draws),
                "covered": f"{np.mean(covered):.1%}",
                "pages that claim anything": f"{np.mean([any(line.claims for line in lines) for lines in pages]):.1%}",
            }


def page(error: float, spread: float, draws: int, random: np.random.Generator) -> list[Headline]:
    """The headlines of twins that are equal in truth, at every width one calibrated and one other quantization.

    error: standard error over documents of a headline; spread: its standard deviation between draws, all of it from the
    calibrated one, which is half of the mean.
    """
    shape = len(TASKS), DOCUMENTS_OF_TASK
    nothing = np.zeros(shape)
    found = {cell(kind, "none", 16): nothing for kind in ("softmax", "softpick")}
    for bits in WIDTHS:
        own = random.normal(size=shape) * error * math.sqrt(nothing.size)
        found |= {cell("softmax", "hqq", bits): nothing, cell("softpick", "hqq", bits): own}
        for draw in range(1, draws + 1):
            found[cell("softmax", "gptq", bits, draw)] = nothing
            found[cell("softpick", "gptq", bits, draw)] = own + 2 * spread * random.normal()
    evidence = DocumentEvidence({ref: documents(values) for ref, values in found.items()}, {})
    scores = {(task, "perplexity"): Score(1.0) for task in TASKS}
    results = with_draws_joined([CellResult(ref, scores, stored=record_of(ref)) for ref in found])
    measures = tuple(measure(task, "perplexity", None) for task in TASKS)
    return headlines(ResultSet(Path(), tuple(results), measures), evidence)


def cell(attention: str, method: str, bits: int, draw: int | None = None) -> CellRef:
    """A cell of a made-up page."""
    own = {"family": "mini", "attention": attention, "checkpoint": attention, "method": method}
    return CellRef(**own, bits=bits, label=f"{method}-{bits}", draw=draw)


KEYS = Keys(np.arange(DOCUMENTS_OF_TASK), np.arange(DOCUMENTS_OF_TASK).astype(np.bytes_))


def documents(nats: np.ndarray) -> dict[str, TaskDocuments]:
    """Documents with these log-likelihoods; nats: [tasks, documents]."""
    none = np.full((nats.shape[1], 1), np.nan)
    return {
        task: TaskDocuments(task, KEYS, {}, lambda own=own: Answers(none, own[:, None], none, none))
        for task, own in zip(TASKS, nats, strict=True)
    }


def record_of(ref: CellRef) -> Any:
    """What reports ask a record of: the calibration, other axes, metrics and recipe."""
    what = SimpleNamespace(calibration=f"draw {ref.draw}" if ref.method == "gptq" else None, parts=())
    provenance = SimpleNamespace(recipe="", resolved_recipe={})
    record = SimpleNamespace(
        cell=ref, identity=SimpleNamespace(what=what), provenance=provenance, quantizer=None, metrics=()
    )
    return SimpleNamespace(record=record)


def gate(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """How many tables fail if equally good draws are the baseline and the run: by label, of all cells of it."""
    cells: dict[str, dict[str, dict[tuple[str, int], StoredRecord]]] = {}
    for folder in options.folders:
        for stored in read_results(Path(folder)).current:
            ref = stored.record.cell
            if ref.draw and stored.record.state == "done":
                cells.setdefault(ref.label, {}).setdefault(ref.attention, {})[folder, ref.draw] = stored
    for label, by_kind in cells.items():
        numbers = sorted(set.intersection(*(set(draws) for draws in by_kind.values())))
        for size in (1, options.draws):
            verdicts = []
            for before, after in disjoint(numbers, size, options.tables):
                pairs = [[(own[b], own[a]) for b, a in zip(before, after, strict=True)] for own in by_kind.values()]
                verdicts.append(fails(pairs, options.scores))
            name = f"{label}, {size} draw{'s' * (size > 1)}"
            yield {"compared": name, "tables": str(len(verdicts))} | {
                rule: str(sum(own[rule] for own in verdicts)) for rule in RULES
            }


def disjoint(numbers: Sequence[Any], size: int, most: int) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Sets of draws that have none in common, each pair of sets both ways."""
    found = [(a, b) for a in combinations(numbers, size) for b in combinations(numbers, size) if not set(a) & set(b)]
    chosen = np.random.default_rng(0).permutation(len(found))[:most]
    return [found[i] for i in sorted(chosen)]


def fails(cells: Sequence[Sequence[Pair]], scores: int) -> dict[str, bool]:
    """Whether these cells fail, by each rule of gate.py; the old rule counts all scores of a table with so many."""
    settings = GateSettings()
    table = [h for pairs in cells for h in with_pooled(hypotheses_of(pairs, settings), settings)]
    rest = [unchanged(table[0])] * max(0, scores - sum(h.kind not in NEW for h in table))
    return {name: rule(table, rest, settings) for name, rule in RULES.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=("coverage", "headline", "gate"))
    parser.add_argument("folders", metavar="DIR", nargs="*")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--simulations", type=int, default=2000)
    parser.add_argument("--tables", type=int, default=100)
    parser.add_argument("--scores", type=int, default=264, help="in the whole table; default: mini's 22 × 12")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
