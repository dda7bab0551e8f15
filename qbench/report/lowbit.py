"""Low-bit activations and KV cache, in the form of papers on attention without outliers.

One line per model: its unquantized score, its largest |x| and kurtosis, and its scores under a few quantizations; below
it what quantization cost it more than the reference, paired by document.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from qbench.numbers import fixed, percent, significant
from qbench.records.audit import UNQUANTIZED
from qbench.report.analyses import AnalyzedModel
from qbench.report.attentions import kind_name, kind_title
from qbench.report.causes import causes_of
from qbench.report.delta import DamageRow, DeltaRow, Difference, ReportData
from qbench.report.layouts import tones_of
from qbench.report.marks import READ_ADJUSTED, marks_for
from qbench.report.metrics import Measure, first_of_each_task, metric_name, task_name
from qbench.report.results import NOTHING, UNQUANTIZED_METHOD, FamilyQuantization, Score
from qbench.report.tables import Column, Field, Table, difference_field, number_field, score_field
from qbench.report.tidy import DataRow

LOW_BIT = re.compile(r"-(a|kv)\d+(-|$)")  # in labels: activations, KV cache
OTHER_AXIS = re.compile(r"-(mask|a\d|kv\d)")  # before the end of a label: more is quantized than a column says
READ_LOW_BIT = (
    "Activations and KV cache are simulated: rounded to a few bits and back inside the model. W8A8: weights and inputs "
    "of linear layers as 8-bit integers, with a static scale per tensor or a scale per token. KV4: keys and values in "
    "4 bits."
)
READ_LINES = (
    "The line below a model is its damage − the damage of {reference}, paired by document; for perplexities as "
    "100 × ln of the ratio, in percent. *: the 95% interval excludes zero. {tones}"
)
READ_CAUSES = (
    "Largest |x| and kurtosis are of the unquantized model's hidden states, as `qbench analyze` measures them. The "
    "first token of a text is shown separately from the others."
)


@dataclass(frozen=True)
class LowBitColumn:
    """A quantization that the table has a column for."""

    title: str
    weight_bits: int | None  # None: unquantized weights
    ending: str  # of the label, a regular expression

    def fits(self, about: FamilyQuantization) -> bool:
        """Whether it is this quantization."""
        bits = None if about.method == UNQUANTIZED_METHOD else about.bits
        found = re.search(f"-{self.ending}$", about.label)
        return bits == self.weight_bits and found is not None and not OTHER_AXIS.search(about.label[: found.start()])


COLUMNS = (
    LowBitColumn("W8A8 per tensor", 8, r"a8-tensor"),
    LowBitColumn("W8A8 per token", 8, r"a8"),
    LowBitColumn("W4A4", 4, r"a4"),
    LowBitColumn("KV4", None, r"kv4(-token)?(-g\d+)?(-c\d+)?"),
    LowBitColumn("KV2", None, r"kv2(-token)?(-g\d+)?(-c\d+)?"),
)


@dataclass(frozen=True)
class LowBitFamily:
    """A family's rows under quantizations of activations or KV cache."""

    report: ReportData
    family: str

    @cached_property
    def quantizations(self) -> list[FamilyQuantization]:
        """Those that quantize activations or the KV cache."""
        own = (q for q in self.report.results.quantizations() if q.family == self.family)
        return [q for q in own if LOW_BIT.search(q.label)]

    @cached_property
    def columns(self) -> dict[str, FamilyQuantization]:
        """By the title of the column."""
        found = {column.title: next(filter(column.fits, self.quantizations), None) for column in COLUMNS}
        return {title: about for title, about in found.items() if about}

    @cached_property
    def kinds(self) -> list[str]:
        """The reference first."""
        return self.report.results.kinds_of(self.family)

    @cached_property
    def measures(self) -> list[Measure]:
        """One per task."""
        return first_of_each_task(self.report.results.measures_of(self.family))

    @cached_property
    def scores(self) -> Mapping[tuple[str, Measure], DeltaRow]:
        """By label and measure."""
        return {
            (r.quantization.label, r.measure): r for r in self.report.deltas if r.quantization.family == self.family
        }

    @cached_property
    def damages(self) -> Mapping[tuple[str, Measure], DamageRow]:
        """By label and measure."""
        rows = self.report.damages
        return {(r.quantization.label, r.measure): r for r in rows if r.quantization.family == self.family}

    @cached_property
    def models(self) -> Mapping[str, AnalyzedModel]:
        """The analyzed models by kind of attention."""
        return {model.cell.attention: model for model in self.report.analyses.of(self.family)}

    def causes(self, attention: str) -> dict[str, float | None]:
        """The largest |x| and the kurtosis of the first token and of the others."""
        model = self.models.get(attention)
        kurtosis = {part: model.find("kurtosis", part=part) if model else None for part in ("first", "others")}
        return {
            "largest": causes_of(model).get("largest") if model else None,
            **{f"kurtosis_{part}": figure.value if figure else None for part, figure in kurtosis.items()},
        }

    def quantized_pairs(self, about: FamilyQuantization, attention: str) -> float | None:
        """The share of pairs of a query and a key that were quantized in the scored texts."""
        stored = [part.stored for part in self.report.results.twin(about, attention).parts if part.stored]
        audits = [own.record.audit for own in stored if own.record.audit]
        shares = [part.quantized_pairs for audit in audits for part in audit.parts if part.quantized_pairs is not None]
        return fmean(shares) if shares else None


