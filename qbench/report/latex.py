"""Tables in LaTeX as papers have them: booktabs, multirow, cmidrule and textcolor.

A table fits the column or the page it is for: TeX sets it in the largest type that fits, and never in less than 7
points; what is wider than that is cut into several tables.
"""

import re
import unicodedata
from collections.abc import Sequence

from qbench.output import on_one_line
from qbench.report.fitting import MINUS, Piece, block_height, column_gap, header_lines, pieces, starts_block
from qbench.report.results import ReportError
from qbench.report.tables import Column, Field, Table, shared_reading

PACKAGES = ("booktabs", "multirow", "xcolor")
# Sets a table in the first of three sizes that fits.
FITTING = r"""\providecommand{\fittable}[1]{%
  \sbox0{\fontsize{9}{10.8}\selectfont#1}%
  \ifdim\wd0>\linewidth\sbox0{\fontsize{8}{9.6}\selectfont#1}\fi
  \ifdim\wd0>\linewidth\sbox0{\fontsize{7}{8.4}\selectfont#1}\fi
  \usebox0}
"""
NOTE_SIZE = r"\fontsize{7}{8.4}\selectfont"
# By the number of columns that a table spans: its environment, and the points it may count on. The column is ACL's
# (NeurIPS and ICML have more), the page that of NeurIPS (ACL and ICML have more).
FLOATS = {1: ("table", 219.0), 2: ("table*", 397.0)}
DEFAULT_COLUMNS = 2  # in a document with one column, table* is table
BREAK = r"\allowbreak{}"
CODE = re.compile(r"`([^`]+)`")
TONE_COLOURS = {"better": "green!60!black", "worse": "red!70!black", "same": "gray"}
TONE_MARKS = {"better": "▲", "worse": "▼", "same": ""}  # colours alone are lost in print
SPECIAL = (
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {raised: f"$^{n}$" for n, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "`": r"\textquoteleft{}",  # \textasciigrave is a bitmap (Type 3) without T1 encoding
        "↑": r"$\uparrow$",
        "↓": r"$\downarrow$",
        "Δ": r"$\Delta$",
        "−": "$-$",
        "–": r"\textendash{}",
        "…": r"\ldots{}",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        "×": r"$\times$",
        "‖": r"$\|$",
        "ε": r"$\varepsilon$",
        "≤": r"$\leq$",
        "≥": r"$\geq$",
        "·": r"$\cdot$",
        "⁻": "$^{-}$",
        "÷": r"$\div$",
        "±": r"$\pm$",
        "▲": r"$\bigtriangleup$",  # the filled ones need amssymb
        "▼": r"$\bigtriangledown$",
    }
)


def latex(
    tables: Sequence[Table],
    remarks: Sequence[str] = (),
    lead: Sequence[str] = (),
    *,
    standalone: bool = False,
    columns: int = DEFAULT_COLUMNS,
) -> str:
    """All tables as floats to paste into a paper, or as a whole document.

    remarks: sentences that belong to the text, with those on how to read the tables. lead: the answer, a comment unless
    it is a whole document. columns: how many of a page's columns a table spans, 1 or 2.
    """
    if columns not in FLOATS:
        raise ReportError(f"columns is {columns}; a table spans 1 or 2 columns of a page.")
    placement = "!htp" if standalone else "t"  # in a whole document, as many on a page as fit
    environment, width = FLOATS[columns]
    parts, labels = [], set[str]()
    for table in tables:
        cut = pieces(table, width)
        for i, piece in enumerate(cut, 1):
            caption, name, notes = table.caption, table.name, _footnotes(table)
            if len(cut) > 1:
                caption, name = f"{caption.removesuffix('.')} (part {i} of {len(cut)}).", f"{name}-{i}"
            if i < len(cut):
                notes = []  # once, under the last part
            inside = _tabular(piece, column_gap(piece, width))
            parts.append(_float(inside, caption, _label(name, labels), notes, environment, placement))
    closing = _closing(tables, remarks)
    first = "".join(f"{escape(sentence)}\n\n" for sentence in lead)
    if standalone:
        return _document([first + closing + parts[0], *parts[1:]], columns)
    needs = f"% Needs \\usepackage{{{','.join(PACKAGES)}}}\n"
    return "\n".join([needs, *(f"% {line}\n" for line in first.splitlines() if line), FITTING, *parts, closing])


def _document(parts: Sequence[str], columns: int) -> str:
    packages = [f"\\usepackage{{{name}}}" for name in PACKAGES]
    option = "[twocolumn]" if columns == 1 else ""
    head = [f"\\documentclass{option}{{article}}", "\\usepackage[margin=2cm]{geometry}", "\\usepackage{times}"]
    waiting = f"\\extrafloats{{{len(parts)}}}"  # without text between them, most tables wait for the end
    start = ["\\raggedbottom", "\\begin{document}", ""]
    return "\n".join([*head, *packages, waiting, FITTING, *start, *parts, "\\end{document}", ""])


