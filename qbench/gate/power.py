"""How many documents the gate needs to find a loss, from the paired noise of recorded results.

A hypothesis counts if it could fail, given the sizes of its losses (qbench.gate.sign_flip). Hypotheses of unchanged
cells do not count, so fewer documents are needed if few cells changed.

With d a document's loss, the test's score over n documents is about normal around √n·δ / √(σ² + δ²), where δ is the
mean loss and σ the spread of d. A loss is found if the score reaches Holm's threshold for the first hypothesis of a
table, and the observed loss is above its tolerance too.

Answers change as a whole: losing δ of them takes δ changed documents, so σ² ≥ δ(1 − δ) whatever was recorded, and with
few changed documents the normal distribution is a poor fit. For answers, the probability is computed exactly from two
binomials.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, median

import numpy as np
from tabulate import tabulate

from qbench.gate.hypotheses import Hypothesis, hypotheses, in_unit, in_unit_of_losses, mean_loss
from qbench.gate.pairing import CheckError, join
from qbench.gate.pooled import with_pooled
from qbench.gate.settings import UNITS, GateSettings, MetricKind
from qbench.gate.sign_flip import counted, is_whole, normal_tail, ratio
from qbench.gate.verdict import settings_of
from qbench.numbers import count, percent, significant
from qbench.records.audit import UNQUANTIZED
from qbench.records.paired import Pair, PairedDocuments, draws_of_cells, pair_documents
from qbench.records.samples import Floats
from qbench.records.store import Results, StoredRecord, read_results

POWERS = (0.8, 0.9)
MULTIPLES = (2, 4)  # of the tolerance: losses for which the table shows the documents needed, at the first power
MAX_DOUBLINGS = 50  # of the number of documents that is tried
MAX_PERCENT = 1000  # of a perplexity: larger losses are shown as "over"


@dataclass(frozen=True)
class Power:
    """Which losses can be found in one metric of a task, at the median of the cells."""

    task: str
    metric: str
    kind: MetricKind
    documents: int
    found: dict[float, float]  # by power: the smallest loss that is found at these documents
    needed: dict[float, float]  # by loss: the documents to find it with the first power; infinite if none do


def power(folder: Path, against: Path | None = None, cells: int | None = None) -> list[Power]:
    """Power by task and metric, for a table of as many hypotheses as the folder's.

    cells: how many of the table's cells change; those that do not cannot fail, and do not count. By default all do.
    """
    table = recorded_noise(folder, against)
    every = len({h.cell for h in table})
    if cells is not None and not 1 <= cells <= every:
        raise CheckError(
            f"--cells is {cells}; it must be from 1 to {every}, the cells of {folder} that differ from "
            f"{against or 'their unquantized models'}."
        )
    able = counted(np.array([h.smallest_p for h in table]), max(h.alpha for h in table))
    size = math.ceil(able * (cells or every) / every)
    return power_of(table, size)


def power_of(table: Sequence[Hypothesis], size: int) -> list[Power]:
    """Power by task and metric, if this many hypotheses count."""
    by_metric: dict[tuple[str, str], list[Hypothesis]] = defaultdict(list)
    for hypothesis in table:
        by_metric[hypothesis.task, hypothesis.metric].append(hypothesis)
    return [_power(own, size) for own in by_metric.values()]


@dataclass(frozen=True)
class Noise:
    """The noise of documents' losses: their spread, and the mean square of weights over the square of their mean."""

    spread: float
    stretch: float = 1.0
    answers: bool = False  # losses are -1, 0 and 1


def chance_to_find(documents: int, loss: float, tolerance: float, noise: Noise, alpha: float) -> float:
    """The probability that the gate finds a mean loss in this many documents."""
    if loss <= tolerance or (noise.answers and loss > 1):
        return 0.0
    if noise.answers:
        return _chance_of_answers(documents, loss, tolerance, noise, alpha)
    if 0.5**documents > alpha:  # the smallest p of sign flips
        return 0.0
    size = math.hypot(noise.spread, loss * math.sqrt(noise.stretch))  # √E[d²], what the score divides by
    beyond_chance = math.sqrt(documents) * loss - NormalDist().inv_cdf(1 - alpha) * size
    beyond_tolerance = math.sqrt(documents) * (loss - tolerance)
    margin = min(beyond_chance, beyond_tolerance)
    return normal_tail(-margin / noise.spread) if noise.spread else float(margin >= 0)


