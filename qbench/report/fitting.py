"""Tables cut into pieces that fit a page: by columns if they are too wide for small type, by rows if they are too long.

A table that is too wide first gives up its leading columns: each of their blocks becomes a line across the table. If
that is not enough, its other columns are dealt out to several pieces, whole groups together if they fit. A value is
never parted from its interval: a value with more columns about it than fit is repeated in front of the rest of them.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from qbench.report.tables import Column, Field, Table, groups_of

MIN_SIZE = 7.0  # points: smaller type cannot be read
COLUMN_GAP, LEAST_GAP = 6.0, 4.0  # points, between two columns of a table, and if it fits only with less
MAX_LINES = 52  # of a table on one page
# Widths in Times at 7 points, in em, with minus signs and marks in TeX's own mathematical type.
WIDTHS = dict.fromkeys(".,", 0.25) | dict.fromkeys(":;'|!ijlt/ \u00a0", 0.28) | dict.fromkeys("[]()fr", 0.34)
WIDTHS |= dict.fromkeys("s", 0.39) | dict.fromkeys("%mwMW", 0.83)
WIDTHS |= dict.fromkeys("−▲▼", 0.9) | {"-": 0.34} | dict.fromkeys("+↑↓Δ<>", 0.6)
MINUS = re.compile(r"(?<![\w.])-(?=\d)")  # a hyphen that is a sign
UPPER_CASE, OTHER = 0.7, 0.5
MARK = 0.36  # em, of a letter or star above the line
MAX_HEADER_LINES = 3


@dataclass(frozen=True)
class Piece:
    """A part of a table that fits: some of its columns and rows."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Field]]
    heads: int  # leading columns whose equal neighbours form a block
    lines: Sequence[str] = ()  # for each row, the line across the table above it; empty if there is none

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The line above the header: groups, and how many columns each spans; empty without groups."""
        return groups_of(self.columns)


def pieces(table: Table, width: float) -> list[Piece]:
    """The pieces of a table for lines of this width, in points."""
    whole = Piece(table.columns, table.rows, table.heads)
    if _width(whole) > width:
        whole = _folded(whole)
    return [part for piece in _narrow(whole, width) for part in _short(piece)]


def column_gap(piece: Piece, width: float) -> float:
    """The points between two columns with which it fits."""
    return COLUMN_GAP if _width(piece, COLUMN_GAP) <= width else LEAST_GAP


def starts_block(rows: Sequence[Sequence[Field]], row: int, column: int) -> bool:
    """Whether the field begins a block: it, or one to its left, differs from the one above."""
    if row == 0:
        return True
    return [f.text for f in rows[row][: column + 1]] != [f.text for f in rows[row - 1][: column + 1]]


def block_height(rows: Sequence[Sequence[Field]], row: int, column: int) -> int:
    """How many rows the block has that begins here."""
    end = row + 1
    while end < len(rows) and not starts_block(rows, end, column):
        end += 1
    return end - row


def header_lines(column: Column, rows: Sequence[Sequence[Field]], place: int) -> list[str]:
    """A column's title on as few lines as possible without being wider than what is below it."""
    room = max((_field_width(row[place]) for row in rows), default=0.0)
    words = column.title.replace(" ↑", "\u00a0↑").replace(" ↓", "\u00a0↓").split(" ")
    room = max([room, *map(_text_width, words)])
    lines = [words[0]]
    for word in words[1:]:
        if _text_width(f"{lines[-1]} {word}") <= room or len(lines) == MAX_HEADER_LINES:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _folded(piece: Piece) -> Piece:
    """The leading columns as lines across the table; at least one column of names stays."""
    names = sum(column.align == "l" for column in piece.columns)
    fold = min(piece.heads, names - 1)
    if fold < 1:
        return piece
    lines = []
    for i, row in enumerate(piece.rows):
        titles = (field.text for field in row[:fold])
        lines.append(", ".join(titles) if starts_block(piece.rows, i, fold - 1) else "")
    return Piece(piece.columns[fold:], [row[fold:] for row in piece.rows], piece.heads - fold, lines)


def _narrow(piece: Piece, width: float) -> list[Piece]:
    """Pieces of columns, each with the names in front."""
    names = next((n for n, column in enumerate(piece.columns) if column.align != "l"), len(piece.columns))
    blocks: list[list[int]] = []
    for _, own in groupby(range(names, len(piece.columns)), lambda n: piece.columns[n].group):
        block = list(own)
        blocks += [block] if _width(_some(piece, names, block)) <= width else _values(piece, names, block, width)
    found: list[list[int]] = []
    for block in blocks:
        if found and _width(_some(piece, names, found[-1] + block)) <= width:
            found[-1] += block
        else:
            found.append(block)
    return [_some(piece, names, columns) for columns in found] or [piece]


def _values(piece: Piece, names: int, block: Sequence[int], width: float) -> list[list[int]]:
    """Each value with the columns about it; the value again with those that do not fit."""
    found: list[list[int]] = []
    value = block[0]
    for n in block:
        if not piece.columns[n].about_previous:
            value = n
            found.append([n])
        elif _width(_some(piece, names, [*found[-1], n])) <= width:
            found[-1].append(n)
        else:
            found.append([value, n])
    return found


def _some(piece: Piece, names: int, columns: Sequence[int]) -> Piece:
    """The names and these columns."""
    places = [*range(names), *columns]
    rows = [[row[n] for n in places] for row in piece.rows]
    return replace(piece, columns=[piece.columns[n] for n in places], rows=rows)


def _short(piece: Piece) -> list[Piece]:
    """Pieces of rows, about equally long, cut where a block begins if possible."""
    found, rows, lines = [], list(piece.rows), list(piece.lines) or [""] * len(piece.rows)
    while (left := _height(lines)) > MAX_LINES:
        cuts = [n for n in range(1, len(rows)) if lines[n] or (piece.heads and starts_block(rows, n, 0))]
        fitting = [n for n in cuts or range(1, len(rows)) if _height(lines[:n]) <= MAX_LINES]
        equal = left / math.ceil(left / MAX_LINES)
        cut = min(fitting or [MAX_LINES // 2], key=lambda n: abs(_height(lines[:n]) - equal))
        found.append(replace(piece, rows=rows[:cut], lines=lines[:cut]))
        rows, lines = rows[cut:], lines[cut:]
    return [*found, replace(piece, rows=rows, lines=lines)]


def _height(lines: Sequence[str]) -> int:
    return len(lines) + sum(map(bool, lines))


def _width(piece: Piece, gap: float = LEAST_GAP) -> float:
    """About how wide it is in the smallest type, in points."""
    widths = []
    for n, column in enumerate(piece.columns):
        fields = max((_field_width(row[n]) for row in piece.rows), default=0.0)
        title = max(map(_text_width, header_lines(column, piece.rows, n)))
        widths.append(max(fields, title))
    return MIN_SIZE * sum(widths) + gap * (len(widths) - 1)


def _field_width(field: Field) -> float:
    marks = len(field.marks) + field.starred
    return _text_width(field.text) + MARK * marks + (WIDTHS["▲"] if field.tone else 0)


def _text_width(text: str) -> float:
    return sum(_character_width(c) for c in MINUS.sub("−", text))


def _character_width(c: str) -> float:
    return WIDTHS.get(c) or (UPPER_CASE if c.isupper() else OTHER)
