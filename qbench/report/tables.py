"""Rows laid out as tables for people, whichever format they are rendered in: texts, marks and footnotes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, TypeVar

from qbench.report.delta import DECIMALS, DamageRow, DeltaRow, Difference, Report, Tone
from qbench.report.evidence import Flips
from qbench.report.metrics import (
    Measure,
    headlines,
    in_order,
    in_tables,
    is_share,
    method_name,
    metric_name,
    task_name,
)
from qbench.report.outcomes import TWINS, Gap, Outcomes, Quantized, Score

Kind = Literal["delta", "damage", "baseline", "summary"]
Row = DeltaRow | DamageRow
R = TypeVar("R", DeltaRow, DamageRow)

DELTA = "Δ is softpick − softmax; accuracies are in percent."
DIFFERENCE = "The difference is softpick's damage − softmax's; accuracies are in percent."
PAIRS = (
    "Softmax / softpick: the scores of the unquantized models, and below them what quantization changed; accuracies "
    "are in percent, normalized by length (acc_norm) where a task has that."
)
# Of a family that has one of the twins only.
OWN_DAMAGE = "Damage is quantized − unquantized; accuracies are in percent."
ONES = (
    "The scores of the unquantized {attention} model, and below them what quantization changed; accuracies are in "
    "percent."
)
MARKED = (
    "Marked for the better where softpick lost less than softmax and for the worse where it lost more, if the interval "
    "of that difference excludes zero."
)
FLIPS = "Flips: documents (%) that became wrong / that became right."
READING = "↑ higher is better, ↓ lower is better."
STAR = "* marks a 95% interval (paired bootstrap over documents) that excludes zero."

ADDED = (
    "Intervals of accuracies count two documents more, one changed each way: where no document changed, they reach "
    "about three documents to both sides."
)


@dataclass(frozen=True)
class Column:
    """A column's header; columns of one group have it above them."""

    title: str
    align: Literal["l", "c", "r"] = "r"
    group: str = ""


@dataclass(frozen=True)
class Field:
    """What stands at one place of a table."""

    text: str
    value: float | None = None  # to sort by
    tone: Tone | None = None
    starred: bool = False
    marks: str = ""  # letters of footnotes


@dataclass
class Table:
    """A table that any format can render."""

    name: str  # unique among the tables of a report, for labels and anchors
    title: str
    caption: str
    reading: Sequence[str]  # how numbers and marks are to be read, a sentence each; many tables share them
    columns: Sequence[Column]
    heads: int = 2  # leading columns, in which equal neighbours are one block
    rows: list[list[Field]] = field(default_factory=list)
    footnotes: dict[str, str] = field(default_factory=dict)  # text by letter

    def mark(self, notes: Sequence[str]) -> str:
        """The letters of these footnotes, which are added if they are new."""
        known = {text: letter for letter, text in self.footnotes.items()}
        for note in notes:
            if note not in known:
                known[note] = _letter(len(self.footnotes))
                self.footnotes[known[note]] = note
        return ",".join(known[note] for note in dict.fromkeys(notes))


def tables(report: Report, kind: Kind) -> list[Table]:
    """All tables of a kind."""
    makers = {"delta": delta_tables, "damage": damage_tables, "baseline": baseline_tables, "summary": summary_tables}
    return makers[kind](report)


def delta_tables(report: Report) -> list[Table]:
    """A table a family and method: the twins and Δ."""
    return [_delta_table(q, rows) for q, rows in _by_method(report.deltas)]


def damage_tables(report: Report) -> list[Table]:
    """A table a family and method: what quantization cost each twin, and the difference; or the only one of them."""
    found = []
    for about, rows in _by_method(report.damages):
        twins = report.outcomes.twins_of(about.family)
        found.append(_damage_table(about, rows) if len(twins) > 1 else _lone_damage_table(about, rows, twins[0]))
    return found


