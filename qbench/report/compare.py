"""Ours beside published numbers: the difference, and whether the published number is within our interval."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from qbench.report.delta import Difference, Report
from qbench.report.metrics import Measure, method_name, metric_name, task_name
from qbench.report.outcomes import Gap, Quantized, ReportError, Score
from qbench.report.tables import Column, Field, Table, between, number, quantization_name, score_field, signed

if TYPE_CHECKING:
    from qbench.report.bootstrap import Interval

ROUNDING = 0.005  # published numbers have two decimals
Ours = tuple[Score | Gap, "Interval | None"]


@dataclass(frozen=True)
class Comparison:
    """One of our numbers and the published one."""

    quantized: Quantized  # ours
    measure: Measure
    number: str  # softmax, softpick or delta
    ours: Score | Gap
    published: float
    interval: "Interval | None"  # of ours

    @property
    def difference(self) -> float | None:
        """Ours − published."""
        return None if isinstance(self.ours, Gap) else self.ours.value - self.published

    @property
    def within(self) -> bool | None:
        """Whether the published number is within our interval; None where there is no interval."""
        if self.interval is None:
            return None
        return self.interval.low - ROUNDING <= self.published <= self.interval.high + ROUNDING


def compare(ours: Report, published: Report) -> list[Comparison]:
    """Each published number of the families that we have, beside each of our quantizations of its method and bits."""
    mine = ours.outcomes.quantizations()
    families = list(dict.fromkeys(q.family for q in mine))
    rows = [row for row in published.deltas if row.quantized.family in families]
    if not rows:
        theirs = ", ".join(dict.fromkeys(row.quantized.family for row in published.deltas))
        raise ReportError(
            f"{ours.outcomes.source} and {published.outcomes.source} have no family in common: there are "
            f"{', '.join(families)} here and {theirs} there."
        )
    deltas = {(row.quantized, row.measure.task, row.measure.metric): row.delta for row in ours.deltas}
    found = []
    for row in rows:
        same = [q for q in mine if _key(q) == _key(row.quantized)]
        for quantized in same or [row.quantized]:
            delta = deltas.get((quantized, row.measure.task, row.measure.metric))
            for name, value in (("softmax", row.softmax), ("softpick", row.softpick), ("delta", row.delta)):
                if value is None or isinstance(value, Gap):
                    continue
                own = _delta(delta) if name == "delta" else _score(ours, quantized, row.measure, name)
                found.append(Comparison(quantized, row.measure, name, own[0], value.value, own[1]))
    return found


def comparison_tables(found: Sequence[Comparison]) -> list[Table]:
    """A table a family and method."""
    groups = groupby(found, lambda c: (c.quantized.family, c.quantized.method))
    return [_table(list(group)) for _, group in groups]


def comparison_remarks(found: Sequence[Comparison], published: Report) -> list[str]:
    """How much was compared, and with what outcome."""
    tested = [c.within for c in found if c.within is not None]
    rows = {(*_key(row.quantized), row.measure) for row in published.deltas}
    compared = {(*_key(c.quantized), c.measure) for c in found if c.difference is not None}
    first = f"{len(compared)} of {len(rows)} published rows have a counterpart here"
    if not tested:
        return [f"{first}; without per-document results there are no intervals."]
    return [f"{first}. Of {len(tested)} numbers with an interval, {sum(tested)} published ones are within it."]


def comparison_rows(found: Sequence[Comparison]) -> list[Mapping[str, Any]]:
    """The comparison for programs."""
    return [
        {
            **vars(c.quantized),
            **{"task": c.measure.task, "metric": c.measure.metric, "better": c.measure.better, "number": c.number},
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


def _score(report: Report, quantized: Quantized, measure: Measure, attention: str) -> Ours:
    outcome = report.outcomes.twin(quantized, attention)
    return outcome.score(measure), report.evidence.interval(measure, (1, outcome))


def _delta(delta: Difference | None) -> Ours:
    if delta is None:
        return Gap("–", "Δ needs both twins."), None
    return Score(delta.value, notes=delta.notes), delta.interval


def _table(group: Sequence[Comparison]) -> Table:
    about = group[0].quantized
    columns = [
        *(Column(title, "l") for title in ("Task", "Metric", "Quantization", "Number")),
        *(Column("Ours"), Column("Published"), Column("Difference"), Column("95% interval of ours"), Column("Within")),
    ]
    title = f"{about.family}, {method_name(about.method)}: ours and published"
    caption = f"Our numbers of {about.family}, {method_name(about.method)}, beside the published ones."
    reading = ["The difference is ours − published; the interval is a bootstrap of ours over documents."]
    table = Table(f"compare-{about.family}-{about.method}", title, caption, reading, columns, heads=3)
    measures = dict.fromkeys(comparison.measure for comparison in group)
    table.rows += [list(_fields(table, c)) for measure in measures for c in group if c.measure == measure]
    return table


def _fields(table: Table, c: Comparison) -> Iterator[Field]:
    show = signed if c.number == "delta" else number
    yield from (Field(task_name(c.measure.task)), Field(metric_name(c.measure)))
    yield Field(quantization_name(c.quantized), c.quantized.bits)
    yield Field("Δ" if c.number == "delta" else c.number.capitalize())
    if isinstance(c.ours, Gap):
        yield score_field(table, c.ours)
    else:
        yield Field(show(c.ours.value), c.ours.value, marks=table.mark(c.ours.notes))
    yield Field(show(c.published), c.published)
    yield Field("–") if c.difference is None else Field(signed(c.difference), c.difference)
    ends = (c.interval.low, c.interval.high) if c.interval else None
    shown = ends and (between(*ends) if c.number == "delta" else f"[{number(ends[0])}, {number(ends[1])}]")
    yield Field(shown or "–")
    yield Field({True: "yes", False: "no", None: "–"}[c.within])


def _key(quantized: Quantized) -> tuple[str, str, int]:
    return quantized.family, quantized.method, quantized.bits
