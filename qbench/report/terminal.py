"""Tables on a terminal: in colour, with merged cells, wrapped at its width. ▲ and ▼ mean the same as the colours."""

import io
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby, takewhile, zip_longest

from qbench.output import encodable, on_one_line
from qbench.report.tables import Column, Field, Table, shared_reading

MARKS = {"better": " ▲", "worse": " ▼", "same": "", None: ""}
STYLES = {"better": "green", "worse": "red", "same": "", None: ""}
TITLE, NOTE = "bold", "dim"
GAP = "  "  # between columns
KEPT = "\u00a0"  # a space at which no line ends
MIN_WIDTH = 4  # of a column whose words are broken because the terminal is very narrow

Line = list[tuple[str, str]]  # pieces of text with their styles


def draws_tables() -> bool:
    """Whether the output is a terminal and rich is installed, which draws tables: the small installation lacks it."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def terminal(tables: Sequence[Table], remarks: Sequence[str] = (), lead: Sequence[str] = ()) -> str:
    """All tables with what is written around them, for `qbench.output.print_styled`."""
    screen = Screen()
    for sentence in lead:
        screen.paragraph(sentence, first="• ")
    for table in tables:
        screen.blank()
        screen.table(table)
    notes = [(" ".join(shared_reading(tables)), NOTE), *((remark, "") for remark in remarks)]
    for text, style in notes:
        if text:
            screen.blank()
            screen.paragraph(text, style)
    return screen.text()


class Screen:
    """What is to be shown, line by line, at the width and in the colours of the terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(file=io.StringIO(), force_terminal=sys.stdout.isatty(), highlight=False)
        self.lines: list[Line] = []

    def text(self) -> str:
        """The lines; styles are control sequences if the terminal has any."""
        from rich.text import Text

        with self.console.capture() as captured:
            for line in self.lines:
                whole = Text.assemble(*[(text.replace(KEPT, " "), style) for text, style in line])
                whole.rstrip()
                self.console.print(whole, no_wrap=True, overflow="ignore", crop=False)
        return captured.get()

    def blank(self) -> None:
        """An empty line, except at the top."""
        if self.lines:
            self.lines.append([])

    def paragraph(self, text: str, style: str = "", first: str = "") -> None:
        """A text. first: how its first line begins; the other lines are indented by its length."""
        for number, line in enumerate(wrapped(_safe(text), self.console.width - len(first))):
            self.lines.append([(" " * len(first) if number else first, style), (line, style)])

    def table(self, table: Table) -> None:
        """A table with its title, caption and footnotes."""
        self.paragraph(table.title, TITLE)
        self.paragraph(table.caption)
        self.grid(table)
        for letter, text in table.footnotes.items():
            self.paragraph(text, NOTE, first=f"[{letter}] ")
        if table.count:
            self.paragraph(table.count, NOTE)

    def grid(self, table: Table) -> None:
        """The lines of a table. One that is too wide is drawn in parts, each with the columns that name the rows."""
        for number, columns in enumerate(_parts(table, self.console.width)):
            if number:
                self.blank()
            self.lines += columns.header()
            self.lines += columns.body()


@dataclass(frozen=True)
class _Part:
    """Some columns of a table, with their widths."""

    table: Table
    chosen: Sequence[int]
    widths: Sequence[int]

    @property
    def columns(self) -> list[Column]:
        return [self.table.columns[n] for n in self.chosen]

    def header(self) -> list[Line]:
        titles = [(_title(column), TITLE) for column in self.columns]
        stacks = self._stacks(titles)
        height = max(map(len, stacks))
        at_the_bottom = [[""] * (height - len(stack)) + stack for stack in stacks]
        return [*self._groups(), *self._lines(at_the_bottom, titles), self._rule()]

    def body(self) -> list[Line]:
        """The rows. A block's name may go on beside the next row of the block."""
        found: list[Line] = []
        table = self.table
        rest: list[list[str]] = [[] for _ in self.chosen]
        blocks = any(_merged(table, row, 0) for row in range(len(table.rows)))
        for number, row in enumerate(table.rows):
            if blocks and number and not _merged(table, number, 0):
                found.append(self._rule())
            fields = [_shown(row[n], table.columns[n]) for n in self.chosen]
            stacks = [
                rest[place] if _merged(table, number, n) else stack
                for place, (n, stack) in enumerate(zip(self.chosen, self._stacks(fields), strict=True))
            ]
            ends = [stack for n, stack in zip(self.chosen, stacks, strict=True) if not _merged(table, number + 1, n)]
            height = max([1, *map(len, ends)])
            found += self._lines([stack[:height] for stack in stacks], fields)
            rest = [stack[height:] for stack in stacks]
        return [*found, self._rule()]

    def _rule(self) -> Line:
        return [("─" * _total(self.widths), NOTE)]

    def _groups(self) -> list[Line]:
        """The line above the header, in which a group's name spans its columns."""
        if not any(column.group for column in self.columns):
            return []
        line = ""
        for group, own in groupby(zip(self.columns, self.widths, strict=True), lambda pair: pair[0].group):
            width = _total([width for _, width in own])
            line += (_across(_safe(group), width) if group else " " * width) + GAP
        return [[(line, TITLE)]]

    def _stacks(self, fields: Sequence[tuple[str, str]]) -> list[list[str]]:
        """The lines of each field."""
        return [wrapped(text, width) for (text, _), width in zip(fields, self.widths, strict=True)]

    def _lines(self, stacks: Sequence[list[str]], fields: Sequence[tuple[str, str]]) -> list[Line]:
        """The lines of a row, from the lines of its fields; each field keeps its style."""
        found = []
        for texts in zip_longest(*stacks, fillvalue=""):
            line: Line = []
            for text, (_, style), width, column in zip(texts, fields, self.widths, self.columns, strict=True):
                line += [(_aligned(text, width, column.align), style), (GAP, "")]
            found.append(line)
        return found


