"""Calibration draws as one result: a quantization has one row, and its scores are means over the draws."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, variance

from qbench.errors import some
from qbench.records.schema import MetricValue
from qbench.report.results import CellResult, Gap, ReportError, Score


def with_draws_joined(results: Iterable[CellResult]) -> list[CellResult]:
    """The results with the draws of each cell as one, in the place of the first."""
    cells: dict[tuple[str, str, str], list[CellResult]] = {}
    for result in results:
        cells.setdefault((result.cell.family, result.cell.attention, result.cell.label), []).append(result)
    return [own[0] if len(own) == 1 and own[0].cell.draw is None else _joined(own) for own in cells.values()]


def _joined(draws: Sequence[CellResult]) -> CellResult:
    """One result for the draws of a cell that have scores; if none has, the gap of the first."""
    cell = draws[0].cell.of_all_draws
    if any(result.cell.draw is None for result in draws):
        raise ReportError(
            f"{cell.name} has records with several calibration draws and a record without; remove one or the other."
        )
    draws = sorted(_each_once(draws), key=lambda result: result.cell.draw or 0)
    done = [result for result in draws if result.scores]
    if not done:
        return CellResult(cell, gap=draws[0].gap, draws=tuple(draws))
    keys = [key for key in done[0].scores if all(key in result.scores for result in done)]
    notes = [*dict.fromkeys(result.caveat for result in done if result.caveat), *_lacking(draws, done)]
    scores = {key: _mean([result.scores[key] for result in done], _is_exponential(done[0], key)) for key in keys}
    return CellResult(cell, scores, caveat=" ".join(notes), draws=tuple(draws))


def over_draws(result: CellResult, draws: Sequence[int | None]) -> CellResult:
    """The result over some of its calibration draws; unchanged if it has none of them, or no others."""
    chosen = [part for part in result.draws if part.cell.draw in draws]
    all_of_them = len(chosen) == sum(bool(part.scores) for part in result.draws)
    return _joined(chosen) if chosen and not all_of_them else result


def _each_once(draws: Sequence[CellResult]) -> list[CellResult]:
    """The draws; one calibrated on the same windows as another adds nothing, and becomes a gap."""
    seen: dict[str, str] = {}
    found = []
    for result in draws:
        windows = result.stored.record.identity.what.calibration if result.stored else None
        first = seen.setdefault(windows or result.cell.name, result.cell.name)
        if result.scores and first != result.cell.name:
            reason = f"{result.cell.name} was calibrated on the same windows as {first}, so it counts once."
            result = replace(result, scores={}, gap=Gap("altered", reason))
        found.append(result)
    return found


def _lacking(draws: Sequence[CellResult], done: Sequence[CellResult]) -> list[str]:
    """A sentence if draws failed or are missing."""
    if len(done) == len(draws):
        return []
    gaps = dict.fromkeys(result.gap.reason for result in draws if result.gap and not result.scores)
    return [f"Mean of {len(done)} of {len(draws)} calibration draws. {some(list(gaps))}"]


def _is_exponential(result: CellResult, key: tuple[str, str]) -> bool:
    """Whether a metric is a perplexity: its logarithm is averaged and tested."""
    from qbench.records.samples import AGGREGATIONS  # published numbers need neither numpy nor pyarrow

    metrics: Sequence[MetricValue] = result.stored.record.metrics if result.stored else ()
    found = next((AGGREGATIONS.get(m.aggregation) for m in metrics if (m.task, m.metric) == key), None)
    return found is not None and found.exponential


def _mean(scores: Sequence[Score], exponential: bool) -> Score:
    """The mean over draws, on the scale of the test: the geometric mean for perplexities.

    Its standard error has two parts: the spread over draws, and that over documents, which is at most the mean of the
    draws' standard errors because they share the documents.
    """
    values = [score.value for score in scores]
    mean = math.exp(fmean(map(math.log, values))) if exponential else fmean(values)
    errors = [score.stderr for score in scores]
    stderr = None
    if None not in errors:
        spread = variance(values) / len(values) if len(values) > 1 else 0.0
        stderr = math.hypot(fmean(error for error in errors if error is not None), math.sqrt(spread))
    documents = {score.documents for score in scores}
    return Score(mean, stderr, documents.pop() if len(documents) == 1 else None)
