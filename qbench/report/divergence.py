"""KL from the unquantized model: its figures over tokens as a table and as rows, and the points of its plot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from qbench.numbers import count, fixed, percent, signed_significant, significant
from qbench.records.metrics import KL, METRICS
from qbench.records.schema import Divergence
from qbench.report.attentions import kind_title
from qbench.report.delta import ReportData
from qbench.report.metrics import Measure, task_name
from qbench.report.results import CellResult, FamilyQuantization, Score
from qbench.report.tables import Column, Field, Table, number_field, quantization_name
from qbench.report.tidy import DataRow

READ_KL = (
    "KL(unquantized ‖ quantized) in nats per token: mean, median, 99th and 99.9th percentile over tokens. Top-1: "
    "share of positions where both models rank the same token first. Δp: root mean square change of the right token's "
    "probability. ln ratio: ln(quantized ÷ unquantized perplexity), per token. r: correlation of the right token's "
    "log-probabilities. The unquantized row is the noise floor: the same model with different batches."
)
FIGURES = ("median", "p99", "p999", "same_top", "rms_change", "nats_before", "log_ratio", "correlation")


@dataclass(frozen=True)
class ModelDivergence:
    """One model under one quantization, on one task: means over the calibration draws."""

    quantization: FamilyQuantization
    attention: str
    task: str
    tokens: int
    mean: Score
    figures: dict[str, float | None]  # by the fields of records.schema.Divergence
    bits: float | None  # per weight, measured; None if no weight is quantized


def divergences(report: ReportData) -> list[ModelDivergence]:
    """All that were measured, by family and quantization, the models side by side."""
    found = []
    for about in report.results.quantizations():
        for attention in report.results.kinds_of(about.family):
            result = report.results.twin(about, attention)
            by_draw = [dict(_by_task(part)) for part in result.parts if part.scores]
            for task in by_draw[0] if by_draw else ():
                own = [draw[task] for draw in by_draw if task in draw]
                score = result.score(Measure(task, KL, METRICS[KL].better))
                if isinstance(score, Score):
                    figures = {name: _mean([getattr(each, name) for each in own]) for name in FIGURES}
                    bits = _measured_bits(result)
                    found.append(ModelDivergence(about, attention, task, own[0].tokens, score, figures, bits))
    return found


def has_kl(report: ReportData) -> bool:
    """Whether any cell has KL."""
    return any(part.stored and part.stored.record.divergences for part in report.results.parts)


def kl_tables(report: ReportData) -> list[Table]:
    """One table per family."""
    return [
        _table(family, list(own)) for family, own in groupby(divergences(report), lambda own: own.quantization.family)
    ]


def _table(family: str, found: Sequence[ModelDivergence]) -> Table:
    """The table of one family. A single task is in the caption: on a phone, its column would hide the numbers."""
    tasks, tokens = {own.task for own in found}, {own.tokens for own in found}
    single = len(tasks) == 1 and len(tokens) == 1
    where = f"{count(found[0].tokens)} tokens of {task_name(found[0].task)}" if single else "the tokens of each task"
    columns = [
        *(Column(title, "l") for title in ("Task", "Method", "Quantization", "Attention")),
        Column("Tokens"),
        *(Column(title, group="KL") for title in ("Mean", "Median", "99%", "99.9%")),
        *(Column(title) for title in ("Top-1", "Δp", "ln ratio", "r")),
    ]
    shown = [n for n, column in enumerate(columns) if not (single and column.title in ("Task", "Tokens"))]
    table = Table(
        name=f"kl-{family}",
        title=f"{family}: KL from the unquantized model",
        caption=f"KL divergence of the {family} models from the unquantized ones, over {where}.",
        reading=[READ_KL],
        columns=[columns[n] for n in shown],
        heads=2 if single else 3,
    )
    lines = map(_line, sorted(found, key=lambda own: own.task))
    table.rows += [[line[n] for n in shown] for line in lines]
    return table


def kl_rows(report: ReportData) -> list[DataRow]:
    """One row per record and task: calibration draws are not joined."""
    return list(_rows(report))


def why_no_kl(report: ReportData) -> str:
    """Why results have no KL, in a sentence."""
    measures = report.results.measures
    if whole := [m.task for m in measures if m.metric == "word_perplexity"]:
        return f"The records of {whole[0]} are older than KL, or were not made by qbench; run the recipe again."
    tasks = ", ".join(dict.fromkeys(m.task for m in measures))
    return f"KL needs a task that scores whole pages, such as wikitext; the tasks are {tasks}."


def _rows(report: ReportData) -> Iterator[dict[str, Any]]:
    for part in (part for part in report.results.parts if part.scores):
        cell = part.cell
        for task, own in _by_task(part):
            yield {
                **{name: getattr(cell, name) for name in ("family", "attention", "method", "bits", "label", "draw")},
                "task": task,
                "documents": own.documents,
                "tokens": own.tokens,
                "bits_per_weight": _measured_bits(part),
                "mean": part.scores[task, KL].value,
                "stderr": part.scores[task, KL].stderr,
                **{name: getattr(own, name) for name in FIGURES},
            }


def _by_task(part: CellResult) -> Iterator[tuple[str, Divergence]]:
    for own in part.stored.record.divergences if part.stored else ():
        if (own.task, KL) in part.scores:
            yield own.task, own


def _measured_bits(result: CellResult) -> float | None:
    stored = result.parts[0].stored  # draws take the same bits
    audit = stored.record.audit if stored else None
    return 8 * (audit.code_bytes + audit.metadata_bytes) / audit.weights if audit and audit.weights else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _line(own: ModelDivergence) -> list[Field]:
    about, figures = own.quantization, own.figures
    names = (task_name(own.task), about.method_title, quantization_name(about), kind_title(own.attention))
    return [
        *map(Field, names),
        Field(count(own.tokens), own.tokens),
        Field(significant(own.mean.value), own.mean.value),
        *(number_field(figures[name], significant) for name in ("median", "p99", "p999")),
        number_field(figures["same_top"], lambda share: percent(share, 2)),
        number_field(figures["rms_change"], significant),
        number_field(figures["log_ratio"], signed_significant),
        number_field(figures["correlation"], lambda r: fixed(r, 4)),
    ]
