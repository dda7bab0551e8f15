"""How many documents the gate needs to see which loss, from the paired noise of recorded results.

With d a document's loss, the test's score over n documents is about normal around √n·δ / √(σ² + δ²), where δ is the
mean loss and σ the spread of d. A loss is found when the score reaches what Holm asks of the first hypothesis of a
table, and when the observed loss is above its tolerance too.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, median

import numpy as np
from tabulate import tabulate

from qbench.gate.hypotheses import UNITS, Hypothesis, hypotheses, in_unit, mean_loss
from qbench.gate.pairing import CheckError, Pair, PairedDocuments, draws_of_cells, join, pair_documents
from qbench.gate.settings import GateSettings, MetricKind
from qbench.gate.sign_flip import ratio
from qbench.gate.verdict import settings_of
from qbench.numbers import count, percent, significant
from qbench.records.audit import UNQUANTIZED
from qbench.records.store import Results, StoredRecord, read_results

POWERS = (0.8, 0.9)
MULTIPLES = (2, 4)  # of the tolerance: the losses whose number of documents is shown, at the first power


@dataclass(frozen=True)
class Power:
    """What can be seen of one metric of a task, at the median of the cells."""

    task: str
    metric: str
    kind: MetricKind
    documents: int
    found: dict[float, float]  # by power: the smallest loss that is found at these documents
    needed: dict[float, int]  # by loss: the documents to find it with the first power


def power(folder: Path, against: Path | None = None) -> list[Power]:
    """Power by task and metric, for a table of as many hypotheses as the folder's."""
    results = read_results(folder)
    settings = settings_of(results)
    cells = draws_of_cells(list(_pairs(results, against, settings)))
    table = [h for pairs in cells for h in _hypotheses(pairs, settings)]
    if not table:
        raise CheckError(
            f"{folder} has no pair of cells to take the noise from: quantized cells and the unquantized one of the "
            "same checkpoint, or those of another run (--against)."
        )
    by_metric: dict[tuple[str, str], list[Hypothesis]] = defaultdict(list)
    for hypothesis in table:
        by_metric[hypothesis.task, hypothesis.metric].append(hypothesis)
    return [_power(own, len(table)) for own in by_metric.values()]


@dataclass(frozen=True)
class Noise:
    """How documents' losses scatter: their spread, and the mean square of weights over the square of their mean."""

    spread: float
    stretch: float = 1.0


def documents_needed(loss: float, tolerance: float, noise: Noise, alpha: float, power: float) -> float:
    """Documents to find a mean loss at this alpha and power; infinite for what the tolerance lets pass."""
    if loss <= tolerance:
        return math.inf
    z_alpha, z_power = NormalDist().inv_cdf(1 - alpha), NormalDist().inv_cdf(power)
    size = math.hypot(noise.spread, loss * math.sqrt(noise.stretch))  # √E[d²], what the score divides by
    for_chance = ((z_alpha * size + z_power * noise.spread) / loss) ** 2
    for_tolerance = (z_power * noise.spread / (loss - tolerance)) ** 2
    return max(for_chance, for_tolerance)


def smallest_loss(documents: int, tolerance: float, noise: Noise, alpha: float, power: float) -> float:
    """The mean loss that this many documents find; infinite where they are too few for any."""
    low, high = tolerance, 2 * max(tolerance, noise.spread, 1e-9)
    while documents_needed(high, tolerance, noise, alpha, power) > documents:
        low, high = high, 2 * high
        if high > 1e9 * max(noise.spread, tolerance):
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        enough = documents_needed(middle, tolerance, noise, alpha, power) <= documents
        low, high = (low, middle) if enough else (middle, high)
    return high


def to_text(rows: Sequence[Power], style: str = "text") -> str:
    """The powers as a table for people, and how to read a row of it."""
    markdown = style == "markdown"
    header = ["task", "metric", "documents", *(f"loss seen\n({percent(power, 0)})" for power in POWERS)]
    header += [f"documents for\n{times}× tolerance ({percent(POWERS[0], 0)})" for times in MULTIPLES]
    shown = []
    for row in rows:
        losses = [_in_words(row.found[power], row.kind) for power in POWERS]
        counts = [f"{count(n)} for {_in_words(loss, row.kind)}" for loss, n in row.needed.items()]
        shown.append([row.task, row.metric, count(row.documents), *losses, *counts])
    if markdown:  # whose cells are of one line
        header = [name.replace("\n", " ") for name in header]
    table = tabulate(shown, header, tablefmt="github" if markdown else "simple", disable_numparse=True)
    return f"{table}\n\n{_reading(rows)}"


def _reading(rows: Sequence[Power]) -> str:
    """What the first row says that sees anything."""
    row = next((row for row in rows if all(map(math.isfinite, row.found.values()))), None)
    if row is None:
        return "The documents are too few to see any loss."
    seen = [f"{_in_words(row.found[power], row.kind)} with a chance of {percent(power, 0)}" for power in POWERS]
    needed = [
        f"{_in_words(loss, row.kind)} ({times} times the tolerance) takes {count(n)} documents"
        for times, (loss, n) in zip(MULTIPLES, row.needed.items(), strict=True)
    ]
    return (
        f"How to read it: the {count(row.documents)} documents of {row.task} show a loss in {row.metric} of "
        f"{', and one of '.join(seen)}.\n"
        f"To see, with a chance of {percent(POWERS[0], 0)}, a loss of {', one of '.join(needed)}."
    )


def _in_words(loss: float, kind: MetricKind) -> str:
    if math.isinf(loss):
        return "none"
    text = f"{significant(loss)}{UNITS[kind]}"
    return text.removesuffix("s") if text.startswith("1 ") else text


def _power(own: Sequence[Hypothesis], size: int) -> Power:
    first = own[0]
    kind, alpha = first.kind, first.alpha / size
    documents = round(median(len(h.losses) for h in own))
    noise = Noise(median(_spread(h) for h in own), median(_stretch(h) for h in own))
    allowed = mean_loss(kind, first.tolerance)
    # A tolerance of 0 has no multiples; the default one says what size matters.
    unit = first.tolerance or getattr(GateSettings().tolerances, kind)

    def needed(loss: float) -> int:
        return math.ceil(documents_needed(mean_loss(kind, loss), allowed, noise, alpha, POWERS[0]))

    return Power(
        task=first.task,
        metric=first.metric,
        kind=kind,
        documents=documents,
        found={p: in_unit(kind, smallest_loss(documents, allowed, noise, alpha, p)) for p in POWERS},
        needed={times * unit: needed(times * unit) for times in MULTIPLES},
    )


def _pairs(
    results: Results, against: Path | None, settings: GateSettings
) -> Iterator[tuple[StoredRecord, StoredRecord]]:
    """Records whose differences stand for noise: of two runs, or of quantized cells and their unquantized ones."""
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
    record = pairs[0][1].record
    for paired in pair_documents(*pairs):
        if isinstance(paired, PairedDocuments):
            metrics = tuple(metric for metric in record.metrics if metric.task == paired.task)
            yield from hypotheses(record.cell.of_all_draws, paired, metrics, settings)


def _spread(hypothesis: Hypothesis) -> float:
    residuals = hypothesis.losses - ratio(hypothesis.losses, hypothesis.weights) * hypothesis.weights
    return float(np.sqrt(np.mean(residuals**2)) / hypothesis.weights.mean())


def _stretch(hypothesis: Hypothesis) -> float:
    return float(np.mean(hypothesis.weights**2) / hypothesis.weights.mean() ** 2)