def _closing(tables: Sequence[Table], remarks: Sequence[str]) -> str:
    """How to read the tables, once for all of them, and what to know about the results: for the text or an appendix."""
    paragraphs = {"How to read the tables": shared_reading(tables), "About these results": remarks}
    return "".join(
        f"\\paragraph{{{title}.}} {{\\sloppy {escape(' '.join(sentences))}\\par}}\n\n"
        for title, sentences in paragraphs.items()
        if sentences
    )


def _footnotes(table: Table) -> list[str]:
    """What stands under a table."""
    used = {mark for row in table.rows for field in row for mark in field.marks.split(",")}
    notes = [escape(table.count)] if table.count else []
    return notes + [f"$^{{{mark}}}$ {escape(text)}" for mark, text in table.footnotes.items() if mark in used]


def _tabular(piece: Piece, gap: float) -> list[str]:
    """The table itself; gap: points between two columns."""
    return [
        f"\\setlength{{\\tabcolsep}}{{{gap / 2:g}pt}}",
        f"\\fittable{{\\begin{{tabular}}{{@{{}}{''.join(column.align for column in piece.columns)}@{{}}}}",
        "\\toprule",
        *_header(piece),
        "\\midrule",
        *_body(piece),
        "\\bottomrule",
        "\\end{tabular}}",
    ]


def _float(
    tabular: Sequence[str], caption: str, label: str, notes: Sequence[str], environment: str, placement: str
) -> str:
    lines = [
        f"\\begin{{{environment}}}[{placement}]",
        "\\centering",
        f"\\caption{{{escape(caption)}}}",
        f"\\label{{{label}}}",
        "\\smallskip",
        *tabular,
    ]
    if notes:
        lines += ["\\par\\smallskip", f"\\parbox{{\\linewidth}}{{{NOTE_SIZE} " + "\\\\\n".join(notes) + "}"]
    return "\n".join([*lines, f"\\end{{{environment}}}", ""])


def _header(piece: Piece) -> list[str]:
    titles = [_title(column, piece, n) for n, column in enumerate(piece.columns)]
    if not piece.groups:
        return [_line(titles)]
    above, rules, start = [], [], 0
    for group, span in piece.groups:
        end = start + span
        if group:
            above.append(f"\\multicolumn{{{span}}}{{c}}{{{escape(group)}}}")
            rules.append(f"\\cmidrule(lr){{{start + 1}-{end}}}")
        else:
            above += [""] * span
        start = end
    return [_line(above), "".join(rules), _line(titles)]


def _title(column: Column, piece: Piece, place: int) -> str:
    lines = [escape(line) for line in header_lines(column, piece.rows, place)]
    if len(lines) == 1:
        return lines[0]
    return f"\\begin{{tabular}}[b]{{@{{}}{column.align}@{{}}}}" + r"\\".join(lines) + "\\end{tabular}"


def _body(piece: Piece) -> list[str]:
    """Rows: equal neighbours in the leading columns form a block, and each block begins with a rule."""
    lines: list[str] = []
    for i, row in enumerate(piece.rows):
        across = piece.lines[i] if piece.lines else ""
        heads = [bool(across) or starts_block(piece.rows, i, column) for column in range(piece.heads)]
        if i and (across or any(heads)):
            first = 1 if across else heads.index(True) + 1
            lines.append("\\midrule" if first == 1 else f"\\cmidrule(lr){{{first}-{len(row)}}}")
        if across:
            lines.append(_line([f"\\multicolumn{{{len(row)}}}{{@{{}}l@{{}}}}{{\\textit{{{escape(across)}}}}}"]))
        fields = [_field(field) for field in row]
        for column, starts in enumerate(heads):
            height = block_height(piece.rows, i, column)
            if not starts:
                fields[column] = ""
            elif height > 1:
                fields[column] = f"\\multirow{{{height}}}{{*}}{{{fields[column]}}}"
        lines.append(_line(fields))
    return lines


def _field(field: Field) -> str:
    text = escape(MINUS.sub("−", field.text))
    if field.tone:
        text = f"\\textcolor{{{TONE_COLOURS[field.tone]}}}{{{text}{escape(TONE_MARKS[field.tone])}}}"
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


def escape(text: str) -> str:
    """LaTeX that shows the text; `code` is set in typewriter type."""
    parts = CODE.split(on_one_line(text))  # text and code in turn
    return "".join(_code(part) if i % 2 else _signs(part) for i, part in enumerate(parts))


def _code(text: str) -> str:
    return f"\\texttt{{{_signs(text).replace('/', '/' + BREAK)}}}"  # long paths would run into the margin


def _signs(text: str) -> str:
    signs = "".join(SPECIAL.get(c) or (c if c.isascii() else _plain(c)) for c in text)
    return signs.replace("--", "-{}-")  # two hyphens of an option would become a dash


def _plain(character: str) -> str:
    """The nearest ASCII text: pdflatex stops at characters that its fonts lack."""
    return unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode() or "?"
