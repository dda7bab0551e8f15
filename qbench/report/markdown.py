"""Tables in GitHub's Markdown. Colours do not survive there: ▲ is for the better and ▼ for the worse."""

import re
from collections.abc import Sequence

from qbench.report.tables import Field, Table

TONES = {"better": " ▲", "worse": " ▼", "same": "", None: ""}
LEGEND = "▲ for the better, ▼ for the worse, whichever way the metric points."
ALIGN = {"l": ":--", "c": ":-:", "r": "--:"}


def markdown(tables: Sequence[Table], remarks: Sequence[str] = ()) -> str:
    """All tables, each with its heading, its caption and its footnotes."""
    parts = [_table(table) for table in tables]
    toned = any(field.tone for table in tables for row in table.rows for field in row)
    reading = [*dict.fromkeys(text for table in tables for text in table.reading), *[LEGEND] * toned]
    notes = [" ".join(reading), *remarks]
    return "\n".join([*parts, *(f"{_escape(note)}\n" for note in notes)])


def _table(table: Table) -> str:
    columns = [f"{column.group} {column.title}".strip() for column in table.columns]
    lines = [
        *(f"### {_escape(table.title)}", "", _escape(table.caption), ""),
        _line([_escape(column) for column in columns]),
        _line([ALIGN[column.align] for column in table.columns]),
        *(_line([_field(field) for field in row]) for row in table.rows),
    ]
    if table.footnotes:
        lines += ["", "<br>".join(f"<sup>{mark}</sup> {_escape(text)}" for mark, text in table.footnotes.items())]
    return "\n".join([*lines, ""])


def _field(field: Field) -> str:
    marks = f"<sup>{field.marks}</sup>" if field.marks else ""
    return _escape(field.text) + TONES[field.tone] + " \\*" * field.starred + marks


def _line(fields: Sequence[str]) -> str:
    return f"| {' | '.join(fields)} |"


def _escape(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_|~]|\](?=\())", r"\\\1", text)
