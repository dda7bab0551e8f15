"""A table that any format can render: columns, fields, marks and footnotes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from qbench.numbers import score, signed, signed_interval, signed_significant, significant
from qbench.records.metrics import is_nats
from qbench.report.bootstrap import MAX_SUM_ERROR
from qbench.report.delta import Difference, Tone
from qbench.report.marks import Marks
from qbench.report.metrics import Measure
from qbench.report.results import NOTHING, FamilyQuantization, Gap, Score

KL_DIGITS = 2  # of differences and intervals: with three, a table of damages is too wide for a page


@dataclass(frozen=True)
class Column:
    """A column's header; its group, if any, is the header above."""

    title: str
    align: Literal["l", "c", "r"] = "r"
    group: str = ""
    about_previous: bool = False  # says more about the value to its left: a split table never parts the two


@dataclass(frozen=True)
class Field:
    """One field of a table."""

    text: str
    value: float | None = None  # to sort by
    tone: Tone | None = None
    starred: bool = False
    marks: str = ""  # letters of footnotes


@dataclass
class Table:
    """A table that any format can render."""

    name: str  # for labels
    title: str
    caption: str
    reading: Sequence[str]  # how to read numbers and marks, one sentence each; many tables share them
    columns: Sequence[Column]
    heads: int = 2  # leading columns, whose equal neighbours form a block
    rows: list[list[Field]] = field(default_factory=list)
    footnotes: dict[str, str] = field(default_factory=dict)  # text by letter
    count: str = ""  # how many rows are starred, and how many are significant after adjustment; under the table

    def mark(self, notes: Sequence[str]) -> str:
        """The letters of these footnotes; new ones are added."""
        known = {text: letter for letter, text in self.footnotes.items()}
        for note in notes:
            if note not in known:
                known[note] = _letter(len(self.footnotes))
                self.footnotes[known[note]] = note
        return ",".join(known[note] for note in dict.fromkeys(notes))

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The line above the header: groups, and how many columns each spans; empty without groups."""
        return groups_of(self.columns)


def groups_of(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Neighbouring columns with the same group, and how many they are."""
    if not any(column.group for column in columns):
        return []
    return [(group, len(list(own))) for group, own in groupby(columns, lambda column: column.group)]


def shared_reading(tables: Sequence[Table]) -> list[str]:
    """How to read these tables, each sentence once."""
    return list(dict.fromkeys(text for table in tables for text in table.reading))


def quantization_name(quantization: FamilyQuantization) -> str:
    """What distinguishes quantizations of one method: 3-bit g64."""
    if quantization.is_unquantized:
        return NOTHING
    options = quantization.label.removeprefix(f"{quantization.method}-{quantization.bits}").lstrip("-")
    return f"{quantization.bits}-bit {options}".strip()


def score_field(table: Table, found: Score | Gap, metric: str = "") -> Field:
    """A score of a metric, or the text shown instead, with its footnotes."""
    if isinstance(found, Gap):
        return Field(found.text, marks=table.mark([found.reason]))
    text = significant(found.value) if is_nats(metric) else score(found.value)
    return Field(text, found.value, marks=table.mark(found.notes))


def difference_field(table: Table, difference: Difference | Gap | None, measure: Measure, marks: Marks) -> Field:
    """A difference, starred if its interval excludes zero, in its tone if it is marked."""
    if difference is None:
        return Field(NOTHING)
    if isinstance(difference, Gap):
        return score_field(table, difference)
    tone = difference.tone(measure) if marks.marks(difference) else None
    unit = "" if difference.log_ratio is None else "%"
    text = signed(difference.shown, difference.decimals) + unit
    if _has_small_units(measure, difference.shown):
        text = signed_significant(difference.shown, KL_DIGITS)
    return Field(text, difference.shown, tone, difference.significant, table.mark(difference.notes))


def interval_field(difference: Difference | Gap | None, measure: Measure) -> Field:
    """The 95% interval of a difference."""
    if not isinstance(difference, Difference) or difference.shown_interval is None:
        return Field(NOTHING)
    low, high = difference.shown_interval
    text = signed_interval(low, high, difference.interval_decimals)
    if _has_small_units(measure, low, high):
        text = f"[{signed_significant(low, KL_DIGITS)}, {signed_significant(high, KL_DIGITS)}]"
    return Field(text, high - low)


def _has_small_units(measure: Measure, *values: float) -> bool:
    """Whether significant digits are shown instead of decimals: of KL, but not of the noise of its sums."""
    return is_nats(measure.metric) and max(map(abs, values)) > MAX_SUM_ERROR


def number_field(value: float | None, how: Callable[[float], str]) -> Field:
    """A measured number; a dash if there is none."""
    return Field(NOTHING) if value is None else Field(how(value), value)


def _letter(index: int) -> str:
    """a to z, then aa, ab, …"""
    return (_letter(index // 26 - 1) if index >= 26 else "") + chr(ord("a") + index % 26)