def baseline_tables(report: Report) -> list[Table]:
    """One table of the unquantized models, families side by side; none where there are none."""
    rows = [row for row in report.deltas if row.quantized.is_baseline]
    families = list(dict.fromkeys(row.quantized.family for row in rows))
    measures = in_tables(in_order(row.measure for row in rows))
    if not families:
        return []
    by_key = {(row.quantized.family, row.measure): row for row in rows}
    twins = [Column(title, group=family) for family in families for title in ("Softmax", "Softpick", "Δ")]
    caption = f"Softpick against softmax, unquantized: {', '.join(families)}."
    columns = [Column("Task", "l"), Column("Metric", "l"), *twins]
    table = Table("baseline", "Unquantized", caption, [DELTA, *_reading(rows)], columns, heads=1)
    for measure in measures:
        line = [Field(task_name(measure.task)), Field(metric_name(measure))]
        for family in families:
            if row := by_key.get((family, measure)):
                line += _twin_fields(table, row)
            else:
                missing = Gap("–", f"{family} has no {measure.metric} of {measure.task}.")
                line += [score_field(table, missing)] * 2 + [Field("–")]
        table.rows.append(line)
    return [table]


def summary_tables(report: Report) -> list[Table]:
    """A table a family: one metric of each task, and a line for each quantization. The answer on one screen."""
    found = []
    for family, group in groupby(report.damages, lambda row: row.quantized.family):
        damages = list(group)
        measures = headlines(row.measure for row in damages)
        columns = [Column("Method", "l"), Column("Quantization", "l"), *(Column(_short_name(m)) for m in measures)]
        twins = report.outcomes.twins_of(family)
        caption = f"What quantization costs the {_models(family, twins)}."
        table = Table(
            f"summary-{family}", f"{family}: summary", caption, _summary_reading(damages, twins), columns, heads=1
        )
        rows: list[Row] = [r for r in report.deltas if r.quantized.is_baseline and r.quantized.family == family]
        for quantized, own in groupby([*rows, *damages], lambda row: row.quantized):
            by_measure = {row.measure: row for row in own}
            head = [Field(method_name(quantized.method)), Field(quantization_name(quantized), quantized.bits)]
            table.rows.append(head + [_summary_field(table, by_measure[m], twins) for m in measures])
        found.append(table)
    return found


def number(value: float) -> str:
    """A score: two decimals."""
    return f"{value:.2f}"


def formatted(value: float | None, form: str) -> Field:
    """A number in a form of its own; a dash where there is none."""
    return Field("–") if value is None else Field(form.format(value), value)


def signed(value: float, decimals: int = DECIMALS) -> str:
    """A difference: a sign and two decimals, zero as +0.00."""
    return f"{round(value, decimals) + 0.0:+.{decimals}f}"


def between(low: float, high: float, decimals: int = DECIMALS) -> str:
    """An interval of a difference. The ends keep their signs: -0.00 is below zero, and zero is seen to be inside."""
    ends = (f"{round(end, 9) + 0.0:+.{decimals}f}" for end in (low, high))  # what differs by rounding alone is zero
    return f"[{', '.join(ends)}]"


def quantization_name(quantized: Quantized) -> str:
    """What tells quantizations of one method apart: 3-bit g64."""
    if quantized.is_baseline:
        return "–"
    prefix = f"{quantized.method}-{quantized.bits}"
    return f"{quantized.bits}-bit {quantized.label.removeprefix(prefix).lstrip('-')}".strip()


def score_field(table: Table, score: Score | Gap) -> Field:
    """A score, or what stands in its place, with its footnotes."""
    if isinstance(score, Gap):
        return Field(score.text, marks=table.mark([score.reason]))
    return Field(number(score.value), score.value, marks=table.mark(score.notes))


def difference_field(table: Table, difference: Difference | Gap | None, measure: Measure) -> Field:
    """A difference in its tone, starred where its interval excludes zero."""
    if difference is None:
        return Field("–")
    if isinstance(difference, Gap):
        return score_field(table, difference)
    tone, marks = difference.tone(measure), table.mark(difference.notes)
    text = signed(difference.value, difference.decimals)
    return Field(text, difference.value, tone, difference.significant, marks)


def remarks(report: Report, kind: Kind | None = None) -> list[str]:
    """What is to be said of the report as a whole, and of tables of one kind."""
    found = [_trial(limits) for recipe in report.outcomes.recipes().values() if (limits := _limits(recipe))]
    if others := report.outcomes.other_attentions():
        found.append(f"There are records of {', '.join(others)} too: they are in no Δ, which is softpick − softmax.")
    if older := report.outcomes.of_other_versions():
        names = ", ".join(older[:3]) + f" and {len(older) - 3} more" * (len(older) > 3)
        found.append(f"Not all cells are of the same code and packages; other than the latest: {names}.")
    return found + (_without_delta(report.outcomes) if kind == "delta" else [])


