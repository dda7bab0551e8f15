"""Rows laid out as tables for people, whichever format they are rendered in: one function per kind of table.

Two kinds of attention stand side by side in a line; more than two have one line each.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

from qbench.numbers import percent, score
from qbench.records.metrics import is_share
from qbench.report.attentions import comparison, kind_name, kind_title
from qbench.report.delta import Damage, DamageRow, DeltaRow, Difference, ReportData
from qbench.report.evidence import Flips
from qbench.report.marks import READ_ADJUSTED, READ_TONES, Marks, marks_for
from qbench.report.metrics import Measure, first_of_each_task, in_order, in_tables, metric_name, task_name
from qbench.report.results import NOTHING, FamilyQuantization, Gap
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

Row = DeltaRow | DamageRow
R = TypeVar("R", DeltaRow, DamageRow)

# How to read a table, one fact per sentence.
READ_ARROWS = "↑ higher is better, ↓ lower is better."
READ_STAR = "*: the 95% interval (paired bootstrap over documents) excludes zero."
READ_ADDED_DOCUMENTS = (
    "The interval of an accuracy is at least about ±3 documents wide, even if no answer changed, because the bootstrap "
    "adds one document that got better and one that got worse."
)
READ_DELTA = "Δ is {other} − {reference}; accuracies are in percent."
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
READ_SUMMARY_TONES = "▲ {other} lost less than {reference}, ▼ it lost more"
READ_LOG_RATIO = "Perplexity damage is 100 × ln(quantized / unquantized), in percent; the CSV has the plain difference."
# What the count under a table counts.
COUNT_DELTAS = "Values of Δ"
COUNT_DIFFERENCES = "Differences between the attentions"
COUNT_DAMAGES = "Changes"
# For a family with only one model.
READ_LONE_DAMAGE = "Damage is quantized − unquantized; accuracies are in percent."
READ_LONE_SUMMARY = (
    "The unquantized row shows the {attention} model's scores; the other rows show what quantization changed. "
    "Accuracies are in percent."
)


def delta_tables(report: ReportData) -> list[Table]:
    """One table per family and method: the scores and Δ."""
    return [_delta_table(about, rows) for about, rows in _by_method(report.deltas)]


def damage_tables(report: ReportData) -> list[Table]:
    """One table per family and method: what quantization cost each model, and the difference if there are several."""
    found = []
    for about, rows in _by_method(report.damages):
        kinds = report.results.kinds_of(about.family)
        found.append(_damage_table(about, rows) if len(kinds) > 1 else _lone_damage_table(about, rows, kinds[0]))
    return found


def baseline_tables(report: ReportData) -> list[Table]:
    """One table of the unquantized models, families side by side; none if there are none."""
    rows = [row for row in report.deltas if row.quantization.is_unquantized]
    families = list(dict.fromkeys(row.quantization.family for row in rows))
    if not families:
        return []
    by_key = {(row.quantization.family, row.measure): row for row in rows}
    kinds = list(dict.fromkeys(attention for row in rows for attention in row.scores))
    titles = [*_score_titles(kinds), "Δ"]
    table = Table(
        name="baseline",
        title="Unquantized",
        caption=f"{_against(kinds)}, unquantized: {', '.join(families)}.",
        reading=[_read(READ_DELTA, kinds), *_reading(rows)],
        columns=[
            *_head_columns(kinds, rows[0].quantization),
            *(Column(title, group=family) for family in families for title in titles),
        ],
        heads=_heads(1, kinds),
    )
    measures = in_tables(in_order(row.measure for row in rows))
    compared = [row for row in rows if row.measure in measures]
    marks = _marks(table, COUNT_DELTAS, [(row.measure, delta) for row in compared for delta in row.deltas.values()])
    for measure in measures:
        for shown in _lines(kinds):
            line = [Field(task_name(measure.task)), Field(metric_name(measure)), *_kind_fields(shown)]
            for family in families:
                line += _unquantized_fields(table, by_key.get((family, measure)), family, measure, shown, marks)
            table.rows.append(line)
    return [table]


def summary_tables(report: ReportData) -> list[Table]:
    """One table per family: one metric of each task, one line per quantization. The answer on one screen."""
    found = []
    for family, group in groupby(report.damages, lambda row: row.quantization.family):
        unquantized = [r for r in report.deltas if r.quantization.is_unquantized and r.quantization.family == family]
        found.append(_summary_table(family, report.results.kinds_of(family), unquantized, list(group)))
    return found


def _delta_table(about: FamilyQuantization, rows: list[DeltaRow]) -> Table:
    kinds = list(rows[0].scores)
    how = "unquantized" if about.is_unquantized else f"quantized with {about.method_title}"
    with_intervals = any(delta and delta.interval for row in rows for delta in row.deltas.values())
    reading = [_read(READ_DELTA, kinds), *_reading(rows)]
    columns = [*_head_columns(kinds, about), *map(Column, _score_titles(kinds)), Column("Δ")]
    if with_intervals:
        reading += _interval_reading(rows)
        columns.append(Column("95% interval"))
    table = Table(
        name=_name("delta", about),
        title=f"{about.family}, {about.method_title}",
        caption=f"{_against(kinds)}, {how}: {about.family}.",
        reading=reading,
        columns=columns,
        heads=_heads(1 if about.is_unquantized else 2, kinds),
    )
    deltas = [(row.measure, delta) for row in _arranged(rows) for delta in row.deltas.values()]
    marks = _marks(table, COUNT_DELTAS, deltas)
    for row in _arranged(rows):
        for shown in _lines(kinds):
            line = [*_head_fields(row), *_kind_fields(shown), *_delta_fields(table, row, shown, marks)]
            if with_intervals:
                line.append(interval_field(row.deltas.get(shown[-1])))
            table.rows.append(line)
    return table


def _damage_table(about: FamilyQuantization, rows: list[DamageRow]) -> Table:
    kinds = list(rows[0].damages)
    with_flips = any(damage.flips for row in rows for damage in row.damages.values())
    with_intervals = any(found and found.interval for row in rows for found in row.differences.values())
    columns = [*_head_columns(kinds, about), *_damage_columns(kinds, with_flips), Column("Difference")]
    if with_intervals:
        columns.append(Column("95% interval"))
    table = Table(
        name=_name("damage", about),
        title=f"{about.family}, {about.method_title}: damage",
        caption=f"What {about.method_title} costs the {about.family} models: quantized − unquantized.",
        reading=_damage_reading(_read(READ_DIFFERENCE, kinds), rows, with_intervals, with_flips),
        columns=columns,
        heads=_heads(2, kinds),
    )
    differences = [(row.measure, found) for row in _arranged(rows) for found in row.differences.values()]
    marks = _marks(table, COUNT_DIFFERENCES, differences)
    own = marks_for((row.measure, damage.score) for row in _arranged(rows) for damage in row.damages.values())
    for row in _arranged(rows):
        for shown in _lines(kinds):
            line = [*_head_fields(row), *_kind_fields(shown)]
            for damage in (row.damages[attention] for attention in shown):
                line += [difference_field(table, damage.score, row.measure, own), _recovery_field(damage)]
                if with_flips:
                    line.append(_flips_field(damage.flips))
            difference = row.differences.get(shown[-1])
            line.append(difference_field(table, difference, row.measure, marks))
            if with_intervals:
                line.append(interval_field(difference))
            table.rows.append(line)
    return table


def _lone_damage_table(about: FamilyQuantization, rows: list[DamageRow], attention: str) -> Table:
    """The damage of the only model, next to its interval."""
    damages = [(row, row.damages[attention]) for row in _arranged(rows)]
    with_flips = any(damage.flips for _, damage in damages)
    with_intervals = any(isinstance(damage.score, Difference) and damage.score.interval for _, damage in damages)
    columns = [*_head_columns([attention], about), Column("Damage"), Column("Recovery")]
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
    marks = _marks(table, COUNT_DAMAGES, [(row.measure, damage.score) for row, damage in damages])
    for row, damage in damages:
        line = [*_head_fields(row), difference_field(table, damage.score, row.measure, marks), _recovery_field(damage)]
        if with_intervals:
            line.append(interval_field(damage.score))
        if with_flips:
            line.append(_flips_field(damage.flips))
        table.rows.append(line)
    return table


def _summary_table(family: str, have: Sequence[str], unquantized: list[DeltaRow], damages: list[DamageRow]) -> Table:
    measures = first_of_each_task(row.measure for row in damages)
    kinds = have if len(have) == 1 else list(damages[0].damages)
    heads = [Column("Method", "l"), Column("Quantization", "l"), *_kind_columns(kinds)]
    table = Table(
        name=f"summary-{family}",
        title=f"{family}: summary",
        caption=f"What quantization costs the {_models(family, have)}.",
        reading=_summary_reading(damages, kinds),
        columns=[*heads, *(Column(_short_name(m)) for m in measures)],
        heads=_heads(1, kinds),
    )
    rows: list[Row] = [*unquantized, *damages]
    first = [row for row in damages if row.measure in measures]
    differences = [(row.measure, found) for row in first for found in row.differences.values()]
    marks = _marks(table, COUNT_DIFFERENCES, differences)
    for about, own in groupby(rows, lambda row: row.quantization):
        by_measure = {row.measure: row for row in own}
        for shown in _lines(kinds):
            line = [Field(about.method_title), Field(quantization_name(about), about.bits)]
            if len(kinds) > 1:
                line += _kind_fields(shown)
            table.rows.append(line + [_summary_field(table, by_measure[m], shown, kinds, marks) for m in measures])
    return table


def _models(family: str, kinds: Sequence[str]) -> str:
    """What a caption calls the models of a family."""
    return f"{family} models" if len(kinds) > 1 else f"{family} {kind_name(kinds[0])} model"


def _against(kinds: Sequence[str]) -> str:
    """How a caption begins: Softpick against softmax."""
    text = comparison(kinds)
    return text[0].upper() + text[1:]


def _read(sentence: str, kinds: Sequence[str], each: str = "each attention") -> str:
    """A sentence on the reference and what is compared with it."""
    reference, *others = kinds
    other = kind_name(others[0]) if len(others) == 1 else each
    return sentence.format(other=other, reference=kind_name(reference))


def _lines(kinds: Sequence[str]) -> list[Sequence[str]]:
    """The kinds that each line shows: the reference and the other one, or one each."""
    return [kinds] if len(kinds) <= 2 else [[attention] for attention in kinds]


def _heads(heads: int, kinds: Sequence[str]) -> int:
    """How many leading columns are blocks: one more if each kind has its own line."""
    return heads + (len(_lines(kinds)) > 1)


def _kind_columns(kinds: Sequence[str]) -> list[Column]:
    return [Column("Attention", "l")] if len(_lines(kinds)) > 1 else []


def _kind_fields(shown: Sequence[str]) -> list[Field]:
    """The name of a kind that has its own line."""
    return [Field(kind_title(shown[0]))] if len(shown) == 1 else []


def _head_columns(kinds: Sequence[str], about: FamilyQuantization) -> list[Column]:
    columns = [Column("Task", "l"), Column("Metric", "l")]
    if not about.is_unquantized:
        columns.append(Column("Quantization", "l"))
    return columns + _kind_columns(kinds)


def _head_fields(row: Row) -> list[Field]:
    fields = [Field(task_name(row.measure.task)), Field(metric_name(row.measure))]
    if not row.quantization.is_unquantized:
        fields.append(Field(quantization_name(row.quantization), row.quantization.bits))
    return fields


def _score_titles(kinds: Sequence[str]) -> list[str]:
    return ["Score"] if len(_lines(kinds)) > 1 else [kind_title(attention) for attention in kinds]


def _damage_columns(kinds: Sequence[str], with_flips: bool) -> list[Column]:
    titles = ["Damage", "Recovery", "Flips"] if with_flips else ["Damage", "Recovery"]
    if len(_lines(kinds)) > 1:
        return [Column(title) for title in titles]
    return [Column(title, group=kind_title(attention)) for attention in kinds for title in titles]


def _marks(table: Table, what: str, differences: Sequence[tuple[Measure, Difference | Gap | None]]) -> Marks:
    """The adjustment for a table's differences, and its sentence under the table."""
    found = marks_for(differences)
    table.count = found.sentence(what)
    return found


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


