"""Intervals, flips and chance of the scores of cells, from their per-document results."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qbench.records.metrics import TASKS, base_name, is_share
from qbench.records.schema import CellRef
from qbench.report.metrics import Measure
from qbench.report.results import CellResult, ResultSet

if TYPE_CHECKING:
    from qbench.report.bootstrap import Interval, Resampled
    from qbench.report.values import TaskDocuments


@dataclass(frozen=True)
class NoInterval:
    """Why there is no interval, in a sentence."""

    reason: str
    expected: bool = False  # of published numbers: no note at each of them


WITHOUT_DOCUMENTS = NoInterval("There are no per-document results.", expected=True)


@dataclass(frozen=True)
class Flips:
    """Documents whose answer is another one than the unquantized model's, in percent of all."""

    right_to_wrong: float
    wrong_to_right: float


@dataclass(frozen=True)
class DocumentEvidence:
    """The documents of every cell, and its scores resampled; empty for published numbers."""

    documents: Mapping[CellRef, Mapping[str, "TaskDocuments"]]
    resampled: Mapping[tuple[CellRef, str, str], "Resampled"]  # by cell, task and metric

    def interval(self, measure: Measure, *terms: tuple[int, CellResult]) -> "Interval | NoInterval":
        """The paired interval of a sum of scores, each with its sign; or why there is none."""
        if obstacle := self.obstacle(measure, *(result for _, result in terms)):
            return obstacle
        from qbench.report.bootstrap import interval

        task, metric = measure.task, measure.metric
        found = interval(*((sign, self.resampled[result.cell, task, metric]) for sign, result in terms))
        return found or NoInterval(f"No interval: too few documents of {task} have a value of {metric}.")

    def obstacle(self, measure: Measure, *results: CellResult) -> NoInterval | None:
        """What keeps these scores from being compared document by document; None if nothing does."""
        cells = [result.cell for result in results]
        if not any(cell in self.documents for cell in cells):
            return WITHOUT_DOCUMENTS
        task, metric = measure.task, measure.metric
        for cell in cells:
            if task not in self.documents.get(cell, {}):
                return NoInterval(f"No interval: {cell.name} has no per-document results of {task}.")
            if (cell, task, metric) not in self.resampled:
                return NoInterval(f"No interval: {metric} of {task} cannot be computed from the documents' values.")
        seen = [self.documents[cell][task] for cell in cells]
        if len({own.fingerprint for own in seen}) > 1:
            names = " and ".join(cell.name for cell in cells)
            return NoInterval(f"No interval: {names} did not see the same documents of this task.")
        return None if seen[0].count > 1 else NoInterval(f"No interval: there is one document of {task}.")

    def flips(self, measure: Measure, quantized: CellResult, unquantized: CellResult) -> Flips | None:
        """How many answers changed; None if there are no answers, or no documents in common."""
        if not is_share(measure.metric) or self.obstacle(measure, quantized, unquantized):
            return None
        before, after = (
            self.documents[result.cell][measure.task].metrics[measure.metric].values > 0.5
            for result in (unquantized, quantized)
        )
        return Flips(100 * float((before & ~after).mean()), 100 * float((~before & after).mean()))

    def chance(self, measure: Measure, result: CellResult) -> float | None:
        """The accuracy of guessing in percent, from the documents or else from what is known of the task."""
        if not base_name(measure.metric).startswith("acc"):
            return None
        if documents := self.documents.get(result.cell, {}).get(measure.task):
            return documents.chance
        known = TASKS.get(measure.task)
        return 100 / known.choices if known and known.choices else None


def gather(results: ResultSet) -> DocumentEvidence:
    """Read the documents of all cells that have scores, and resample them together."""
    with_samples = [(c.cell, c.stored) for c in results.cells if c.scores and c.stored and c.stored.has_samples]
    if not with_samples:  # published numbers need neither numpy nor pyarrow
        return DocumentEvidence({}, {})
    from qbench.records.samples import AGGREGATIONS
    from qbench.report.bootstrap import MetricDocuments, resample
    from qbench.report.values import read_documents

    documents, measured = {}, {}
    for cell, stored in with_samples:
        documents[cell] = read_documents(stored)
        for metric in stored.record.metrics:
            task = documents[cell].get(metric.task)
            aggregation = AGGREGATIONS.get(metric.aggregation)
            if task and metric.metric in task.metrics and aggregation:
                values, share = task.metrics[metric.metric], is_share(metric.metric)
                measured[cell, metric.task, metric.metric] = MetricDocuments(values, aggregation, share)
    return DocumentEvidence(documents, dict(zip(measured, resample(list(measured.values())), strict=True)))