def documents_needed(loss: float, tolerance: float, noise: Noise, alpha: float, power: float) -> float:
    """Documents needed to find a mean loss at this alpha and power; infinite if the tolerance allows the loss."""

    def enough(documents: int) -> bool:
        return chance_to_find(documents, loss, tolerance, noise, alpha) >= power

    high = next((n for n in (2**i for i in range(MAX_DOUBLINGS)) if enough(n)), 0)
    if not high:
        return math.inf
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def smallest_loss(documents: int, tolerance: float, noise: Noise, alpha: float, power: float) -> float:
    """The smallest mean loss that this many documents find; infinite if they are too few for any."""

    def enough(loss: float) -> bool:
        return chance_to_find(documents, loss, tolerance, noise, alpha) >= power

    unit = max(tolerance, noise.spread, 1e-9)
    largest = 1.0 if noise.answers else 1e9 * unit
    low, high = tolerance, min(2 * unit, largest)
    while not enough(high):
        if high >= largest:
            return math.inf
        low, high = high, min(2 * high, largest)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _chance_of_answers(documents: int, loss: float, tolerance: float, noise: Noise, alpha: float) -> float:
    """The same for answers, summed over how many of them change: McNemar's test uses only those."""
    changing = min(1.0, max(noise.spread**2 + loss**2, loss))  # σ² = changing − δ² ≥ δ(1 − δ)
    expected, reach = documents * changing, 6 * math.sqrt(documents * changing * (1 - changing)) + 6
    changed = np.arange(
        max(0, math.floor(expected - reach)), min(documents, math.ceil(expected + reach)) + 1, dtype=np.float64
    )
    above = np.floor(np.round((changed + documents * tolerance) / 2, 9)) + 1  # lost − won is above the tolerance
    lost = np.maximum(above, _critical(changed, alpha))
    share = -np.diff(binomial_tail(np.append(changed, changed[-1] + 1), documents, changing))
    return float(share @ binomial_tail(lost, changed, (changing + loss) / (2 * changing)))


def _critical(changed: Floats, alpha: float) -> Floats:
    """How many of the changed answers must be lost for p ≤ alpha; more than there are if that is impossible."""
    low, high = changed // 2, changed + 1
    while np.any(high - low > 1):
        middle = (low + high) // 2
        enough = binomial_tail(middle, changed, 0.5) <= alpha
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high


def binomial_tail(successes: Floats, trials: Floats | int, chance: float) -> Floats:
    """P(at least this many successes)."""
    try:
        from scipy.special import betainc  # for whole arrays
    except ImportError:
        raise CheckError("`qbench power` needs SciPy, which is not installed: pip install scipy.") from None
    tail = betainc(np.maximum(successes, 1), np.maximum(trials - successes + 1, 1), chance)
    return np.where(successes <= 0, 1.0, np.where(successes > trials, 0.0, tail))


def to_text(rows: Sequence[Power], style: str = "text") -> str:
    """The powers as a table for people, and how to read it."""
    markdown = style == "markdown"
    header = [f"{group}\n{title}" if group else title for group, title in header_of_powers()]
    if markdown:  # its cells have one line
        header = [name.replace("\n", " ") for name in header]
    table_format = "github" if markdown else "simple"
    table = tabulate([row_of(own) for own in rows], header, tablefmt=table_format, disable_numparse=True)
    return f"{table}\n\n{reading(rows)}"


def header_of_powers() -> list[tuple[str, str]]:
    """The columns of the table: what several of them are about, and their titles."""
    return [
        *(("", title) for title in ("task", "metric", "documents")),
        *(("detects", f"({percent(power, 0)})") for power in POWERS),
        *(("documents for", f"{times}× tolerance ({percent(POWERS[0], 0)})") for times in MULTIPLES),
    ]


def row_of(own: Power) -> list[str]:
    """The power of one metric as people read it."""
    losses = [_in_words(own.found[power], own.kind) for power in POWERS]
    counts = [f"{_documents(n)} for {_in_words(loss, own.kind)}" for loss, n in own.needed.items()]
    return [own.task, own.metric, count(own.documents), *losses, *counts]


def reading(rows: Sequence[Power]) -> str:
    """How to read the first row that finds anything."""
    row = next((row for row in rows if all(map(math.isfinite, row.found.values()))), None)
    if row is None:
        return "There are too few documents to detect any loss."
    seen = [f"{_in_words(row.found[power], row.kind)} with {percent(power, 0)} probability" for power in POWERS]
    needed = [
        f"{_documents(n)} documents for {_in_words(loss, row.kind)} ({times} times the tolerance)"
        for times, (loss, n) in zip(MULTIPLES, row.needed.items(), strict=True)
    ]
    return (
        f"How to read it: with {count(row.documents)} documents of {row.task}, the gate detects a loss in {row.metric} "
        f"of {', and of '.join(seen)}.\n"
        f"To detect a loss with {percent(POWERS[0], 0)} probability, it needs {', and '.join(needed)}."
    )


