"""What the layouts of tables share: leading columns, marks, and how to read them. score_tables.py and damage_tables.py
have one function per kind of table.

Two kinds of attention stand side by side in a line; more than two have one line each.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

from qbench.records.metrics import is_share
from qbench.report.attentions import comparison, kind_name, kind_title
from qbench.report.delta import DamageRow, DeltaRow, Difference
from qbench.report.marks import READ_ADJUSTED, Marks, marks_for
from qbench.report.metrics import Measure, in_tables, metric_name, task_name
from qbench.report.results import FamilyQuantization, Gap
from qbench.report.tables import Column, Field, Table, quantization_name

Row = DeltaRow | DamageRow
R = TypeVar("R", DeltaRow, DamageRow)

# How to read a table, one fact per sentence.
READ_ARROWS = "↑ higher is better, ↓ lower is better."
READ_STAR = "*: the 95% interval (paired bootstrap over documents) excludes zero."
READ_TONES = "▲ in favour of {other}, ▼ in favour of {reference}"  # in tables of all kinds
READ_ADDED_DOCUMENTS = (
    "The interval of an accuracy is at least about ±3 documents wide, even if no answer changed, because the bootstrap "
    "adds one document that got better and one that got worse."
)
READ_LOG_RATIO = "Perplexity damage is 100 × ln(quantized / unquantized), in percent; the CSV has the plain difference."


def compared(kinds: Sequence[str]) -> str:
    """How a caption begins: Softpick against softmax."""
    text = comparison(kinds)
    return text[0].upper() + text[1:]


def tones_of(kinds: Sequence[str]) -> str:
    """What ▲ and ▼ mean."""
    return about_kinds(READ_TONES, kinds, "the attention")


def about_kinds(sentence: str, kinds: Sequence[str], each: str = "each attention") -> str:
    """A sentence on the reference and what is compared with it."""
    reference, *others = kinds
    other = kind_name(others[0]) if len(others) == 1 else each
    return sentence.format(other=other, reference=kind_name(reference))


def lines_of(kinds: Sequence[str]) -> list[Sequence[str]]:
    """The kinds that each line shows: the reference and the other one, or one each."""
    return [kinds] if len(kinds) <= 2 else [[attention] for attention in kinds]


def block_columns(heads: int, kinds: Sequence[str]) -> int:
    """How many leading columns are blocks: one more if each kind has its own line."""
    return heads + (len(lines_of(kinds)) > 1)


def kind_columns(kinds: Sequence[str]) -> list[Column]:
    return [Column("Attention", "l")] if len(lines_of(kinds)) > 1 else []


def kind_fields(shown: Sequence[str]) -> list[Field]:
    """The name of a kind that has its own line."""
    return [Field(kind_title(shown[0]))] if len(shown) == 1 else []


def head_columns(kinds: Sequence[str], about: FamilyQuantization) -> list[Column]:
    columns = [Column("Task", "l"), Column("Metric", "l")]
    if not about.is_unquantized:
        columns.append(Column("Quantization", "l"))
    return columns + kind_columns(kinds)


def head_fields(row: Row) -> list[Field]:
    fields = [Field(task_name(row.measure.task)), Field(metric_name(row.measure))]
    if not row.quantization.is_unquantized:
        fields.append(Field(quantization_name(row.quantization), row.quantization.bits))
    return fields


def score_titles(kinds: Sequence[str]) -> list[str]:
    return ["Score"] if len(lines_of(kinds)) > 1 else [kind_title(attention) for attention in kinds]


def table_marks(
    table: Table, what: str, differences: Sequence[tuple[Measure, Difference | Gap | None]], shown: bool = True
) -> Marks:
    """The adjustment for a table's differences, and its sentence under the table. what: the differences, in the
    plural. shown: whether the table has them as numbers."""
    found = marks_for(differences)
    table.count = found.sentence(what, shown)
    return found


def how_to_read(rows: Sequence[Row], tones: str) -> list[str]:
    """How to read the metrics' arrows, and if there are intervals the stars and marks. tones: what ▲ and ▼ mean."""
    differences = [difference for row in rows for difference in _differences(row)]
    reading = [READ_ARROWS]
    if any(isinstance(difference, Difference) and difference.log_ratio is not None for difference in differences):
        reading.append(READ_LOG_RATIO)
    if any(isinstance(difference, Difference) and difference.interval for difference in differences):
        reading += [READ_STAR, tones + READ_ADJUSTED]
    return reading


def how_to_read_intervals(rows: Sequence[Row]) -> list[str]:
    """How to read a column of intervals."""
    return [READ_ADDED_DOCUMENTS] if any(is_share(row.measure.metric) for row in rows) else []


def _differences(row: Row) -> Sequence[Difference | Gap | None]:
    if isinstance(row, DeltaRow):
        return list(row.deltas.values())
    return [*(damage.score for damage in row.damages.values()), *row.differences.values()]


def by_method(rows: Sequence[R]) -> list[tuple[FamilyQuantization, list[R]]]:
    """The rows of each family and method with their first quantization; unquantized rows are a separate group."""

    def group_of(row: R) -> tuple[str, str, bool]:
        return row.quantization.family, row.quantization.method, row.quantization.is_unquantized

    groups = [list(group) for _, group in groupby(rows, group_of)]
    return [(group[0].quantization, group) for group in groups]


def arranged(rows: Sequence[R]) -> list[R]:
    """By task and metric, then by quantization: reading down shows a metric across the widths."""
    measures = in_tables(dict.fromkeys(row.measure for row in rows))
    return [row for measure in measures for row in rows if row.measure == measure]


def table_name(kind: str, about: FamilyQuantization) -> str:
    return f"{kind}-{about.family}-{about.method}"
