"""Tables in GitHub's Markdown. It has no colours: ▲ means better and ▼ worse."""

import re
from collections.abc import Sequence

from qbench.output import on_one_line
from qbench.report.tables import Field, Table, shared_reading

TONES = {"better": " ▲", "worse": " ▼", "same": "", None: ""}
# Code in a sentence is shown as code; all other signs of Markdown are escaped.
MARKUP = re.compile(r"(`qbench [^`|]*`)|([\\`*_|~]|\](?=\())")
ALIGNMENTS = {"l": "left", "c": "center", "r": "right"}


def markdown(tables: Sequence[Table], remarks: Sequence[str] = (), lead: Sequence[str] = ()) -> str:
    """All tables, each with its heading, its caption and its footnotes; lead: sentences above them, one per line."""
    notes = [" ".join(shared_reading(tables)), *remarks]
    first = ["\n".join(f"- {_escape(sentence)}" for sentence in lead) + "\n"] if lead else []
    return "\n".join([*first, *map(_table, tables), *(f"{_escape(note)}\n" for note in notes)])


def _table(table: Table) -> str:
    parts = [f"### {_escape(table.title)}", _escape(table.caption), _grid(table)]
    if table.footnotes:
        parts.append("<br>".join(f"<sup>{mark}</sup> {_escape(text)}" for mark, text in table.footnotes.items()))
    return "\n\n".join([*parts, *filter(None, [_escape(table.count)])]) + "\n"


def _grid(table: Table) -> str:
    from tabulate import tabulate

    return tabulate(
        [[_field(field) for field in row] for row in table.rows],
        headers=[_escape(f"{column.group} {column.title}".strip()) for column in table.columns],
        tablefmt="pipe",
        colalign=[ALIGNMENTS[column.align] for column in table.columns],
        disable_numparse=True,
    )


def _field(field: Field) -> str:
    star = " \\*" if field.starred else ""
    marks = f"<sup>{field.marks}</sup>" if field.marks else ""
    return _escape(field.text) + TONES[field.tone] + star + marks


def _escape(text: str) -> str:
    text = on_one_line(text).replace("&", "&amp;").replace("<", "&lt;")
    return MARKUP.sub(lambda found: found[1] or f"\\{found[2]}", text)