def _parts(table: Table, width: int) -> list[_Part]:
    """The table; or, if it does not fit even with its texts wrapped, parts of it, with groups kept together."""
    natural, least = _sizes(table)
    names = [n for n, _ in enumerate(takewhile(lambda column: column.align == "l", table.columns))]
    chosen = [list(range(len(table.columns)))]
    if _total(least) > width:
        sizes = [least[n] if n in names else natural[n] for n in range(len(table.columns))]
        chosen = _split(table, names, sizes, width)
    broken = [MIN_WIDTH if n in names else size for n, size in enumerate(least)]  # names first
    floors = (least, broken, [MIN_WIDTH] * len(least))
    return [
        _Part(table, own, _fitted([natural[n] for n in own], [[floor[n] for n in own] for floor in floors], width))
        for own in chosen
    ]


def _split(table: Table, names: list[int], sizes: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each part: those that name the rows, and as many others as fit."""
    others = range(len(names), len(table.columns))
    units = [list(own) for _, own in groupby(others, lambda n: table.columns[n].group or n)]
    parts = [list(names)]
    for unit in units:
        for more in [unit] if _total([sizes[n] for n in (*names, *unit)]) <= width else [[n] for n in unit]:
            if parts[-1] != names and _total([sizes[n] for n in (*parts[-1], *more)]) > width:
                parts.append(list(names))
            parts[-1] += more
    return parts


def _sizes(table: Table) -> tuple[list[int], list[int]]:
    """For each column, the width of its longest text and of its longest word."""
    natural, least = [], []
    for n, column in enumerate(table.columns):
        texts = [_title(column), *(_shown(row[n], column)[0] for row in table.rows)]
        natural.append(max(map(_length, texts)))
        words = max(_length(word) for text in texts for word in text.split(" "))
        least.append(words)
    return natural, least


def _fitted(natural: Sequence[int], floors: Sequence[Sequence[int]], width: int) -> list[int]:
    """Widths that fit: the widest columns give way first, down to the first floor; if needed, to the next."""
    found = list(natural)
    for floor in floors:
        while _total(found) > width and (wide := [n for n in range(len(found)) if found[n] > floor[n]]):
            found[max(wide, key=lambda n: found[n])] -= 1
    return found


def _total(widths: Sequence[int]) -> int:
    """The width of columns with the gaps between them."""
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _merged(table: Table, row: int, column: int) -> bool:
    """Whether a field is merged with the field above: the same text, in the same block."""
    if not 0 < row < len(table.rows) or column >= table.heads:
        return False
    above, own = table.rows[row - 1], table.rows[row]
    return all(above[n] == own[n] for n in range(column + 1))


def _safe(text: str) -> str:
    """A text on one line, without control characters, and only with characters that the terminal's encoding has."""
    return encodable(on_one_line(text), sys.stdout.encoding or "utf-8")


def _title(column: Column) -> str:
    """A column's title; an arrow stays with the word before it."""
    return re.sub(" (?=[↑↓])", KEPT, _safe(column.title))


def _shown(field: Field, column: Column) -> tuple[str, str]:
    """A field's text with its marks, and its style. A number and what belongs to it stay on one line."""
    text = re.sub(" (?=[↑↓])", KEPT, _safe(field.text))
    if column.align == "r":
        text = text.replace(" ", KEPT).replace(f"/{KEPT}", "/ ")
    star, marks = "*" if field.starred else "", f" [{field.marks}]" if field.marks else ""
    return text + f"{star}{MARKS[field.tone]}{marks}".replace(" ", KEPT), STYLES[field.tone]


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, broken at spaces; a word that is longer than a line is broken anywhere."""
    lines = [""]
    for word in _words(text, max(width, 1)):
        if lines[-1] and _length(lines[-1]) + 1 + _length(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


def _words(text: str, width: int) -> Iterable[str]:
    from rich.cells import chop_cells

    for word in text.split(" "):
        yield from chop_cells(word, width) if _length(word) > width else [word]


def _length(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _across(title: str, width: int) -> str:
    """A title in the middle of a line that spans its columns; cut if it does not fit."""
    from rich.cells import set_cell_size

    shown = f" {title} " if _length(title) + 2 <= width else set_cell_size(title, width)
    left = (width - _length(shown)) // 2
    return "─" * left + shown + "─" * (width - left - _length(shown))


def _aligned(text: str, width: int, align: str) -> str:
    space = max(width - _length(text), 0)
    left = {"l": 0, "c": space // 2, "r": space}[align]
    return " " * left + text + " " * (space - left)
