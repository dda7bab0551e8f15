"""Rows laid out as tables for people, whichever format they are rendered in: one function per kind of table."""

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

from qbench.numbers import score
from qbench.records.metrics import is_share
from qbench.report.delta import DamageRow, DeltaRow, Difference, ReportData
from qbench.report.evidence import Flips
from qbench.report.metrics import Measure, first_of_each_task, in_order, in_tables, metric_name, task_name
from qbench.report.results import NOTHING, FamilyQuantization, Gap
from qbench.report.tables import (
    Column,
    Field,
    Table,
    difference_field,
    interval_field,
    quantization_name,
    score_field,
)

Row = DeltaRow | DamageRow
R = TypeVar("R", DeltaRow, DamageRow)

# How to read a table: each says one thing.
READ_ARROWS = "↑ higher is better, ↓ lower is better."
READ_STAR = "* marks a 95% interval (paired bootstrap over documents) that excludes zero."
READ_ADDED_DOCUMENTS = (
    "Intervals of accuracies count two documents more, one changed each way: where no document changed, they reach "
    "about three documents to both sides."
)
READ_DELTA = "Δ is softpick − softmax; accuracies are in percent."
READ_DIFFERENCE = "The difference is softpick's damage − softmax's; accuracies are in percent."
READ_FLIPS = "Flips: documents (%) that became wrong / that became right."
READ_PAIRS = (
    "Softmax / softpick: the scores of the unquantized models, and below them what quantization changed; accuracies "
    "are in percent, normalized by length (acc_norm) where a task has that."
)
READ_PAIR_TONES = (
    "Marked for the better where softpick lost less than softmax and for the worse where it lost more, if the interval "
    "of that difference excludes zero."
)
# Of a family that has one of the twins only.
READ_LONE_DAMAGE = "Damage is quantized − unquantized; accuracies are in percent."
READ_LONE_SUMMARY = (
    "The scores of the unquantized {attention} model, and below them what quantization changed; accuracies are in "
    "percent."
)


def delta_tables(report: ReportData) -> list[Table]:
    """One table per family and method: the twins and Δ."""
    return [_delta_table(about, rows) for about, rows in _by_method(report.deltas)]


def damage_tables(report: ReportData) -> list[Table]:
    """One table per family and method: what quantization cost each twin, and the difference; or the only one."""
    found = []
    for about, rows in _by_method(report.damages):
        twins = report.results.twins_of(about.family)
        found.append(_damage_table(about, rows) if len(twins) > 1 else _lone_damage_table(about, rows, twins[0]))
    return found


def baseline_tables(report: ReportData) -> list[Table]:
    """One table of the unquantized models, families side by side; none if there are none."""
    rows = [row for row in report.deltas if row.quantization.is_unquantized]
    families = list(dict.fromkeys(row.quantization.family for row in rows))
    if not families:
        return []
    by_key = {(row.quantization.family, row.measure): row for row in rows}
    twins = [Column(title, group=family) for family in families for title in ("Softmax", "Softpick", "Δ")]
    caption = f"Softpick against softmax, unquantized: {', '.join(families)}."
    columns = [Column("Task", "l"), Column("Metric", "l"), *twins]
    table = Table("baseline", "Unquantized", caption, [READ_DELTA, *_reading(rows)], columns, heads=1)
    for measure in in_tables(in_order(row.measure for row in rows)):
        line = [Field(task_name(measure.task)), Field(metric_name(measure))]
        for family in families:
            if row := by_key.get((family, measure)):
                line += _twin_fields(table, row)
            else:
                missing = score_field(table, Gap(NOTHING, f"{family} has no {measure.metric} of {measure.task}."))
                line += [missing, missing, Field(NOTHING)]
        table.rows.append(line)
    return [table]


def summary_tables(report: ReportData) -> list[Table]:
    """One table per family: one metric of each task, one line per quantization. The answer on one screen."""
    found = []
    for family, group in groupby(report.damages, lambda row: row.quantization.family):
        unquantized = [r for r in report.deltas if r.quantization.is_unquantized and r.quantization.family == family]
        found.append(_summary_table(family, report.results.twins_of(family), unquantized, list(group)))
    return found


