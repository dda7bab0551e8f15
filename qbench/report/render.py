"""Results as text: tables in every format, comparisons and audits. What notebooks and the command line call."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.report.outcomes import ReportError

if TYPE_CHECKING:
    from qbench.report.delta import Report
    from qbench.report.tables import Kind, Table

FORMATS = ("md", "latex", "csv", "json", "html")
KINDS = {
    "delta": "softpick − softmax",
    "damage": "quantized − unquantized of each, and flips",
    "baseline": "the unquantized models, families side by side",
    "summary": "the damages of one metric per task on one screen",
}


def table(source: Path | str, format: str = "md", kind: "Kind | None" = None, *, standalone: bool = False) -> str:
    """The tables of a folder of records or of published numbers. kind: by default delta, and with html all of them.

    standalone: with latex, a document that compiles as it is.
    """
    from qbench.report.delta import read_report

    return render(read_report(source), format, kind, standalone=standalone)


def render(report: "Report", format: str, kind: "Kind | None" = None, *, standalone: bool = False) -> str:
    """The tables of results that were read."""
    from qbench.report.tables import remarks, tables

    if standalone and format != "latex":
        raise ReportError(f"--standalone is of --format latex; the format is {format}.")
    if format == "html":
        from qbench.report.html import page

        return page(report, kind)
    kind = kind or "delta"
    if format in ("csv", "json"):
        from qbench.report import tidy

        if kind == "summary":
            raise ReportError(f"{format} has all numbers of the summary in --kind damage and --kind delta.")
        rows = tidy.rows(report, kind)
        return tidy.to_csv(rows) if format == "csv" else tidy.to_json(rows)
    made = tables(report, kind)
    if not made:
        raise ReportError(f"{report.outcomes.source} has nothing for a table of kind {kind}.")
    return _for_people(format)(made, remarks(report, kind), standalone)


def comparison(source: Path | str, published: Path | str, format: str = "md") -> str:
    """Our numbers beside published ones."""
    from qbench.report import compare, tidy
    from qbench.report.delta import read_report

    ours, theirs = read_report(source), read_report(published)
    found = compare.compare(ours, theirs)
    if format in ("csv", "json"):
        rows = compare.comparison_rows(found)
        return tidy.to_csv(rows) if format == "csv" else tidy.to_json(rows)
    return _for_people(format)(compare.comparison_tables(found), compare.comparison_remarks(found, theirs), False)


def audit(source: Path | str) -> tuple[str, bool]:
    """The audits of a set of results and what looks unquantized or impossible in it, and whether anything does."""
    from qbench.report.audits import audit_table
    from qbench.report.delta import read_report
    from qbench.report.markdown import markdown
    from qbench.report.suspicious import suspicious

    report = read_report(source)
    made = audit_table(report.outcomes)
    findings = suspicious(report)
    cells = report.outcomes.cells
    scores = sum(len(outcome.scores) for outcome in cells)
    what = f"{len(findings)} suspicious" if findings else "nothing suspicious"
    last = f"{what} among {scores} scores of {len(cells)} cells in {source}"
    return "\n".join([*([markdown([made])] if made else []), *map(str, findings), last]), bool(findings)


def _for_people(format: str) -> "Callable[[Sequence[Table], Sequence[str], bool], str]":
    if format == "latex":
        from qbench.report.latex import latex

        return lambda tables, remarks, standalone: latex(tables, remarks, standalone=standalone)
    from qbench.report.markdown import markdown

    return lambda tables, remarks, standalone: markdown(tables, remarks)
