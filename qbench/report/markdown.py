"""Tables in GitHub's Markdown. Colours do not survive there: ▲ is for the better and ▼ for the worse."""

import re
from collections.abc import Sequence

from qbench.report.tables import Field, Table

TONES = {"better": " ▲", "worse": " ▼", "same": "", None: ""}
LEGEND = "▲ for the better, ▼ for the worse, whichever way the metric points."
PAD = {"l": str.ljust, "c": str.center, "r": str.rjust}
RULE = {"l": lambda n: ":" + "-" * (n - 1), "c": lambda n: f":{'-' * (n - 2)}:", "r": lambda n: "-" * (n - 1) + ":"}


def markdown(tables: Sequence[Table], remarks: Sequence[str] = ()) -> str:
    """All tables, each with its heading, its caption and its footnotes."""
    parts = [_table(table) for table in tables]
    toned = any(field.tone for table in tables for row in table.rows for field in row)
    reading = [*dict.fromkeys(text for table in tables for text in table.reading), *[LEGEND] * toned]
    notes = [" ".join(reading), *remarks]
    return "\n".join([*parts, *(f"{_escape(note)}\n" for note in notes)])


def _table(table: Table) -> str:
    lines = [*(f"### {_escape(table.title)}", "", _escape(table.caption), ""), *_grid(table)]
    if table.footnotes:
        lines += ["", "<br>".join(f"<sup>{mark}</sup> {_escape(text)}" for mark, text in table.footnotes.items())]
    return "\n".join([*lines, ""])


def _grid(table: Table) -> list[str]:
    """The lines of the table, its columns padded: what is read on a screen should stand straight."""
    titles = [_escape(f"{column.group} {column.title}".strip()) for column in table.columns]
    rows = [[_field(field) for field in row] for row in table.rows]
    # A rule of a colon alone would be none, and the table a paragraph.
    widths = [max(3, *map(len, column)) for column in zip(titles, *rows, strict=True)]

    def line(texts: Sequence[str]) -> str:
        padded = (PAD[c.align](text, width) for c, text, width in zip(table.columns, texts, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = [RULE[column.align](width) for column, width in zip(table.columns, widths, strict=True)]
    return [line(titles), f"| {' | '.join(rule)} |", *map(line, rows)]


def _field(field: Field) -> str:
    marks = f"<sup>{field.marks}</sup>" if field.marks else ""
    return _escape(field.text) + TONES[field.tone] + " \\*" * field.starred + marks


def _escape(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_|~]|\](?=\())", r"\\\1", text)