def _in_words(loss: float, kind: MetricKind) -> str:
    if math.isinf(loss):
        return "none"
    if kind == "perplexity" and loss > MAX_PERCENT:
        return f"over {count(MAX_PERCENT)}%"
    if loss >= 1000:
        return f"{count(round(loss))}{UNITS[kind]}"
    text = f"{significant(loss)}{UNITS[kind]}"
    return text.removesuffix("s") if text.startswith("1 ") else text


def _documents(needed: float) -> str:
    return count(int(needed)) if math.isfinite(needed) else "infinitely many"


def _power(own: Sequence[Hypothesis], size: int) -> Power:
    first = own[0]
    kind, alpha = first.kind, first.alpha / size
    documents = round(median(len(h.losses) for h in own))
    answers = kind == "accuracy" and all(is_whole(h.losses) for h in own)
    noise = Noise(median(_spread(h) for h in own), median(_stretch(h) for h in own), answers)
    tolerance = median(h.tolerance for h in own)  # KL's depends on the cell
    allowed = mean_loss(kind, tolerance)
    unit = tolerance or in_unit(kind, first.unit)

    def needed(loss: float) -> float:
        return documents_needed(mean_loss(kind, loss), allowed, noise, alpha, POWERS[0])

    return Power(
        task=first.task,
        metric=first.metric,
        kind=kind,
        documents=documents,
        found={p: in_unit(kind, smallest_loss(documents, allowed, noise, alpha, p)) for p in POWERS},
        needed={times * unit: needed(times * unit) for times in MULTIPLES},
    )


def recorded_noise(folder: Path, against: Path | None = None) -> list[Hypothesis]:
    """The hypotheses whose losses are used as noise; an error if there are none."""
    results = read_results(folder)
    settings = settings_of(results)
    cells = draws_of_cells(list(_pairs(results, against, settings)))
    found = [list(_hypotheses(pairs, settings)) for pairs in cells]
    # Cells that did not change show no noise. Among many, they would make the median 0.
    table = [h for own in found if any(each.changed_documents for each in own) for h in own]
    if any(found) and not table:
        raise CheckError(
            f"{folder} and {against or 'its unquantized models'} have the same scores in every document, so there is "
            "no noise to measure. Compare runs that differ."
        )
    if not table:
        raise CheckError(
            f"{folder} has no pair of cells to measure noise from: it needs a quantized and an unquantized cell of the "
            "same checkpoint, or another run to compare with (--against)."
        )
    return table


def _pairs(
    results: Results, against: Path | None, settings: GateSettings
) -> Iterator[tuple[StoredRecord, StoredRecord]]:
    """Pairs of records whose differences are the noise: two runs, or quantized cells and their unquantized ones."""
    if against is not None:
        yield from join(results, read_results(against), settings).pairs
        return
    done = [stored for stored in results.current if stored.record.state == "done"]
    unquantized = {_twin(stored): stored for stored in done if stored.record.cell.label == UNQUANTIZED}
    for stored in done:
        if stored.record.cell.label != UNQUANTIZED and _twin(stored) in unquantized:
            yield unquantized[_twin(stored)], stored


def _twin(stored: StoredRecord) -> tuple[str, str]:
    return stored.record.cell.family, stored.record.cell.attention


def _hypotheses(pairs: Sequence[Pair], settings: GateSettings) -> Iterator[Hypothesis]:
    record, own = pairs[0][1].record, list[Hypothesis]()
    for paired in pair_documents(*pairs):
        if isinstance(paired, PairedDocuments):
            metrics = tuple(metric for metric in record.metrics if metric.task == paired.task)
            own += hypotheses(record.cell.of_all_draws, paired, metrics, settings)
    for h in with_pooled(own, settings):
        # The unquantized model has no KL of which to take a percentage: use the quantized model's.
        share = settings.tolerance(h.kind, h.task, h.metric)
        yield replace(h, tolerance=in_unit_of_losses(h.kind, share, max(h.before, h.after), settings.tolerances))


def _spread(hypothesis: Hypothesis) -> float:
    residuals = hypothesis.losses - ratio(hypothesis.losses, hypothesis.weights) * hypothesis.weights
    return float(np.sqrt(np.mean(residuals**2)) / hypothesis.weights.mean())


def _stretch(hypothesis: Hypothesis) -> float:
    return float(np.mean(hypothesis.weights**2) / hypothesis.weights.mean() ** 2)
