"""Tables of damage: what quantization cost each model, in full and in a summary with one metric per task."""

from collections.abc import Sequence
from itertools import groupby

from qbench.numbers import percent, score
from qbench.records.metrics import is_share
from qbench.report.attentions import kind_name, kind_title
from qbench.report.delta import Damage, DamageRow, DeltaRow, Difference, ReportData
from qbench.report.evidence import Flips
from qbench.report.layouts import (
    Row,
    about_kinds,
    arranged,
    block_columns,
    by_method,
    head_columns,
    head_fields,
    how_to_read,
    how_to_read_intervals,
    kind_columns,
    kind_fields,
    lines_of,
    table_marks,
    table_name,
    tones_of,
)
from qbench.report.marks import Marks
from qbench.report.metrics import Measure, first_of_each_task, metric_name, task_name
from qbench.report.results import NOTHING, FamilyQuantization
from qbench.report.tables import (
    Column,
    Field,
    Table,
    difference_field,
    interval_field,
    number_field,
    quantization_name,
    score_field,
)

READ_DIFFERENCE = "The difference is {other}'s damage − {reference}'s; accuracies are in percent."
READ_RECOVERY = (
    "Recovery: quantized / unquantized score, or unquantized / quantized if lower is better (perplexities): less than "
    "100% is a loss."
)
READ_FLIPS = "Flips: documents (%) that became wrong / that became right."
READ_SUMMARY = (
    "{whose}. Unquantized rows show scores; the other rows show what quantization changed. "
    "Accuracies are in percent, normalized by length (acc_norm) if the task has that metric."
)
COUNT_DIFFERENCES = "differences between the attentions"
# For a family with only one model.
READ_LONE_DAMAGE = "Damage is quantized − unquantized; accuracies are in percent."
READ_LONE_TONES = "▲ better than unquantized, ▼ worse"
COUNT_DAMAGES = "changes"


def damage_tables(report: ReportData) -> list[Table]:
    """One table per family and method: what quantization cost each model, and the difference if there are several."""
    found = []
    for about, rows in by_method(report.damages):
        kinds = report.results.kinds_of(about.family)
        found.append(_damage_table(about, rows) if len(kinds) > 1 else _lone_damage_table(about, rows, kinds[0]))
    return found


def summary_tables(report: ReportData) -> list[Table]:
    """One table per family: one metric of each task, one line per quantization. The answer on one screen."""
    found = []
    for family, group in groupby(report.damages, lambda row: row.quantization.family):
        unquantized = [r for r in report.deltas if r.quantization.is_unquantized and r.quantization.family == family]
        found.append(_summary_table(family, report.results.kinds_of(family), unquantized, list(group)))
    return found


def _damage_table(about: FamilyQuantization, rows: list[DamageRow]) -> Table:
    kinds = list(rows[0].damages)
    with_flips = any(damage.flips for row in rows for damage in row.damages.values())
    with_intervals = any(found and found.interval for row in rows for found in row.differences.values())
    columns = [*head_columns(kinds, about), *_damage_columns(kinds, with_flips), Column("Difference")]
    if with_intervals:
        columns.append(Column("95% interval", about_previous=True))
    table = Table(
        name=table_name("damage", about),
        title=f"{about.family}, {about.method_title}: damage",
        caption=f"What {about.method_title} costs the {about.family} models: quantized − unquantized.",
        reading=_damage_reading(about_kinds(READ_DIFFERENCE, kinds), tones_of(kinds), rows, with_intervals, with_flips),
        columns=columns,
        heads=block_columns(2, kinds),
    )
    differences = [(row.measure, found) for row in arranged(rows) for found in row.differences.values()]
    marks = table_marks(table, COUNT_DIFFERENCES, differences)
    for row in arranged(rows):
        for shown in lines_of(kinds):
            line = [*head_fields(row), *kind_fields(shown)]
            for damage in (row.damages[attention] for attention in shown):
                line += [difference_field(table, damage.score, row.measure, Marks()), _recovery_field(damage)]
                if with_flips:
                    line.append(_flips_field(damage.flips))
            difference = row.differences.get(shown[-1])
            line.append(difference_field(table, difference, row.measure, marks))
            if with_intervals:
                line.append(interval_field(difference, row.measure))
            table.rows.append(line)
    return table


def _lone_damage_table(about: FamilyQuantization, rows: list[DamageRow], attention: str) -> Table:
    """The damage of the only model, next to its interval."""
    damages = [(row, row.damages[attention]) for row in arranged(rows)]
    with_flips = any(damage.flips for _, damage in damages)
    with_intervals = any(isinstance(damage.score, Difference) and damage.score.interval for _, damage in damages)
    columns = [*head_columns([attention], about), Column("Damage"), Column("Recovery", about_previous=True)]
    if with_intervals:
        columns.append(Column("95% interval", about_previous=True))
    if with_flips:
        columns.append(Column("Flips", about_previous=True))
    table = Table(
        name=table_name("damage", about),
        title=f"{about.family}, {about.method_title}: damage",
        caption=f"What {about.method_title} costs the {_models(about.family, [attention])}: quantized − unquantized.",
        reading=_damage_reading(READ_LONE_DAMAGE, READ_LONE_TONES, rows, with_intervals, with_flips),
        columns=columns,
    )
    marks = table_marks(table, COUNT_DAMAGES, [(row.measure, damage.score) for row, damage in damages])
    for row, damage in damages:
        line = [*head_fields(row), difference_field(table, damage.score, row.measure, marks), _recovery_field(damage)]
        if with_intervals:
            line.append(interval_field(damage.score, row.measure))
        if with_flips:
            line.append(_flips_field(damage.flips))
        table.rows.append(line)
    return table


