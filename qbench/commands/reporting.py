"""`qbench table`, `compare` and `audit`."""

import argparse
import sys
from pathlib import Path

from qbench.commands.common import DONE, FAILED, RESULTS, Commands, add, write
from qbench.errors import InputError
from qbench.numbers import counted

SUFFIXES = {".md": "md", ".tex": "latex", ".csv": "csv", ".json": "json", ".html": "html"}
ON_SCREEN = (
    "default: formatted tables on a terminal, md in a pipe; with --out, the format of the file's extension "
    f"({', '.join(SUFFIXES)})"
)


def add_table(commands: Commands) -> None:
    from qbench.report.kinds import DEFAULT_KIND, KINDS, LONE_KIND
    from qbench.report.render import FORMATS

    purpose = "show results as tables (Markdown, LaTeX, CSV, JSON), as an HTML report, or as plots"
    example = (
        "qbench table results/runs/mini --format latex --kind damage --out damage.tex\n"
        "  qbench table results/runs/mini --plots figures"
    )
    parser = add(commands, "table", _table, purpose, example)
    parser.add_argument("source", type=Path, metavar="DIR", help=RESULTS)
    parser.add_argument("--format", choices=FORMATS, help=f"{ON_SCREEN}; csv and json contain all metrics")
    kinds = "; ".join(f"{kind.name}: {kind.help}" for kind in KINDS.values())
    default = f"{DEFAULT_KIND}, or {LONE_KIND} if no family has two models (csv and json: always {DEFAULT_KIND})"
    parser.add_argument("--kind", choices=KINDS, help=f"{kinds}. Default: {default}; with html, all kinds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to this file instead of the screen")
    parser.add_argument("--standalone", action="store_true", help="with latex: write a complete document")
    columns = "with latex: 1 for tables that fit one column of a page (table), 2 for both (table*); default: 2"
    parser.add_argument("--columns", type=int, choices=(1, 2), help=columns)
    plots = "write plots to this folder, as PNG, SVG and PDF; also print tables if --format, --kind or --out is given"
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help=plots)
    widths = "with --plots: column (of a paper), page, or a number of inches; default: page"
    parser.add_argument("--figure-width", type=_width, metavar="WIDTH", help=widths)


def _width(text: str) -> float:
    from qbench.report.looks import figure_width

    try:
        return figure_width(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_compare(commands: Commands) -> None:
    from qbench.report.render import COMPARISON_FORMATS

    purpose = "check whether results agree with published numbers, and whether the published models were quantized"
    example = (
        "qbench compare results/runs/mini --with published.csv\n\n"
        "published.csv has the columns of `qbench table DIR --format csv`"
    )
    parser = add(commands, "compare", _compare, purpose, example)
    parser.add_argument("source", type=Path, metavar="DIR", help=RESULTS)
    parser.add_argument(
        "--with",
        dest="published",
        type=Path,
        metavar="DIR",
        required=True,
        help="published numbers: a CSV file or folder",
    )
    parser.add_argument("--format", choices=COMPARISON_FORMATS, help=ON_SCREEN)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to this file instead of the screen")


def add_audit(commands: Commands) -> None:
    purpose = (
        "show the audits of results, and list scores that look unquantized or impossible; exit code 1 if there are "
        "such scores"
    )
    parser = add(commands, "audit", _audit, purpose, "qbench audit results/runs/mini")
    parser.add_argument("source", type=Path, metavar="DIR|CSV", help=RESULTS)


def _table(options: argparse.Namespace) -> int:
    from qbench.report.delta import read_report
    from qbench.report.render import render

    if options.figure_width and not options.plots:
        raise InputError("--figure-width needs --plots FOLDER.")
    report, format = read_report(options.source), _format(options)
    given = (options.format, options.kind, options.out, options.standalone, options.columns)
    wanted = not options.plots or any(given)
    how = {"standalone": options.standalone, "columns": options.columns}
    text = render(report, format, options.kind, **how) if wanted else ""
    if options.plots:
        from qbench.report.looks import PAGE
        from qbench.report.plots import write_plots

        files = write_plots(report, options.plots, options.figure_width or PAGE)
        names = {file.stem for file in files}
        print(f"{counted(len(names), 'plot')} in {options.plots}, each as PNG, SVG and PDF", file=sys.stderr)
    if wanted:
        write(text, options.out, format)
    return DONE


def _format(options: argparse.Namespace) -> str:
    """The format that was asked for, or that the file's name says; on a terminal, tables for the screen."""
    from qbench.report.render import default_format

    if options.format or not options.out:
        return options.format or default_format()
    if found := SUFFIXES.get(options.out.suffix.lower()):
        return found
    suffix = options.out.suffix
    what = f"{suffix} is not a format" if suffix else "the name has no extension, so it does not say the format"
    raise InputError(f"{options.out}: {what}; use {', '.join(SUFFIXES)}, or add --format.")


def _compare(options: argparse.Namespace) -> int:
    from qbench.report.render import comparison

    format = _format(options)
    write(comparison(options.source, options.published, format), options.out, format)
    return DONE


def _audit(options: argparse.Namespace) -> int:
    from qbench.report.render import audit, default_format

    format = default_format()
    text, found = audit(options.source, format)
    write(text, None, format)
    return FAILED if found else DONE
