"""Tables of scores: kinds of attention next to the reference (Δ), and the unquantized models of all families."""

from collections.abc import Sequence

from qbench.report.attentions import kind_name
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
COUNT_DELTAS = "Values of Δ"


def delta_tables(report: ReportData) -> list[Table]:
    """One table per family and method: the scores and Δ."""
    return [_delta_table(about, rows) for about, rows in by_method(report.deltas)]


def baseline_tables(report: ReportData) -> list[Table]:
    """One table of the unquantized models, families side by side; none if there are none."""
    rows = [row for row in report.deltas if row.quantization.is_unquantized]
    families = list(dict.fromkeys(row.quantization.family for row in rows))
    if not families:
        return []
    by_key = {(row.quantization.family, row.measure): row for row in rows}
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
        columns.append(Column("95% interval"))
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
                line.append(interval_field(row.deltas.get(shown[-1])))
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
    lacking = f"There is no {kind_name(shown[0])} model of {family} here."
    reason = lacking if row else f"{family} has no {measure.metric} of {measure.task}."
    return [*[score_field(table, Gap(NOTHING, reason)) for _ in shown], Field(NOTHING)]