def _without_delta(outcomes: Outcomes) -> list[str]:
    """Where Δ tables are columns of dashes, what to look at instead."""
    families = dict.fromkeys(quantized.family for quantized in outcomes.quantizations())
    missing = [(family, twin) for family in families for twin in TWINS if twin not in outcomes.twins_of(family)]
    instead = "so there is no Δ; --kind damage and --kind summary show what quantization cost."
    return [f"There is no {twin} model of {family} here, {instead}" for family, twin in missing]


def _limits(recipe: Mapping[str, Any]) -> dict[str, int]:
    """How many documents are read of what, where it is not all of them."""
    tasks = recipe.get("tasks")
    settings = tasks if isinstance(tasks, Mapping) else {}  # names alone have no limits of their own
    own = {name: task["limit"] for name, task in settings.items() if task and task.get("limit")}
    whole = recipe.get("limit")
    return own | ({"each other task" if own else "each task": whole} if whole else {})


def _trial(limits: Mapping[str, int]) -> str:
    parts = [f"{limit} document{'s' * (limit > 1)} of {what}" for what, limit in limits.items()]
    return f"A trial: only the first {', '.join(parts)}."


def _delta_table(about: Quantized, rows: list[DeltaRow]) -> Table:
    title = f"{about.family}, {method_name(about.method)}"
    how = "unquantized" if about.is_baseline else f"quantized with {method_name(about.method)}"
    caption = f"Softpick against softmax at {about.family}, {how}."
    with_intervals = any(row.delta and row.delta.interval for row in rows)
    columns = [*_head(about), Column("Softmax"), Column("Softpick"), Column("Δ")]
    columns += [Column("95% interval")] * with_intervals
    heads = 1 if about.is_baseline else 2
    reading = [DELTA, *_reading(rows), *_interval_reading(rows) * with_intervals]
    table = Table(_slug("delta", about), title, caption, reading, columns, heads)
    for row in _arranged(rows):
        line = [*_head_fields(row), *_twin_fields(table, row)]
        table.rows.append(line + [interval_field(row.delta)] * with_intervals)
    return table


def _damage_table(about: Quantized, rows: list[DamageRow]) -> Table:
    title = f"{about.family}, {method_name(about.method)}: damage"
    caption = f"What {method_name(about.method)} costs the {about.family} models: quantized − unquantized."
    with_flips = any(side.flips for row in rows for side in (row.softmax, row.softpick))
    with_intervals = any(row.difference and row.difference.interval for row in rows)
    columns = [*_head(about), *_damage_columns(with_flips), Column("Difference")]
    columns += [Column("95% interval")] * with_intervals
    reading = [DIFFERENCE, *_reading(rows), *_interval_reading(rows) * with_intervals, *[FLIPS] * with_flips]
    table = Table(_slug("damage", about), title, caption, reading, columns)
    for row in _arranged(rows):
        line = _head_fields(row)
        for side in (row.softmax, row.softpick):
            line += [difference_field(table, side.score, row.measure), *[_flips_field(side.flips)] * with_flips]
        line.append(difference_field(table, row.difference, row.measure))
        table.rows.append(line + [interval_field(row.difference)] * with_intervals)
    return table


def _lone_damage_table(about: Quantized, rows: list[DamageRow], attention: str) -> Table:
    """The damage of the only model, with its own interval beside it."""
    damages = [(row, row.of(attention)) for row in _arranged(rows)]
    with_flips = any(damage.flips for _, damage in damages)
    with_intervals = any(isinstance(damage.score, Difference) and damage.score.interval for _, damage in damages)
    title = f"{about.family}, {method_name(about.method)}: damage"
    models = _models(about.family, [attention])
    caption = f"What {method_name(about.method)} costs the {models}: quantized − unquantized."
    columns = [*_head(about), Column("Damage"), *[Column("95% interval")] * with_intervals]
    columns += [Column("Flips")] * with_flips
    reading = [OWN_DAMAGE, *_reading(rows), *_interval_reading(rows) * with_intervals, *[FLIPS] * with_flips]
    table = Table(_slug("damage", about), title, caption, reading, columns)
    for row, damage in damages:
        line = [*_head_fields(row), difference_field(table, damage.score, row.measure)]
        line += [interval_field(damage.score)] * with_intervals
        table.rows.append(line + [_flips_field(damage.flips)] * with_flips)
    return table


def _models(family: str, twins: Sequence[str]) -> str:
    """How a caption calls what a family has."""
    return f"{family} models" if len(twins) > 1 else f"{family} {twins[0]} model"


