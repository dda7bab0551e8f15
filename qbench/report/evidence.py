"""Intervals, flips and chance of the scores of cells, from their per-document results."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qbench.records.schema import CellRef
from qbench.report.metrics import CHOICES, Measure, base, is_share
from qbench.report.outcomes import Outcome, Outcomes

if TYPE_CHECKING:
    from qbench.report.bootstrap import Interval, Resampled
    from qbench.report.documents import TaskDocuments


@dataclass(frozen=True)
class Flips:
    """Documents whose answer is another one than the unquantized model's, in percent of all."""

    right_to_wrong: float
    wrong_to_right: float


@dataclass(frozen=True)
class Evidence:
    """The documents of every cell, and its scores resampled; empty for published numbers."""

    documents: Mapping[CellRef, Mapping[str, "TaskDocuments"]]
    resampled: Mapping[tuple[CellRef, str, str], "Resampled"]  # by cell, task and metric

    def interval(self, measure: Measure, *terms: tuple[int, Outcome]) -> "Interval | None":
        """The paired interval of a sum of scores, each with its sign; None where there is none to be had."""
        if self.why_none(measure, *(outcome for _, outcome in terms)) is not None:
            return None
        from qbench.report.bootstrap import interval

        key = (measure.task, measure.metric)
        return interval(*((sign, self.resampled[outcome.cell, *key]) for sign, outcome in terms))

    def why_none(self, measure: Measure, *outcomes: Outcome) -> str | None:
        """Why there is no interval, in a sentence; empty where nobody would expect one; None where there is one."""
        cells = [outcome.cell for outcome in outcomes]
        if not any(cell in self.documents for cell in cells):
            return ""
        for cell in cells:
            if measure.task not in self.documents.get(cell, {}):
                return f"No interval: {cell.name} has no per-document results of {measure.task}."
            if (cell, measure.task, measure.metric) not in self.resampled:
                return f"No interval: {measure.metric} of {measure.task} cannot be computed from the documents' values."
        seen = [self.documents[cell][measure.task] for cell in cells]
        if len({task.fingerprint for task in seen}) > 1:
            names = " and ".join(cell.name for cell in cells)
            return f"No interval: {names} did not see the same documents of this task."
        return None if seen[0].count > 1 else f"No interval: there is one document of {measure.task}."

    def flips(self, measure: Measure, quantized: Outcome, baseline: Outcome) -> Flips | None:
        """How many answers changed; None where there are no answers, or no documents in common."""
        if not is_share(measure.metric) or self.why_none(measure, quantized, baseline) is not None:
            return None
        before, after = (
            self.documents[outcome.cell][measure.task].metrics[measure.metric].values > 0.5
            for outcome in (baseline, quantized)
        )
        return Flips(100 * float((before & ~after).mean()), 100 * float((~before & after).mean()))

    def chance(self, measure: Measure, outcome: Outcome) -> float | None:
        """The accuracy of guessing in percent, from the documents or, without them, from what is known of the task."""
        if not base(measure.metric).startswith("acc"):
            return None
        if task := self.documents.get(outcome.cell, {}).get(measure.task):
            return task.chance
        return 100 / CHOICES[measure.task] if measure.task in CHOICES else None


def gather(outcomes: Outcomes) -> Evidence:
    """Read the documents of all cells that have scores, and resample them together."""
    with_samples = [(c.cell, c.stored) for c in outcomes.cells if c.scores and c.stored and c.stored.has_samples]
    if not with_samples:  # published numbers need neither numpy nor pyarrow
        return Evidence({}, {})
    from qbench.report.bootstrap import FACTORS, Column, resample
    from qbench.report.documents import read_documents

    documents, columns = {}, {}
    for cell, stored in with_samples:
        documents[cell] = read_documents(stored)
        for metric in stored.record.metrics:
            task = documents[cell].get(metric.task)
            if task and metric.metric in task.metrics and metric.aggregation in FACTORS:
                values, share = task.metrics[metric.metric], is_share(metric.metric)
                columns[cell, metric.task, metric.metric] = Column(values, metric.aggregation, share)
    return Evidence(documents, dict(zip(columns, resample(list(columns.values())), strict=True)))
