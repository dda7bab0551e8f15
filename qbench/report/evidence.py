"""Intervals, flips and chance levels of cells' scores, from their per-document results."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from qbench.records.metrics import TASKS, base_name, is_share
from qbench.records.schema import CellRef
from qbench.report.metrics import Measure
from qbench.report.results import CellResult, ResultSet

if TYPE_CHECKING:
    from qbench.records.documents import TaskDocuments
    from qbench.report.bootstrap import Interval, Resampled


@dataclass(frozen=True)
class NoInterval:
    """Why there is no interval, in a sentence."""

    reason: str
    expected: bool = False  # for published numbers: no note on each of them


WITHOUT_DOCUMENTS = NoInterval("There are no per-document results.", expected=True)


@dataclass(frozen=True)
class Flips:
    """Documents whose answer differs from the unquantized model's, in percent of all."""

    right_to_wrong: float
    wrong_to_right: float


@dataclass(frozen=True)
class DocumentEvidence:
    """The documents of every cell, and its scores resampled; empty for published numbers."""

    documents: Mapping[CellRef, Mapping[str, "TaskDocuments"]]
    resampled: Mapping[tuple[CellRef, str, str], "Resampled"]  # by cell, task and metric

    def interval(self, measure: Measure, *terms: tuple[int, CellResult]) -> "Interval | NoInterval":
        """The paired interval of a sum of scores, each with its sign; or why there is none.

        It uses the calibration draws that all terms have. With one draw nothing can be judged, so zero is not excluded.
        """
        results = [result for _, result in terms]
        if obstacle := self.obstacle(measure, *results):
            return obstacle
        from qbench.report.bootstrap import interval

        task, metric = measure.task, measure.metric
        cells = [[result.of_draw(draw).cell for draw in common_draws(*results)] for result in results]
        by_draw = [[self.resampled[cell, task, metric] for cell in own] for own in cells]
        found = interval(*((sign, own) for (sign, _), own in zip(terms, by_draw, strict=True)))
        if found is None:
            return NoInterval(f"No interval: too few documents of {task} have a value of {metric}.")
        return replace(found, excludes_zero=False, estimate=None) if one_draw(*results) else found

    def obstacle(self, measure: Measure, *results: CellResult) -> NoInterval | None:
        """Why these scores cannot be compared document by document; None if they can."""
        draws = common_draws(*results)
        cells = [result.of_draw(draw).cell for draw in draws for result in results]
        if not draws:
            names = " and ".join(result.cell.name for result in results if result.draws)
            return NoInterval(f"No interval: {names} have no calibration draw in common.")
        if not any(cell in self.documents for cell in cells):
            return WITHOUT_DOCUMENTS
        task, metric = measure.task, measure.metric
        for cell in cells:
            if task not in self.documents.get(cell, {}):
                return NoInterval(f"No interval: {cell.name} has no per-document results of {task}.")
            if (cell, task, metric) not in self.resampled:
                return NoInterval(f"No interval: {metric} of {task} cannot be computed from the documents' values.")
        seen = [self.documents[cell][task].keys for cell in cells]
        if any(own is not seen[0] for own in seen):
            names = " and ".join(dict.fromkeys(cell.name for cell in cells))
            return NoInterval(f"No interval: {names} did not see the same documents of this task.")
        return None if len(seen[0]) > 1 else NoInterval(f"No interval: {task} has only one document.")

    def flips(self, measure: Measure, quantized: CellResult, unquantized: CellResult) -> Flips | None:
        """How many answers changed; None if there are no answers, or no documents in common."""
        if not is_share(measure.metric) or self.obstacle(measure, quantized, unquantized):
            return None
        before, *after = (
            self.documents[cell][measure.task].metrics[measure.metric].values > 0.5
            for cell in (unquantized.cell, *(part.cell for part in quantized.parts if part.scores))
        )
        changed = [(float((before & ~own).mean()), float((~before & own).mean())) for own in after]
        lost, gained = (100 * fmean(shares) for shares in zip(*changed, strict=True))
        return Flips(lost, gained)

    def chance(self, measure: Measure, result: CellResult) -> float | None:
        """The accuracy of guessing in percent, from the documents or else from what is known of the task."""
        if not base_name(measure.metric).startswith("acc"):
            return None
        for part in result.parts:
            if documents := self.documents.get(part.cell, {}).get(measure.task):
                return documents.chance
        known = TASKS.get(measure.task)
        return 100 / known.choices if known and known.choices else None


def common_draws(*results: CellResult) -> list[int | None]:
    """The calibration draws for which all results with draws have scores; [None] if no result has draws.

    result.of_draw(draw).cell is then the cell under which DocumentEvidence has the documents.
    """
    have = [{part.cell.draw for part in result.draws if part.scores} for result in results if result.draws]
    return sorted(set.intersection(*have), key=lambda draw: draw or 0) if have else [None]


def one_draw(*results: CellResult) -> bool:
    """Whether a calibrated result rests on a single calibration draw, which says nothing about others."""
    counts = [result.calibration_draws for result in results]
    return 1 in counts or (any(counts) and len(common_draws(*results)) == 1)


def gather(results: ResultSet) -> DocumentEvidence:
    """Read the documents of all cells that have scores, and resample them together."""
    files = {part.cell: part.documents for part in results.parts if part.scores and part.documents is not None}
    if not files:  # published numbers need neither numpy nor pyarrow
        return DocumentEvidence({}, {})
    from qbench.records.samples import AGGREGATIONS
    from qbench.report.bootstrap import MetricDocuments, resample

    documents, measured = in_common_order(files), {}
    for cell, tasks in documents.items():
        for name, task in tasks.items():
            for metric, values in task.metrics.items():
                if aggregation := AGGREGATIONS.get(values.aggregation):
                    own_values = MetricDocuments(task.distinct(values), aggregation, is_share(metric))
                    measured[cell, name, metric] = own_values
    resampled = dict(zip(measured, resample(list(measured.values())), strict=True))
    return DocumentEvidence(documents, resampled)


def in_common_order(
    documents: Mapping[CellRef, Mapping[str, "TaskDocuments"]],
) -> Mapping[CellRef, Mapping[str, "TaskDocuments"]]:
    """The documents of each cell in the order of the first cell with the same ones, which then have the same keys."""
    from qbench.records.documents import pairing

    orders: dict[str, list[TaskDocuments]] = {}  # by task: one for each set of documents
    found: dict[CellRef, dict[str, TaskDocuments]] = {}
    for cell, tasks in documents.items():
        found[cell] = {}
        for name, own in tasks.items():
            known = orders.setdefault(name, [])
            for first in known:
                if own.keys is first.keys:
                    break
                if (paired := pairing([first.keys, own.keys])).complete:
                    own = replace(paired.of([first, own])[1], keys=first.keys)
                    break
            else:
                known.append(own)
            found[cell][name] = own
    return found
