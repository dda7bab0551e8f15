"""Tables in LaTeX as papers have them: booktabs, multirow, cmidrule and textcolor."""

import re
import unicodedata
from collections.abc import Sequence

from qbench.output import on_one_line
from qbench.report.tables import Field, Table

PACKAGES = ("booktabs", "graphicx", "multirow", "xcolor")
TONE_COLOURS = {"better": "green!60!black", "worse": "red!70!black", "same": "gray"}
TONE_MARKS = {"better": "▲", "worse": "▼", "same": ""}  # colours alone are lost in print
MAX_ROWS_PER_PAGE = 45  # longer tables become several
SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "`": r"\textasciigrave{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "Δ": r"$\Delta$",
    "−": "$-$",
    "–": "--",
    "…": r"\ldots{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "×": r"$\times$",
    "‖": r"$\|$",
    "ε": r"$\varepsilon$",
    "≤": r"$\leq$",
    "±": r"$\pm$",
    "▲": r"$\bigtriangleup$",  # the filled ones need amssymb
    "▼": r"$\bigtriangledown$",
}


def latex(
    tables: Sequence[Table], remarks: Sequence[str] = (), lead: Sequence[str] = (), *, standalone: bool = False
) -> str:
    """All tables as floats to paste into a paper, or as a whole document; lead: sentences above them."""
    parts, labels = [], set[str]()
    for table in tables:
        pieces = _pieces(table)
        for i, rows in enumerate(pieces):
            suffix = f" (part {i + 1} of {len(pieces)})" if len(pieces) > 1 else ""
            label = _label(f"{table.name}-{i + 1}" if suffix else table.name, labels)
            parts.append(_float(table, rows, suffix, label))
    parts += [f"% {on_one_line(remark)}\n" for remark in remarks]  # a line break would end the comment
    needs = f"% Needs \\usepackage{{{','.join(PACKAGES)}}}\n"
    first = "".join(f"{_escape(sentence)}\n\n" for sentence in lead)
    if standalone:
        return _document([first + parts[0], *parts[1:]])
    return "\n".join([needs, *(f"% {line}\n" for line in first.splitlines() if line), *parts])


def _document(parts: Sequence[str]) -> str:
    packages = [f"\\usepackage{{{name}}}" for name in PACKAGES]
    head = ["\\documentclass{article}", "\\usepackage[margin=2cm]{geometry}", *packages, "\\begin{document}", ""]
    return "\n".join([*head, "\\clearpage\n".join(parts), "\\end{document}", ""])


def _float(table: Table, rows: Sequence[Sequence[Field]], suffix: str, label: str) -> str:
    caption = [table.caption, *table.reading, *filter(None, [table.count])]
    lines = [
        "\\begin{table}[t]",
        "\\centering",
        "\\small",
        "\\setlength{\\tabcolsep}{4pt}",
        f"\\caption{{{_escape(' '.join(caption) + suffix)}}}",
        f"\\label{{{label}}}",
        "\\smallskip",
        # Its natural width, but at most that of the page.
        "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%",
        f"\\begin{{tabular}}{{{''.join(column.align for column in table.columns)}}}",
        "\\toprule",
        *_header(table),
        "\\midrule",
        *_body(table, rows),
        "\\bottomrule",
        "\\end{tabular}}",
    ]
    used = {mark for row in rows for field in row for mark in field.marks.split(",")}
    notes = [f"$^{{{mark}}}$ {_escape(text)}" for mark, text in table.footnotes.items() if mark in used]
    if notes:
        lines += ["\\par\\smallskip", "\\parbox{\\linewidth}{\\footnotesize " + "\\\\\n".join(notes) + "}"]
    return "\n".join([*lines, "\\end{table}", ""])


def _header(table: Table) -> list[str]:
    titles = [_escape(column.title) for column in table.columns]
    if not table.groups:
        return [_line(titles)]
    above, rules, start = [], [], 0
    for group, span in table.groups:
        end = start + span
        if group:
            above.append(f"\\multicolumn{{{span}}}{{c}}{{{_escape(group)}}}")
            rules.append(f"\\cmidrule(lr){{{start + 1}-{end}}}")
        else:
            above += [f"\\multirow{{2}}{{*}}{{{title}}}" for title in titles[start:end]]
            titles[start:end] = [""] * span
        start = end
    return [_line(above), "".join(rules), _line(titles)]


def _body(table: Table, rows: Sequence[Sequence[Field]]) -> list[str]:
    """Rows: equal neighbours in the leading columns form a block, and each block begins with a rule."""
    lines: list[str] = []
    for i, row in enumerate(rows):
        heads = [_starts(rows, i, column) for column in range(table.heads)]
        if i and any(heads):
            first = heads.index(True) + 1
            lines.append("\\midrule" if first == 1 else f"\\cmidrule(lr){{{first}-{len(row)}}}")
        fields = [_field(field) for field in row]
        for column, starts in enumerate(heads):
            height = _height(rows, i, column)
            if not starts:
                fields[column] = ""
            elif height > 1:
                fields[column] = f"\\multirow{{{height}}}{{*}}{{{fields[column]}}}"
        lines.append(_line(fields))
    return lines


def _starts(rows: Sequence[Sequence[Field]], row: int, column: int) -> bool:
    """Whether the field begins a block: it, or one to its left, differs from the one above."""
    if row == 0:
        return True
    return [f.text for f in rows[row][: column + 1]] != [f.text for f in rows[row - 1][: column + 1]]


def _height(rows: Sequence[Sequence[Field]], row: int, column: int) -> int:
    end = row + 1
    while end < len(rows) and not _starts(rows, end, column):
        end += 1
    return end - row


def _pieces(table: Table) -> list[Sequence[Sequence[Field]]]:
    """Rows page by page, cut where a block of the first column begins if possible."""
    pieces, rows = [], table.rows
    while len(rows) > MAX_ROWS_PER_PAGE:
        cuts = [i for i in range(1, MAX_ROWS_PER_PAGE + 1) if _starts(rows, i, 0)]
        cut = cuts[-1] if cuts else MAX_ROWS_PER_PAGE
        pieces.append(rows[:cut])
        rows = rows[cut:]
    return [*pieces, rows]


def _field(field: Field) -> str:
    text = re.sub(r"(?<![\w.])-(?=\d)", "$-$", _escape(field.text))
    if field.tone:
        text = f"\\textcolor{{{TONE_COLOURS[field.tone]}}}{{{text}{_escape(TONE_MARKS[field.tone])}}}"
    marks = ",".join(mark for mark in ("*" if field.starred else "", field.marks) if mark)
    return text + (f"$^{{{marks}}}$" if marks else "")


def _line(fields: Sequence[str]) -> str:
    return " & ".join(fields) + r" \\"


def _label(name: str, taken: set[str]) -> str:
    label = unique = "tab:" + re.sub(r"[^A-Za-z0-9]+", "-", name)
    while unique in taken:
        unique = f"{label}-{len(taken)}"
    taken.add(unique)
    return unique


def _escape(text: str) -> str:
    return "".join(SPECIAL.get(c) or (c if c.isascii() else _plain(c)) for c in on_one_line(text))


def _plain(character: str) -> str:
    """The nearest ASCII text: pdflatex stops at characters that its fonts lack."""
    return unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode() or "?"
