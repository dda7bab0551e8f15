"""The commands `check`, `accept` and `power`: arguments in, text and files out."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.command import Commands, add_command
from qbench.errors import InputError

if TYPE_CHECKING:
    from qbench.gate.verdict import Report

PASSED, FAILED = 0, 1
SUMMARY = "GITHUB_STEP_SUMMARY"  # GitHub's runners name a file by it


def add_check(commands: Commands) -> None:
    """The command `check`."""
    parser = add_command(
        commands,
        "check",
        "hold a run against its baseline: exit code 1 if a score got worse or an audit changed",
        example="qbench check results/runs/mini --baseline results/mini --junit gate.xml",
    )
    _add_folders(parser)
    parser.add_argument("--scores-only", action="store_true", help="do not compare the audits")
    for name in ("junit", "markdown", "json"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write the report as {name} too")
    parser.set_defaults(run=_check)


def add_accept(commands: Commands) -> None:
    """The command `accept`."""
    parser = add_command(
        commands,
        "accept",
        "make a run the new baseline, after showing what changes; its CHANGES.jsonl keeps the reason",
        example='qbench accept results/runs/mini --baseline results/mini --reason "transformers 5.23: another kernel"',
    )
    _add_folders(parser)
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why the baseline changes")
    parser.set_defaults(run=_accept)


def add_power(commands: Commands) -> None:
    """The command `power`."""
    parser = add_command(
        commands,
        "power",
        "how many documents the gate needs to see which loss, from the noise of recorded results",
        example="qbench power results/mini --against results/runs/mini",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of records")
    against = "another run of the same cells; by default, quantized cells are held against their unquantized ones"
    parser.add_argument("--against", type=Path, metavar="DIR", help=against)
    parser.add_argument("--format", choices=("text", "markdown"), default="text", help="text by default")
    parser.set_defaults(run=_power)


def _add_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of records, as `qbench run` writes them")
    parser.add_argument("--baseline", type=Path, metavar="DIR", required=True, help="the folder to hold it against")


def _check(options: argparse.Namespace) -> int:
    from qbench.gate.github import annotations
    from qbench.gate.terminal import to_text
    from qbench.gate.verdict import check

    report = check(options.folder, options.baseline, scores_only=options.scores_only)
    sys.stdout.write(to_text(report))
    _write_files(options, report)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in annotations(report):
            print(line)
    return PASSED if report.passed else FAILED


def _accept(options: argparse.Namespace) -> int:
    from qbench.gate.accept import accept, is_new
    from qbench.gate.terminal import to_text
    from qbench.gate.verdict import check

    report, why_none, new = None, "", is_new(options.baseline)
    try:
        report = check(options.folder, options.baseline)
        print(to_text(report))
    except InputError as error:  # a first baseline, or one of other documents: that is what accept is for
        why_none = str(error)
        print(f"Not compared: {why_none}\n")
    size = accept(options.folder, options.baseline, options.reason, report, why_none)
    became = "is a new baseline:" if new else "is now"
    print(f"{options.baseline} {became} what {options.folder} was ({size / 1e6:.2f} MB).")
    return PASSED


def _power(options: argparse.Namespace) -> int:
    from qbench.gate.power import power, to_text

    print(to_text(power(options.folder, options.against), options.format))
    return PASSED


def _write_files(options: argparse.Namespace, report: "Report") -> None:
    from qbench.gate.as_json import to_json
    from qbench.gate.junit import to_junit
    from qbench.gate.markdown import to_markdown

    try:
        for file, render in ((options.junit, to_junit), (options.markdown, to_markdown), (options.json, to_json)):
            if file is not None:
                file.write_text(render(report), encoding="utf-8")
        if summary := os.environ.get(SUMMARY):
            with open(summary, "a", encoding="utf-8") as out:
                out.write(to_markdown(report))
    except OSError as error:
        raise InputError(f"{error.filename}: the report cannot be written ({error.strerror}).") from None