def _summary_table(family: str, have: Sequence[str], unquantized: list[DeltaRow], damages: list[DamageRow]) -> Table:
    measures = first_of_each_task(row.measure for row in damages)
    kinds = have if len(have) == 1 else list(damages[0].damages)
    heads = [Column("Method", "l"), Column("Quantization", "l"), *kind_columns(kinds)]
    table = Table(
        name=f"summary-{family}",
        title=f"{family}: summary",
        caption=f"What quantization costs the {_models(family, have)}{_pair(kinds)}.",
        reading=_summary_reading(damages, kinds),
        columns=[*heads, *(Column(_short_name(m)) for m in measures)],
        heads=block_columns(1, kinds),
    )
    rows: list[Row] = [*unquantized, *damages]
    first = [row for row in damages if row.measure in measures]
    if len(kinds) == 1:
        marks = table_marks(table, COUNT_DAMAGES, [(row.measure, row.damages[kinds[0]].score) for row in first])
    else:
        differences = [(row.measure, found) for row in first for found in row.differences.values()]
        marks = table_marks(table, COUNT_DIFFERENCES, differences, shown=False)
    for about, own in groupby(rows, lambda row: row.quantization):
        by_measure = {row.measure: row for row in own}
        for shown in lines_of(kinds):
            line = [Field(about.method_title), Field(quantization_name(about), about.bits)]
            if len(kinds) > 1:
                line += kind_fields(shown)
            table.rows.append(line + [_summary_field(table, by_measure[m], shown, kinds, marks) for m in measures])
    return table


def _pair(kinds: Sequence[str]) -> str:
    """Which of two numbers is whose."""
    return f" ({kind_name(kinds[0])} / {kind_name(kinds[1])})" if len(kinds) == 2 else ""


def _models(family: str, kinds: Sequence[str]) -> str:
    """What a caption calls the models of a family."""
    return f"{family} models" if len(kinds) > 1 else f"{family} {kind_name(kinds[0])} model"


def _damage_columns(kinds: Sequence[str], with_flips: bool) -> list[Column]:
    titles = ["Damage", "Recovery", "Flips"] if with_flips else ["Damage", "Recovery"]
    if len(lines_of(kinds)) > 1:
        return [Column(title, about_previous=title != titles[0]) for title in titles]
    return [
        Column(title, group=kind_title(attention), about_previous=title != titles[0])
        for attention in kinds
        for title in titles
    ]


def _summary_field(table: Table, row: Row, shown: Sequence[str], kinds: Sequence[str], marks: Marks) -> Field:
    """Softmax / softpick, or one of them. The tone shows what is marked: their difference, or a lone model's damage."""
    if isinstance(row, DeltaRow):
        sides, difference = [score_field(table, row.scores[attention], row.measure.metric) for attention in shown], None
    else:
        own = marks if len(kinds) == 1 else Marks()
        sides = [difference_field(table, row.damages[attention].score, row.measure, own) for attention in shown]
        difference = row.differences.get(shown[-1])
    if len(kinds) == 1:
        return sides[0]
    tone = difference.tone(row.measure) if difference and marks.marks(difference) else None
    text = " / ".join(f"{side.text}*" if side.starred else side.text for side in sides)
    notes = ",".join(dict.fromkeys(mark for side in sides for mark in side.marks.split(",") if mark))
    compared = difference.shown if difference else None
    return Field(text, sides[0].value if len(shown) == 1 else compared, tone, marks=notes)


def _recovery_field(damage: Damage) -> Field:
    return number_field(damage.recovery, lambda value: percent(value / 100))


def _flips_field(flips: Flips | None) -> Field:
    if flips is None:
        return Field(NOTHING)
    total = flips.right_to_wrong + flips.wrong_to_right
    return Field(f"{score(flips.right_to_wrong)} / {score(flips.wrong_to_right)}", total)


def _short_name(measure: Measure) -> str:
    """A task with its metric; the kind of an accuracy is left out."""
    name, metric = task_name(measure.task), metric_name(measure)
    return f"{name}, %{metric[-2:] if measure.better else ''}" if is_share(measure.metric) else f"{name} {metric}"


def _damage_reading(first: str, tones: str, rows: Sequence[Row], with_intervals: bool, with_flips: bool) -> list[str]:
    reading = [first, *how_to_read(rows, tones), READ_RECOVERY]
    if with_intervals:
        reading += how_to_read_intervals(rows)
    if with_flips:
        reading.append(READ_FLIPS)
    return reading


def _summary_reading(damages: Sequence[DamageRow], kinds: Sequence[str]) -> list[str]:
    if len(kinds) == 1:
        return [
            READ_SUMMARY.format(whose=f"All numbers are the {kind_name(kinds[0])} model's"),
            *how_to_read(damages, READ_LONE_TONES),
        ]
    reading = how_to_read(damages, tones_of(kinds))
    pair = f"Each entry is {kind_name(kinds[0])} / {kind_name(kinds[1])}"
    return [READ_SUMMARY.format(whose=pair if len(kinds) == 2 else "One row per attention"), *reading]