def _summary_field(table: Table, row: Row, shown: Sequence[str], kinds: Sequence[str], marks: Marks) -> Field:
    """Softmax / softpick, or one of them. The tone of several kinds shows the difference, if it is marked."""
    if isinstance(row, DeltaRow):
        sides, difference = [score_field(table, row.scores[attention], row.measure.metric) for attention in shown], None
    else:
        sides = [difference_field(table, row.damages[attention].score, row.measure, Marks()) for attention in shown]
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


def _reading(rows: Sequence[Row], tones: str = READ_TONES) -> list[str]:
    """How to read the metrics' arrows, and if there are intervals the stars and marks. tones: what ▲ and ▼ mean."""
    differences = [difference for row in rows for difference in _differences(row)]
    reading = [READ_ARROWS]
    if any(isinstance(difference, Difference) and difference.log_ratio is not None for difference in differences):
        reading.append(READ_LOG_RATIO)
    if any(isinstance(difference, Difference) and difference.interval for difference in differences):
        reading += [READ_STAR, tones + READ_ADJUSTED]
    return reading


def _interval_reading(rows: Sequence[Row]) -> list[str]:
    """How to read a column of intervals."""
    return [READ_ADDED_DOCUMENTS] if any(is_share(row.measure.metric) for row in rows) else []