def low_bit_families(report: ReportData) -> list[LowBitFamily]:
    """The families that have any such quantization."""
    found = [LowBitFamily(report, family) for family in report.results.families]
    return [own for own in found if own.quantizations]


def has_low_bit(report: ReportData) -> bool:
    """Whether activations or the KV cache are quantized anywhere."""
    return bool(low_bit_families(report))


def why_no_low_bit(report: ReportData) -> str:
    """Why there is no such table."""
    wanted = ", ".join(column.title for column in COLUMNS)
    return f"No quantization here is one of {wanted}; recipes/lowbit.yaml has them."


def low_bit_tables(report: ReportData) -> list[Table]:
    """One table per family and task."""
    return [_table(own, measure) for own in low_bit_families(report) if own.columns for measure in own.measures]


def _table(own: LowBitFamily, measure: Measure) -> Table:
    reading = [READ_LOW_BIT, READ_CAUSES]
    if len(own.kinds) > 1:
        tones = tones_of(own.kinds) + READ_ADJUSTED
        reading.insert(1, READ_LINES.format(reference=kind_name(own.kinds[0]), tones=tones))
    table = Table(
        name=f"lowbit-{own.family}-{measure.task}",
        title=f"{own.family}, {task_name(measure.task)}: low bits",
        caption=f"{task_name(measure.task)}, {metric_name(measure)}, with low-bit activations or KV cache.",
        reading=reading,
        columns=[
            Column("Model", "l"),
            Column("Full precision"),
            Column("Largest |x|"),
            Column("first token", group="Kurtosis"),
            Column("others", group="Kurtosis"),
            *(Column(title) for title in own.columns),
        ],
        heads=0,
    )
    rows = {about: own.damages[about.label, measure] for about in own.columns.values()}
    differences = [(measure, found) for row in rows.values() for found in row.differences.values()]
    marks = marks_for(differences)
    for attention in own.kinds:
        scores = [own.scores[about.label, measure].scores[attention] for about in own.columns.values()]
        unquantized = own.report.results.get(own.family, attention, UNQUANTIZED)
        causes = [number_field(value, _figure) for value in own.causes(attention).values()]
        first = score_field(table, unquantized.score(measure)) if unquantized else Field(NOTHING)
        shown = [score_field(table, found, measure.metric) for found in scores]
        table.rows.append([Field(kind_title(attention)), first, *causes, *shown])
        if attention != own.kinds[0]:
            line = [difference_field(table, row.differences[attention], measure, marks) for row in rows.values()]
            blank = [Field("")] * (1 + len(causes))
            table.rows.append([Field(f"− {kind_title(own.kinds[0])}"), *blank, *line])
    table.count = marks.sentence("differences between the attentions")
    return table


def _figure(value: float) -> str:
    return fixed(value) if abs(value) < 1e5 else significant(value, 4)


def low_bit_remarks(report: ReportData) -> list[str]:
    """How much of each KV cache was quantized, and what is missing."""
    found = []
    for own in low_bit_families(report):
        shares = {q.label: own.quantized_pairs(q, own.kinds[0]) for q in own.quantizations}
        said = [f"{label} {percent(share)}" for label, share in shares.items() if share is not None]
        if said:
            found.append(f"{own.family}, share of query–key pairs whose key was quantized: {', '.join(said)}.")
        if not own.models:
            found.append(f"{own.family} was not analyzed; `qbench analyze` measures the largest |x| and kurtosis.")
    return found


def low_bit_rows(report: ReportData) -> list[DataRow]:
    """One row per model, quantization, task and metric, for all quantizations of activations or KV cache."""
    return [row for own in low_bit_families(report) for row in _rows(own)]


def _rows(own: LowBitFamily) -> Iterator[DataRow]:
    for about in own.quantizations:
        for measure in own.report.results.measures_of(own.family):
            damages, scores = own.damages[about.label, measure], own.scores[about.label, measure].scores
            for attention in own.kinds:
                damage, score = damages.damages[attention].score, scores[attention]
                difference = damages.differences.get(attention)
                yield {
                    **about.key,
                    "attention": attention,
                    "task": measure.task,
                    "metric": measure.metric,
                    "better": measure.better,
                    "quantized": score.value if isinstance(score, Score) else None,
                    **_interval("damage", damage if isinstance(damage, Difference) else None),
                    **_interval("difference", difference),
                    **own.causes(attention),
                    "quantized_pairs": own.quantized_pairs(about, attention),
                }


def _interval(name: str, found: Difference | None) -> DataRow:
    interval = found.interval if found else None
    return {
        name: found and found.value,
        f"{name}_low": interval and interval.low,
        f"{name}_high": interval and interval.high,
    }


def shown_damages(own: LowBitFamily, measure: Measure) -> Sequence[tuple[str, str, Difference]]:
    """(label, attention, damage) of all quantizations of activations or KV cache that have one."""
    found = []
    for about in own.quantizations:
        for attention, damage in own.damages[about.label, measure].damages.items():
            if isinstance(damage.score, Difference):
                found.append((about.label, attention, damage.score))
    return found