def _delta_table(about: FamilyQuantization, rows: list[DeltaRow]) -> Table:
    how = "unquantized" if about.is_unquantized else f"quantized with {about.method_title}"
    with_intervals = any(row.delta and row.delta.interval for row in rows)
    reading = [READ_DELTA, *_reading(rows)]
    columns = [*_head_columns(about), Column("Softmax"), Column("Softpick"), Column("Δ")]
    if with_intervals:
        reading += _interval_reading(rows)
        columns.append(Column("95% interval"))
    table = Table(
        name=_name("delta", about),
        title=f"{about.family}, {about.method_title}",
        caption=f"Softpick against softmax at {about.family}, {how}.",
        reading=reading,
        columns=columns,
        heads=1 if about.is_unquantized else 2,
    )
    for row in _arranged(rows):
        line = [*_head_fields(row), *_twin_fields(table, row)]
        if with_intervals:
            line.append(interval_field(row.delta))
        table.rows.append(line)
    return table


def _damage_table(about: FamilyQuantization, rows: list[DamageRow]) -> Table:
    with_flips = any(side.flips for row in rows for side in (row.softmax, row.softpick))
    with_intervals = any(row.difference and row.difference.interval for row in rows)
    columns = [*_head_columns(about), *_damage_columns(with_flips), Column("Difference")]
    if with_intervals:
        columns.append(Column("95% interval"))
    table = Table(
        name=_name("damage", about),
        title=f"{about.family}, {about.method_title}: damage",
        caption=f"What {about.method_title} costs the {about.family} models: quantized − unquantized.",
        reading=_damage_reading(READ_DIFFERENCE, rows, with_intervals, with_flips),
        columns=columns,
    )
    for row in _arranged(rows):
        line = _head_fields(row)
        for side in (row.softmax, row.softpick):
            line.append(difference_field(table, side.score, row.measure))
            if with_flips:
                line.append(_flips_field(side.flips))
        line.append(difference_field(table, row.difference, row.measure))
        if with_intervals:
            line.append(interval_field(row.difference))
        table.rows.append(line)
    return table


def _lone_damage_table(about: FamilyQuantization, rows: list[DamageRow], attention: str) -> Table:
    """The damage of the only model, with its own interval beside it."""
    damages = [(row, row.of(attention)) for row in _arranged(rows)]
    with_flips = any(damage.flips for _, damage in damages)
    with_intervals = any(isinstance(damage.score, Difference) and damage.score.interval for _, damage in damages)
    columns = [*_head_columns(about), Column("Damage")]
    if with_intervals:
        columns.append(Column("95% interval"))
    if with_flips:
        columns.append(Column("Flips"))
    table = Table(
        name=_name("damage", about),
        title=f"{about.family}, {about.method_title}: damage",
        caption=f"What {about.method_title} costs the {_models(about.family, [attention])}: quantized − unquantized.",
        reading=_damage_reading(READ_LONE_DAMAGE, rows, with_intervals, with_flips),
        columns=columns,
    )
    for row, damage in damages:
        line = [*_head_fields(row), difference_field(table, damage.score, row.measure)]
        if with_intervals:
            line.append(interval_field(damage.score))
        if with_flips:
            line.append(_flips_field(damage.flips))
        table.rows.append(line)
    return table


def _summary_table(family: str, twins: Sequence[str], unquantized: list[DeltaRow], damages: list[DamageRow]) -> Table:
    measures = first_of_each_task(row.measure for row in damages)
    table = Table(
        name=f"summary-{family}",
        title=f"{family}: summary",
        caption=f"What quantization costs the {_models(family, twins)}.",
        reading=_summary_reading(damages, twins),
        columns=[Column("Method", "l"), Column("Quantization", "l"), *(Column(_short_name(m)) for m in measures)],
        heads=1,
    )
    rows: list[Row] = [*unquantized, *damages]
    for about, own in groupby(rows, lambda row: row.quantization):
        by_measure = {row.measure: row for row in own}
        line = [Field(about.method_title), Field(quantization_name(about), about.bits)]
        table.rows.append(line + [_summary_field(table, by_measure[m], twins) for m in measures])
    return table


def _models(family: str, twins: Sequence[str]) -> str:
    """How a caption calls what a family has."""
    return f"{family} models" if len(twins) > 1 else f"{family} {twins[0]} model"


def _head_columns(about: FamilyQuantization) -> list[Column]:
    columns = [Column("Task", "l"), Column("Metric", "l")]
    if not about.is_unquantized:
        columns.append(Column("Quantization", "l"))
    return columns


