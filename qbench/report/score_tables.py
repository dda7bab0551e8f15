"""Tables of scores: kinds of attention next to the reference (Δ), and the unquantized models of all families."""

from collections.abc import Sequence

from qbench.report.attentions import kind_name, kind_title
from qbench.report.delta import DeltaRow, ReportData
from qbench.report.layouts import (
    about_kinds,
    arranged,
    block_columns,
    by_method,
    compared,
    head_columns,
    head_fields,
    how_to_read,
    how_to_read_intervals,
    kind_fields,
    lines_of,
    score_titles,
    table_marks,
    table_name,
    tones_of,
)
from qbench.report.marks import Marks
from qbench.report.metrics import Measure, in_order, in_tables, metric_name, task_name
from qbench.report.results import NOTHING, FamilyQuantization, Gap
from qbench.report.tables import Column, Field, Table, difference_field, interval_field, score_field

READ_DELTA = "Δ is {other} − {reference}; accuracies are in percent."
READ_SCORES = ["Accuracies are in percent. ↑ higher is better, ↓ lower is better."]
COUNT_DELTAS = "values of Δ"


def delta_tables(report: ReportData) -> list[Table]:
    """One table per family and method: the scores and Δ, or the scores alone if the family has one model."""
    found = []
    for about, rows in by_method(report.deltas):
        kinds = report.results.kinds_of(about.family)
        found.append(_delta_table(about, rows) if len(kinds) > 1 else _lone_score_table(about, rows, kinds[0]))
    return found


def baseline_tables(report: ReportData) -> list[Table]:
    """One table of the unquantized models, families side by side; none if there are none."""
    rows = [row for row in report.deltas if row.quantization.is_unquantized]
    families = list(dict.fromkeys(row.quantization.family for row in rows))
    if not families:
        return []
    by_key = {(row.quantization.family, row.measure): row for row in rows}
    have = {kind for family in families for kind in report.results.kinds_of(family)}
    if len(have) == 1:
        return [_lone_baseline_table(families, rows, have.pop())]
    kinds = list(dict.fromkeys(attention for row in rows for attention in row.scores))
    titles = [*score_titles(kinds), "Δ"]
    table = Table(
        name="baseline",
        title="Unquantized",
        caption=f"{compared(kinds)}, unquantized: {', '.join(families)}.",
        reading=[about_kinds(READ_DELTA, kinds), *how_to_read(rows, tones_of(kinds))],
        columns=[
            *head_columns(kinds, rows[0].quantization),
            *(Column(title, group=family) for family in families for title in titles),
        ],
        heads=block_columns(1, kinds),
    )
    measures = in_tables(in_order(row.measure for row in rows))
    deltas = [(row.measure, delta) for row in rows if row.measure in measures for delta in row.deltas.values()]
    marks = table_marks(table, COUNT_DELTAS, deltas)
    for measure in measures:
        for shown in lines_of(kinds):
            line = [Field(task_name(measure.task)), Field(metric_name(measure)), *kind_fields(shown)]
            for family in families:
                line += _unquantized_fields(table, by_key.get((family, measure)), family, measure, shown, marks)
            table.rows.append(line)
    return [table]


def _delta_table(about: FamilyQuantization, rows: list[DeltaRow]) -> Table:
    kinds = list(rows[0].scores)
    how = "unquantized" if about.is_unquantized else f"quantized with {about.method_title}"
    with_intervals = any(delta and delta.interval for row in rows for delta in row.deltas.values())
    reading = [about_kinds(READ_DELTA, kinds), *how_to_read(rows, tones_of(kinds))]
    columns = [*head_columns(kinds, about), *map(Column, score_titles(kinds)), Column("Δ")]
    if with_intervals:
        reading += how_to_read_intervals(rows)
        columns.append(Column("95% interval", about_previous=True))
    table = Table(
        name=table_name("delta", about),
        title=f"{about.family}, {about.method_title}",
        caption=f"{compared(kinds)}, {how}: {about.family}.",
        reading=reading,
        columns=columns,
        heads=block_columns(1 if about.is_unquantized else 2, kinds),
    )
    deltas = [(row.measure, delta) for row in arranged(rows) for delta in row.deltas.values()]
    marks = table_marks(table, COUNT_DELTAS, deltas)
    for row in arranged(rows):
        for shown in lines_of(kinds):
            line = [*head_fields(row), *kind_fields(shown), *_delta_fields(table, row, shown, marks)]
            if with_intervals:
                line.append(interval_field(row.deltas.get(shown[-1]), row.measure))
            table.rows.append(line)
    return table


def _lone_score_table(about: FamilyQuantization, rows: list[DeltaRow], attention: str) -> Table:
    """The scores of a family's only model."""
    how = "unquantized" if about.is_unquantized else f"quantized with {about.method_title}"
    table = Table(
        name=table_name("delta", about),
        title=f"{about.family}, {about.method_title}",
        caption=f"Scores of the {about.family} {kind_name(attention)} model, {how}.",
        reading=READ_SCORES,
        columns=[*head_columns([attention], about), Column(kind_title(attention))],
        heads=1 if about.is_unquantized else 2,
    )
    for row in arranged(rows):
        table.rows.append([*head_fields(row), score_field(table, row.scores[attention], row.measure.metric)])
    return table


def _lone_baseline_table(families: Sequence[str], rows: list[DeltaRow], attention: str) -> Table:
    """The scores of unquantized models of one kind, families side by side."""
    table = Table(
        name="baseline",
        title="Unquantized",
        caption=f"Scores of the unquantized {kind_name(attention)} models: {', '.join(families)}.",
        reading=READ_SCORES,
        columns=[*head_columns([attention], rows[0].quantization), *map(Column, families)],
        heads=1,
    )
    by_key = {(row.quantization.family, row.measure): row for row in rows}
    for measure in in_tables(in_order(row.measure for row in rows)):
        line = [Field(task_name(measure.task)), Field(metric_name(measure))]
        for family in families:
            row = by_key.get((family, measure))
            lacking = Gap(NOTHING, f"{family} has no {measure.metric} of {measure.task}.")
            line.append(score_field(table, row.scores[attention] if row else lacking, measure.metric))
        table.rows.append(line)
    return table


def _delta_fields(table: Table, row: DeltaRow, shown: Sequence[str], marks: Marks) -> list[Field]:
    """The scores that a line shows, and the Δ of the last one; the reference has none."""
    scores = [score_field(table, row.scores[attention], row.measure.metric) for attention in shown]
    return [*scores, difference_field(table, row.deltas.get(shown[-1]), row.measure, marks)]


def _unquantized_fields(
    table: Table, row: DeltaRow | None, family: str, measure: Measure, shown: Sequence[str], marks: Marks
) -> list[Field]:
    """The same for a family that may lack the measure, or a kind that others have."""
    if row and all(attention in row.scores for attention in shown):
        return _delta_fields(table, row, shown, marks)
    lacking = f"The family {family} has no {kind_name(shown[0])} model."
    reason = lacking if row else f"{family} has no {measure.metric} of {measure.task}."
    return [*[score_field(table, Gap(NOTHING, reason)) for _ in shown], Field(NOTHING)]