def _head(about: Quantized) -> list[Column]:
    return [Column("Task", "l"), Column("Metric", "l"), *[Column("Quantization", "l")] * (not about.is_baseline)]


def _damage_columns(with_flips: bool) -> list[Column]:
    if not with_flips:
        return [Column("Softmax"), Column("Softpick")]
    return [Column(title, group=group) for group in ("Softmax", "Softpick") for title in ("Damage", "Flips")]


def _head_fields(row: Row) -> list[Field]:
    measure = row.measure
    bits = [Field(quantization_name(row.quantized), row.quantized.bits)] * (not row.quantized.is_baseline)
    return [Field(task_name(measure.task)), Field(metric_name(measure)), *bits]


def _twin_fields(table: Table, row: DeltaRow) -> list[Field]:
    scores = [score_field(table, score) for score in (row.softmax, row.softpick)]
    return [*scores, difference_field(table, row.delta, row.measure)]


def _summary_reading(damages: Sequence[DamageRow], twins: Sequence[str]) -> list[str]:
    reading = _reading(damages)
    if len(twins) == 1:
        return [ONES.format(attention=twins[0]), *reading]
    return [PAIRS, *reading, *[MARKED] * (STAR in reading)]


def _summary_field(table: Table, row: Row, twins: Sequence[str]) -> Field:
    """Softmax / softpick, or the only one of them."""
    if isinstance(row, DeltaRow):
        sides = [score_field(table, row.of(attention)) for attention in twins]
    else:
        sides = [difference_field(table, row.of(attention).score, row.measure) for attention in twins]
    return sides[0] if len(sides) == 1 else _pair_field(row, sides)


def _pair_field(row: Row, sides: Sequence[Field]) -> Field:
    """Both in one field; a difference of their damages is told by its tone, if it is more than chance."""
    between = row.difference if isinstance(row, DamageRow) else None
    text = " / ".join(side.text + "*" * side.starred for side in sides)
    marks = ",".join(dict.fromkeys(mark for side in sides for mark in side.marks.split(",") if mark))
    tone = between.tone(row.measure) if between and between.significant else None
    return Field(text, between.value if between else None, tone, marks=marks)


def _short_name(measure: Measure) -> str:
    """A task with its metric; the kind of an accuracy is left out."""
    name, metric = task_name(measure.task), metric_name(measure)
    return f"{name}, %{metric[-2:] if measure.better else ''}" if is_share(measure.metric) else f"{name} {metric}"


def _flips_field(flips: Flips | None) -> Field:
    if flips is None:
        return Field("–")
    total = flips.right_to_wrong + flips.wrong_to_right
    return Field(f"{number(flips.right_to_wrong)} / {number(flips.wrong_to_right)}", total)


def interval_field(difference: Difference | Gap | None) -> Field:
    """The 95% interval of a difference."""
    if not isinstance(difference, Difference) or difference.interval is None:
        return Field("–")
    low, high = difference.interval.low, difference.interval.high
    return Field(between(low, high, difference.interval_decimals), high - low)


def _by_method(rows: Sequence[R]) -> list[tuple[Quantized, list[R]]]:
    groups = [list(group) for _, group in groupby(rows, lambda row: (row.quantized.family, row.quantized.method))]
    return [(group[0].quantized, group) for group in groups]


def _arranged(rows: Sequence[R]) -> list[R]:
    """By task and metric, then by quantization, so that a metric's way through the widths is read downwards."""
    measures = in_tables(dict.fromkeys(row.measure for row in rows))
    return [row for measure in measures for row in rows if row.measure == measure]


def _reading(rows: Sequence[Row]) -> list[str]:
    with_intervals = any(isinstance(d, Difference) and d.interval for row in rows for d in _differences(row))
    return [READING, *[STAR] * with_intervals]


def _interval_reading(rows: Sequence[Row]) -> list[str]:
    """What a column of intervals needs to be said of it."""
    return [ADDED] * any(is_share(row.measure.metric) for row in rows)


def _differences(row: Row) -> Sequence[Difference | Gap | None]:
    return (row.delta,) if isinstance(row, DeltaRow) else (row.softmax.score, row.softpick.score, row.difference)


def _slug(kind: str, about: Quantized) -> str:
    return f"{kind}-{about.family}-{about.method}"


def _letter(index: int) -> str:
    """a to z, then aa, ab, …"""
    return (_letter(index // 26 - 1) if index >= 26 else "") + chr(ord("a") + index % 26)
