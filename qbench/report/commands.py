"""The commands `table`, `compare` and `audit`. They read results and never import torch."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.command import Commands, add_command
from qbench.report.outcomes import ReportError

if TYPE_CHECKING:
    from qbench.report.delta import Report
    from qbench.report.tables import Kind

DONE, FAILED = 0, 1
FORMATS = ("md", "latex", "csv", "json", "html")
SOURCE = "a folder of records, as `qbench run` writes it, or a CSV file of published numbers or a folder of such"


def add_table(commands: Commands) -> None:
    """`qbench table`."""
    parser = add_command(
        commands,
        "table",
        "Δ tables of results: Markdown, LaTeX, CSV, JSON, an HTML report, plots",
        "qbench table results/runs/mini --format latex --kind damage --out damage.tex\n"
        "  qbench table results/paper --plots figures",
    )
    parser.add_argument("source", type=Path, metavar="DIR", help=SOURCE)
    parser.add_argument("--format", choices=FORMATS, default="md", help="default: md; csv and json have all metrics")
    parser.add_argument(
        "--kind",
        choices=("delta", "damage", "baseline", "summary"),
        help="delta: softpick − softmax (default); damage: quantized − unquantized of each, and flips; "
        "baseline: the unquantized, families side by side; summary: the damages of one metric a task on one screen. "
        "html has all of them unless told",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there instead of to the screen")
    parser.add_argument("--standalone", action="store_true", help="latex: a document of its own, to compile as it is")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write the plots there too, as PNG, SVG and PDF")
    parser.set_defaults(run=_table)


def add_compare(commands: Commands) -> None:
    """`qbench compare`."""
    parser = add_command(
        commands,
        "compare",
        "our numbers beside published ones: the difference, and whether it is within our interval",
        "qbench compare results/runs/paper-340m --with results/paper",
    )
    parser.add_argument("source", type=Path, metavar="DIR", help=SOURCE)
    parser.add_argument("--with", dest="published", type=Path, metavar="DIR", required=True, help="published numbers")
    parser.add_argument("--format", choices=("md", "latex", "csv", "json"), default="md", help="default: md")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there instead of to the screen")
    parser.set_defaults(run=_compare)


def add_audit(commands: Commands) -> None:
    """`qbench audit`."""
    parser = add_command(
        commands,
        "audit",
        "the audits of a set of results, and what looks unquantized or impossible in it; exit code 1 where "
        "something does",
        "qbench audit results/paper",
    )
    parser.add_argument("source", type=Path, metavar="DIR|CSV", help=SOURCE)
    parser.set_defaults(run=_audit)


def _table(options: argparse.Namespace) -> int:
    from qbench.report.delta import read_report

    if options.standalone and options.format != "latex":
        raise ReportError(f"--standalone is of --format latex; the format is {options.format}.")
    report = read_report(options.source)
    if options.plots:
        from qbench.report.plots import write_plots

        files = write_plots(report, options.plots)
        print(f"{len(files)} plots in {options.plots}", file=sys.stderr)
    _write(_rendered(report, options), options.out)
    return DONE


def _rendered(report: "Report", options: argparse.Namespace) -> str:
    from qbench.report.tables import remarks, tables

    kind: Kind = options.kind or "delta"
    if options.format == "html":
        from qbench.report.html import page

        return page(report, options.kind)
    if options.format in ("csv", "json"):
        from qbench.report import tidy

        if kind == "summary":
            raise ReportError(f"{options.format} has all numbers of the summary in --kind damage and --kind delta.")
        rows = tidy.rows(report, kind)
        return tidy.to_csv(rows) if options.format == "csv" else tidy.to_json(rows)
    made = tables(report, kind)
    if not made:
        raise ReportError(f"{options.source} has nothing for a table of kind {kind}.")
    return _for_people(options.format)(made, remarks(report, kind), standalone=options.standalone)


def _compare(options: argparse.Namespace) -> int:
    from qbench.report import compare, tidy
    from qbench.report.delta import read_report

    ours, published = read_report(options.source), read_report(options.published)
    found = compare.compare(ours, published)
    if options.format in ("csv", "json"):
        rows = compare.comparison_rows(found)
        text = tidy.to_csv(rows) if options.format == "csv" else tidy.to_json(rows)
    else:
        remarks = compare.comparison_remarks(found, published)
        text = _for_people(options.format)(compare.comparison_tables(found), remarks, standalone=False)
    _write(text, options.out)
    return DONE


def _audit(options: argparse.Namespace) -> int:
    from qbench.report.audits import audit_table
    from qbench.report.delta import read_report
    from qbench.report.markdown import markdown
    from qbench.report.suspicious import suspicious

    report = read_report(options.source)
    if table := audit_table(report.outcomes):
        print(markdown([table]))
    findings = suspicious(report)
    for finding in findings:
        print(finding)
    cells = report.outcomes.cells
    scores = sum(len(outcome.scores) for outcome in cells)
    what = f"{len(findings)} suspicious" if findings else "nothing suspicious"
    print(f"{what} among {scores} scores of {len(cells)} cells in {options.source}")
    return FAILED if findings else DONE


def _for_people(name: str) -> Callable[..., str]:
    if name == "latex":
        from qbench.report.latex import latex

        return latex
    from qbench.report.markdown import markdown

    return lambda tables, remarks, standalone: markdown(tables, remarks)


def _write(text: str, file: Path | None) -> None:
    if file is None:
        sys.stdout.write(text)
        return
    from qbench.records.store import write_atomically

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    except OSError as error:
        raise ReportError(f"{file} cannot be written ({error.strerror or error}).") from None