def _head_fields(row: Row) -> list[Field]:
    fields = [Field(task_name(row.measure.task)), Field(metric_name(row.measure))]
    if not row.quantization.is_unquantized:
        fields.append(Field(quantization_name(row.quantization), row.quantization.bits))
    return fields


def _damage_columns(with_flips: bool) -> list[Column]:
    if not with_flips:
        return [Column("Softmax"), Column("Softpick")]
    return [Column(title, group=group) for group in ("Softmax", "Softpick") for title in ("Damage", "Flips")]


def _twin_fields(table: Table, row: DeltaRow) -> list[Field]:
    scores = [score_field(table, side) for side in (row.softmax, row.softpick)]
    return [*scores, difference_field(table, row.delta, row.measure)]


def _summary_field(table: Table, row: Row, twins: Sequence[str]) -> Field:
    """Softmax / softpick, or the only one of them."""
    if isinstance(row, DeltaRow):
        sides = [score_field(table, row.of(attention)) for attention in twins]
    else:
        sides = [difference_field(table, row.of(attention).score, row.measure) for attention in twins]
    return sides[0] if len(sides) == 1 else _pair_field(row, sides)


def _pair_field(row: Row, sides: Sequence[Field]) -> Field:
    """Both in one field; its tone shows the difference of their damages, if it is more than chance."""
    difference = row.difference if isinstance(row, DamageRow) else None
    text = " / ".join(f"{side.text}*" if side.starred else side.text for side in sides)
    marks = ",".join(dict.fromkeys(mark for side in sides for mark in side.marks.split(",") if mark))
    tone = difference.tone(row.measure) if difference and difference.significant else None
    return Field(text, difference.value if difference else None, tone, marks=marks)


def _flips_field(flips: Flips | None) -> Field:
    if flips is None:
        return Field(NOTHING)
    total = flips.right_to_wrong + flips.wrong_to_right
    return Field(f"{score(flips.right_to_wrong)} / {score(flips.wrong_to_right)}", total)


def _short_name(measure: Measure) -> str:
    """A task with its metric; the kind of an accuracy is left out."""
    name, metric = task_name(measure.task), metric_name(measure)
    return f"{name}, %{metric[-2:] if measure.better else ''}" if is_share(measure.metric) else f"{name} {metric}"


def _reading(rows: Sequence[Row]) -> list[str]:
    """How to read the metrics' arrows, and the stars if there are intervals."""
    differences = [difference for row in rows for difference in _differences(row)]
    if any(isinstance(difference, Difference) and difference.interval for difference in differences):
        return [READ_ARROWS, READ_STAR]
    return [READ_ARROWS]


def _interval_reading(rows: Sequence[Row]) -> list[str]:
    """How to read a column of intervals."""
    return [READ_ADDED_DOCUMENTS] if any(is_share(row.measure.metric) for row in rows) else []


def _damage_reading(first: str, rows: Sequence[Row], with_intervals: bool, with_flips: bool) -> list[str]:
    reading = [first, *_reading(rows)]
    if with_intervals:
        reading += _interval_reading(rows)
    if with_flips:
        reading.append(READ_FLIPS)
    return reading


def _summary_reading(damages: Sequence[DamageRow], twins: Sequence[str]) -> list[str]:
    reading = _reading(damages)
    if len(twins) == 1:
        return [READ_LONE_SUMMARY.format(attention=twins[0]), *reading]
    if READ_STAR in reading:
        reading.append(READ_PAIR_TONES)
    return [READ_PAIRS, *reading]


def _differences(row: Row) -> Sequence[Difference | Gap | None]:
    return (row.delta,) if isinstance(row, DeltaRow) else (row.softmax.score, row.softpick.score, row.difference)


def _by_method(rows: Sequence[R]) -> list[tuple[FamilyQuantization, list[R]]]:
    """The rows of each family and method, the unquantized apart, with the first quantization among them."""

    def group_of(row: R) -> tuple[str, str, bool]:
        return row.quantization.family, row.quantization.method, row.quantization.is_unquantized

    groups = [list(group) for _, group in groupby(rows, group_of)]
    return [(group[0].quantization, group) for group in groups]


def _arranged(rows: Sequence[R]) -> list[R]:
    """By task and metric, then by quantization, so that a metric's way through the widths is read downwards."""
    measures = in_tables(dict.fromkeys(row.measure for row in rows))
    return [row for measure in measures for row in rows if row.measure == measure]


def _name(kind: str, about: FamilyQuantization) -> str:
    return f"{kind}-{about.family}-{about.method}"