def _damage_reading(first: str, rows: Sequence[Row], with_intervals: bool, with_flips: bool) -> list[str]:
    reading = [first, *_reading(rows), READ_RECOVERY]
    if with_intervals:
        reading += _interval_reading(rows)
    if with_flips:
        reading.append(READ_FLIPS)
    return reading


def _summary_reading(damages: Sequence[DamageRow], kinds: Sequence[str]) -> list[str]:
    if len(kinds) == 1:
        return [READ_LONE_SUMMARY.format(attention=kind_name(kinds[0])), *_reading(damages)]
    reading = _reading(damages, _read(READ_SUMMARY_TONES, kinds, "the attention"))
    pair = f"Each entry is {kind_name(kinds[0])} / {kind_name(kinds[1])}"
    return [READ_SUMMARY.format(whose=pair if len(kinds) == 2 else "One row per attention"), *reading]


def _differences(row: Row) -> Sequence[Difference | Gap | None]:
    if isinstance(row, DeltaRow):
        return list(row.deltas.values())
    return [*(damage.score for damage in row.damages.values()), *row.differences.values()]


def _by_method(rows: Sequence[R]) -> list[tuple[FamilyQuantization, list[R]]]:
    """The rows of each family and method with their first quantization; unquantized rows are a separate group."""

    def group_of(row: R) -> tuple[str, str, bool]:
        return row.quantization.family, row.quantization.method, row.quantization.is_unquantized

    groups = [list(group) for _, group in groupby(rows, group_of)]
    return [(group[0].quantization, group) for group in groups]


def _arranged(rows: Sequence[R]) -> list[R]:
    """By task and metric, then by quantization: reading down shows a metric across the widths."""
    measures = in_tables(dict.fromkeys(row.measure for row in rows))
    return [row for measure in measures for row in rows if row.measure == measure]


def _name(kind: str, about: FamilyQuantization) -> str:
    return f"{kind}-{about.family}-{about.method}"
