"""Ours beside published numbers: the difference, and whether the published number is within our interval."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from qbench.numbers import interval, score, signed, signed_interval
from qbench.report.attentions import kind_name, kind_title
from qbench.report.delta import Difference, ReportData
from qbench.report.evidence import NoInterval
from qbench.report.metrics import Measure, metric_name, task_name
from qbench.report.published import ROUNDING
from qbench.report.results import NOTHING, FamilyQuantization, Gap, ReportError, Score
from qbench.report.tables import Column, Field, Table, quantization_name, score_field
from qbench.report.tidy import DataRow

if TYPE_CHECKING:
    from qbench.report.bootstrap import Interval

DELTA = "delta"
Ours = tuple[Score | Gap, "Interval | None"]


@dataclass(frozen=True)
class Comparison:
    """One of our numbers and the published one."""

    quantization: FamilyQuantization  # ours
    measure: Measure
    number: str  # a kind of attention, or delta; with several kinds beside the reference, delta and the kind
    ours: Score | Gap
    published: float
    interval: "Interval | None"  # of ours

    @property
    def is_delta(self) -> bool:
        """Whether it is a difference from the reference."""
        return self.number.split(" ")[0] == DELTA

    @property
    def difference(self) -> float | None:
        """Ours − published."""
        return None if isinstance(self.ours, Gap) else self.ours.value - self.published

    @property
    def within(self) -> bool | None:
        """Whether the published number is within our interval; None if there is no interval."""
        if self.interval is None:
            return None
        return self.interval.low - ROUNDING <= self.published <= self.interval.high + ROUNDING


def compare(ours: ReportData, published: ReportData) -> list[Comparison]:
    """Each published number of the families that we have, beside each of our quantizations of its method and bits."""
    mine = ours.results.quantizations()
    families = list(dict.fromkeys(q.family for q in mine))
    rows = [row for row in published.deltas if row.quantization.family in families]
    if not rows:
        theirs = ", ".join(dict.fromkeys(row.quantization.family for row in published.deltas))
        raise ReportError(
            f"{ours.results.source} and {published.results.source} have no family in common: there are "
            f"{', '.join(families)} here and {theirs} there."
        )
    # Δ of ours against the published reference, which need not be that of our recipe.
    against = replace(ours, results=replace(ours.results, said_reference=published.results.reference))
    deltas = {(row.quantization, row.measure.task, row.measure.metric): row.deltas for row in against.deltas}
    found = []
    for row in rows:
        same = [q for q in mine if _key(q) == _key(row.quantization)]
        for quantization in same or [row.quantization]:
            for attention, value in row.scores.items():
                if isinstance(value, Score):
                    own = _score(ours, quantization, row.measure, attention)
                    found.append(Comparison(quantization, row.measure, attention, own[0], value.value, own[1]))
            mine_of = deltas.get((quantization, row.measure.task, row.measure.metric), {})
            for attention, delta in row.deltas.items():
                if delta:
                    number = DELTA if len(row.deltas) == 1 else f"{DELTA} {attention}"
                    own = _delta(mine_of.get(attention))
                    found.append(Comparison(quantization, row.measure, number, own[0], delta.value, own[1]))
    return found


def comparison_tables(found: Sequence[Comparison]) -> list[Table]:
    """One table per family and method."""
    groups = groupby(found, lambda c: (c.quantization.family, c.quantization.method))
    return [_table(list(group)) for _, group in groups]


def comparison_remarks(found: Sequence[Comparison], published: ReportData) -> list[str]:
    """How much was compared, and how much of it agrees."""
    tested = [c.within for c in found if c.within is not None]
    rows = {(*_key(row.quantization), row.measure) for row in published.deltas}
    compared = {(*_key(c.quantization), c.measure) for c in found if c.difference is not None}
    first = f"{len(compared)} of {len(rows)} published rows have a counterpart here"
    if not tested:
        return [f"{first}; without per-document results there are no intervals."]
    return [f"{first}. Of {len(tested)} numbers with an interval, {sum(tested)} published ones are within it."]


def comparison_rows(found: Sequence[Comparison]) -> list[DataRow]:
    """The comparison for programs."""
    return [
        {
            **c.quantization.key,
            "task": c.measure.task,
            "metric": c.measure.metric,
            "better": c.measure.better,
            "number": c.number,
            "ours": None if isinstance(c.ours, Gap) else c.ours.value,
            "published": c.published,
            "difference": c.difference,
            "low": c.interval and c.interval.low,
            "high": c.interval and c.interval.high,
            "within": c.within,
            "note": c.ours.reason if isinstance(c.ours, Gap) else " ".join(c.ours.notes),
        }
        for c in found
    ]


def _score(report: ReportData, quantization: FamilyQuantization, measure: Measure, attention: str) -> Ours:
    result = report.results.twin(quantization, attention)
    found = report.evidence.interval(measure, (1, result))
    return result.score(measure), None if isinstance(found, NoInterval) else found


def _delta(delta: Difference | None) -> Ours:
    if delta is None:
        return Gap(NOTHING, "Δ needs both twins."), None
    return Score(delta.value, notes=delta.notes), delta.interval


def _table(group: Sequence[Comparison]) -> Table:
    about = group[0].quantization
    texts = ("Task", "Metric", "Quantization", "Number")
    numbers = ("Ours", "Published", "Difference", "95% interval of ours", "Within")
    table = Table(
        name=f"compare-{about.family}-{about.method}",
        title=f"{about.family}, {about.method_title}: ours and published",
        caption=f"Our numbers of {about.family}, {about.method_title}, beside the published ones.",
        reading=["The difference is ours − published; the interval is a bootstrap of ours over documents."],
        columns=[*(Column(title, "l") for title in texts), *map(Column, numbers)],
        heads=3,
    )
    measures = dict.fromkeys(comparison.measure for comparison in group)
    table.rows += [_fields(table, c) for measure in measures for c in group if c.measure == measure]
    return table


def _fields(table: Table, c: Comparison) -> list[Field]:
    show, show_interval = (signed, signed_interval) if c.is_delta else (score, interval)
    if isinstance(c.ours, Gap):
        ours = score_field(table, c.ours)
    else:
        ours = Field(show(c.ours.value), c.ours.value, marks=table.mark(c.ours.notes))
    return [
        Field(task_name(c.measure.task)),
        Field(metric_name(c.measure)),
        Field(quantization_name(c.quantization), c.quantization.bits),
        Field(" ".join(["Δ", *map(kind_name, c.number.split(" ")[1:])]) if c.is_delta else kind_title(c.number)),
        ours,
        Field(show(c.published), c.published),
        Field(NOTHING) if c.difference is None else Field(signed(c.difference), c.difference),
        Field(show_interval(c.interval.low, c.interval.high) if c.interval else NOTHING),
        Field({True: "yes", False: "no", None: NOTHING}[c.within]),
    ]


def _key(quantization: FamilyQuantization) -> tuple[str, str, int]:
    return quantization.family, quantization.method, quantization.bits
