"""Results as text: tables in every format, comparisons and audits. What notebooks and the command line call."""

from pathlib import Path
from typing import TYPE_CHECKING

from qbench.errors import did_you_mean
from qbench.numbers import counted
from qbench.report.compare import compare, comparison_remarks, comparison_rows, comparison_tables
from qbench.report.delta import ReportData, read_report
from qbench.report.kinds import DEFAULT_KIND, KINDS, LONE_KIND, NoRows, table_kind
from qbench.report.latex import DEFAULT_COLUMNS, latex
from qbench.report.markdown import markdown
from qbench.report.notebook import Tables
from qbench.report.remarks import remarks, remarks_on_imported, remarks_on_suspicious
from qbench.report.results import ReportError
from qbench.report.terminal import draws_tables, terminal
from qbench.report.tidy import to_csv, to_json

if TYPE_CHECKING:
    from qbench.report.analysis_compare import AnalysisComparison
    from qbench.report.tidy import DataRow

__all__ = ["COMPARISON_FORMATS", "DEFAULT_KIND", "FORMATS", "KINDS", "audit", "comparison", "render", "table"]

TERMINAL = "terminal"  # what is shown on a terminal unless a format is chosen
FOR_PEOPLE = {"md": markdown, "latex": latex, TERMINAL: terminal}
FOR_PROGRAMS = {"csv": to_csv, "json": to_json}
COMPARISON_FORMATS = ("md", "latex", *FOR_PROGRAMS)
FORMATS = (*COMPARISON_FORMATS, "html")


def default_format() -> str:
    """Tables for the eye on a terminal, Markdown elsewhere."""
    return TERMINAL if draws_tables() else "md"


def table(
    source: Path | str,
    format: str = "md",
    kind: str | None = None,
    *,
    standalone: bool = False,
    columns: int | None = None,
) -> Tables:
    """The tables of a folder of records or of published numbers, as text that has `to_frame()` and `figures()`.

    format: md, latex, csv, json or html. kind: default delta, or damage in md and latex if no family has two models;
    with html, default all kinds.

    With latex: standalone makes a document that compiles as it is; columns is how many columns of a page a table spans,
    1 or 2 (default 2).
    """
    report = read_report(source)
    text = render(report, format, kind, standalone=standalone, columns=columns)
    return Tables.of(text, report, format, kind)


def render(
    report: ReportData,
    format: str,
    kind: str | None = None,
    *,
    standalone: bool = False,
    columns: int | None = None,
) -> str:
    """The tables of results that were read."""
    _check_format(format, FORMATS)
    for option, given in (("standalone", standalone), ("columns", columns)):
        if given and format != "latex":
            raise ReportError(f"{option} needs the format latex; the format is {format}.")
    if format == "html":
        from qbench.report.html import page  # reads audits, and so needs numpy

        return page(report, kind)
    lone = bool(report.damages) and not report.results.has_pairs and format not in FOR_PROGRAMS
    chosen = table_kind(kind or (LONE_KIND if lone else DEFAULT_KIND))
    if format in FOR_PROGRAMS:
        if isinstance(chosen.rows, NoRows):
            raise ReportError(f"--kind {chosen.name} has no {format}. {chosen.rows.reason}")
        return FOR_PROGRAMS[format](chosen.rows(report))
    tables = chosen.tables(report)
    if not tables:
        others = ", ".join(kind.name for kind in KINDS.values() if kind.tables(report))
        instead = f"; it has {others}." if others else "."
        why = f"{report.results.source} has no data for --kind {chosen.name}{instead} {chosen.why_none(report)}"
        raise ReportError(why.rstrip())
    notes = [*remarks_on_suspicious(report), *remarks(report), *chosen.remarks(report)]
    lead = chosen.lead(report)
    if format == "latex":
        return latex(tables, notes, lead, standalone=standalone, columns=columns or DEFAULT_COLUMNS)
    return FOR_PEOPLE[format](tables, notes, lead)


def comparison(source: Path | str, published: Path | str, format: str = "md") -> str:
    """Our numbers next to published ones."""
    _check_format(format, COMPARISON_FORMATS)
    ours, theirs = read_report(source), read_report(published)
    analyses = _compared_analyses(ours, theirs)
    try:
        found = compare(ours, theirs)
    except ReportError:
        if not analyses:
            raise
        found = []  # no scores in common, but analyses
    if format in FOR_PROGRAMS:
        return FOR_PROGRAMS[format](_joined(comparison_rows(found), analyses))
    from qbench.report.analysis_compare import analysis_comparison_tables

    tables = [*comparison_tables(found), *analysis_comparison_tables(analyses)]
    notes = [*comparison_remarks(found, theirs), *remarks_on_imported(ours)] if found else []
    return FOR_PEOPLE[format](tables, notes)


def _compared_analyses(ours: ReportData, theirs: ReportData) -> "list[AnalysisComparison]":
    if not theirs.results.analysis_files:
        return []
    from qbench.report.analysis_compare import compare_analyses

    return compare_analyses(ours, theirs)


def _joined(scores: "list[DataRow]", analyses: "list[AnalysisComparison]") -> "list[DataRow]":
    """Rows of both; if both have rows, each gets the other's columns too."""
    if not analyses:
        return scores
    from qbench.report.analysis_compare import analysis_comparison_rows

    rows = [*scores, *analysis_comparison_rows(analyses)]
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def audit(source: Path | str, format: str = "md") -> tuple[str, bool]:
    """The audits of a set of results with what looks unquantized or impossible, and whether anything does."""
    from qbench.report.audits import audit_table  # needs numpy

    report = read_report(source)
    audits, found = audit_table(report.results), report.findings
    scores = sum(len(result.scores) for result in report.results.parts)
    what = counted(len(found), "finding") if found else "nothing suspicious"
    cells = counted(len(report.results.parts), "cell")
    verdict = f"{what} among {counted(scores, 'score')} of {cells} in {source}"
    if not scores and not found:
        verdict = f"no scores to audit: {cells} in {source}"
    tables, lines = [audits] if audits else [], [*map(str, found), verdict]
    if format == TERMINAL:
        return terminal(tables, lines), bool(found)
    return "\n".join([*([markdown(tables)] if tables else []), *lines, ""]), bool(found)


def _check_format(format: str, known: tuple[str, ...]) -> None:
    if format not in (*known, TERMINAL):
        raise ReportError(f"format is {format!r}; it must be one of {', '.join(known)}.{did_you_mean(format, known)}")
